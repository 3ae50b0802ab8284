"""Gradients with known mean and covariance, and how often the noise scale's interval covers what is true of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from scalewise.stats.noise_scale import NoiseEstimate, NoiseScale

GROUP_SAMPLES = 16


@dataclass(frozen=True)
class Setting:
    """Groups, dimensions, the noise scale in global batches, and steps."""

    groups: int
    dimensions: int
    noise_scale: float
    steps: int

    @property
    def truth(self) -> float:
        """In samples, with |G|² = 1."""
        return self.noise_scale * self.groups * GROUP_SAMPLES


@dataclass(frozen=True)
class Coverage:
    """How often an interval held the truth, how often it was unbounded, and how often it was called enough."""

    trials: int
    covered: float
    unbounded: float
    enough: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


SETTINGS = [
    Setting(groups, dimensions, noise_scale, steps)
    for steps in (50, 100)
    for groups in (2, 8)
    for dimensions in (2, 10, 200)
    for noise_scale in (0.05, 1.0, 20.0)
]


def frozen(setting: Setting, random: np.random.Generator) -> tuple[NoiseEstimate, float]:
    """An estimate at weights that do not move, and the truth."""
    scale = NoiseScale()
    mean = 1 / math.sqrt(setting.dimensions)
    deviation = math.sqrt(setting.truth / setting.dimensions / GROUP_SAMPLES)
    gradients = mean + deviation * random.standard_normal((setting.steps, setting.groups, setting.dimensions))
    mean_squares, squares = (gradients**2).sum(2).mean(1), (gradients.mean(1) ** 2).sum(1)  # (step,)
    for mean_square, square in zip(mean_squares.tolist(), squares.tolist(), strict=True):
        scale.observe(mean_square, square, setting.groups, GROUP_SAMPLES)
    return scale.estimate(), setting.truth


@dataclass(frozen=True)
class Quadratic:
    """SGD on ½wᵀHw with noise that grows with the distance: gradients and noise move along a random path."""

    groups: int = 4
    dimensions: int = 30
    steps: int = 60
    rate: float = 0.05
    deviation: float = 2.0


QUADRATICS = [
    Quadratic(),
    Quadratic(steps=120),
    Quadratic(groups=2, deviation=8.0),
    Quadratic(groups=8, rate=0.5, deviation=0.5),
    Quadratic(dimensions=3, steps=100),
]


def moving(setting: Quadratic, random: np.random.Generator) -> tuple[NoiseEstimate, float]:
    """An estimate on a path, and the ratio of means over the same window."""
    scale = NoiseScale()
    curvature = np.geomspace(1.0, 0.01, setting.dimensions)
    weights = random.standard_normal(setting.dimensions) * 3
    signals, noises = [], []
    for _ in range(setting.steps):
        gradient = curvature * weights
        deviation = setting.deviation * np.sqrt(0.1 + curvature * weights**2)  # of one sample, (parameter,)
        draws = random.standard_normal((setting.groups, setting.dimensions)) / math.sqrt(GROUP_SAMPLES)
        step = gradient + deviation * draws
        mean_square, square = float((step**2).sum(1).mean()), float((step.mean(0) ** 2).sum())
        scale.observe(mean_square, square, setting.groups, GROUP_SAMPLES)
        signals.append(float(gradient @ gradient))
        noises.append(float(deviation @ deviation))
        weights = weights - setting.rate * step.mean(0)
    window = max(50, setting.steps // 2)
    return scale.estimate(), sum(noises[-window:]) / sum(signals[-window:])


def coverage(found: list[tuple[NoiseEstimate, float]]) -> Coverage:
    """Of estimates with their truths; one without any interval covers everything."""
    covered = [one.low is None or one.low <= truth <= (one.high or math.inf) for one, truth in found]
    unbounded = [one.high is None for one, _ in found]
    enough = [one.enough for one, _ in found]
    return Coverage(len(found), *(float(np.mean(column)) for column in (covered, unbounded, enough)))
