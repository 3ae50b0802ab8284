"""How sharp a minimum is, and the loss between the weights of two runs.

May import: what `runs` may.
Public: `sharpness.sharpness`, `landscape.line` and `landscape.plane`, on the weights that `surface` loads.
"""
