"""The gradient noise scale, with an interval and a verdict."""

from scalewise.noise.estimate import NoiseEstimate, ratio_of_means, weighted_mean
from scalewise.noise.scale import NoiseScale, signal_and_noise

__all__ = ["NoiseEstimate", "NoiseScale", "ratio_of_means", "signal_and_noise", "weighted_mean"]
