"""Why did it lose accuracy? Evidence from a run folder in, ranked findings out.

May import `engine` and below, and no torch: a diagnosis reads records.

- `diagnose`: `diagnose_folder`, `Diagnosis`, all checks. `evidence`: `Evidence`, `Finding`, and what checks share.
- `runs`: evidence from the folders of `scalewise train` and `sw.watch`; `observations`: the latter's files.
- The checks: `rates` (learning rate, schedule, warm-up), `amount` (steps, samples, finite numbers), `processes` (data,
  copies of the model, averages).
"""
