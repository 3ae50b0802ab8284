"""Intervals, the noise scale, the gain, the critical-batch law, the learning curve: one home each."""
