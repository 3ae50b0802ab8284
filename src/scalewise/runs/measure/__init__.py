"""How far can this model scale? Noise scale, critical batch, largest worker batch, throughput, sharpness.

May import: what `runs` may.
Public: `measure.measure`, also as `scalewise.measure`, its `request.MeasureRequest` and `measure.Measurement`. The
parts: `noise` (from gradients of `frozen` weights), `critical` (by training), `memory`, `throughput`, and `minima`
(sharpness and the loss between runs, on a loss `surface`).
"""
