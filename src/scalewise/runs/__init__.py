"""One file or folder per question: request in, result out. Stores, resumes, stops; public from Python.

May import: plan, doctor, engine, stats, tasks, nn, optim, schedules, recipe, records, errors, files, extras.
Public: one function per question, with the names of the command's flags. `scalewise` itself offers `fit`, `compare`,
`tune`, `measure`, `plan` and `forecast`; here are `profile.profile`, `bisect.bisect`, `replay.replay` and, in `bench`,
`devices.devices`, `collectives.collectives`, `scaling.scaling` and `parallelism.parallelism`. Beside them `run` (a run
in its folder: the one place that trains and stores), `request` (what requests share) and `processes` (a question that
several processes answer together).
"""
