"""Statistics, one home for each: what numbers say, with an interval.

May import `recipe`, `records`, `errors`, `files` and `extras`; no torch but in `precondition`'s arguments. Used by the
engine and everything above it.

- `interval`: `Interval` (value, low, high, level); those of a mean, a median, a weighted sum and a ratio.
- `noise_scale`: `NoiseScale`, `NoiseEstimate`; `precondition`: the same for Adam-like optimizers.
- `critical_batch`: `CriticalBatch`, what the noise scale predicts of it, `efficiency`; `steps_law`: the one fit of
  S = S_min · (1 + B_crit ÷ B), and `to_go_by`, the answer of `measure` and `plan`.
- `gain`: AdaScale's. `learning_curve`: ε(m) = α·m^β + γ. `timing`: rates and costs.
"""
