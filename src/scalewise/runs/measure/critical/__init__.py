"""The critical batch, measured directly: by branches off a training, or by a sweep of steps to a loss.

May import: what `runs` may.
Public: `branch.branch` and `sweep.sweep`, each with its report. Both train `trials`, a sweep
at learning rates that `rates` finds; the law that is fitted is in `stats.critical_batch`.
"""
