"""The critical batch that a plan goes by: from what trainings took, or from the noise scale along one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scalewise.stats.noise_scale import trapezoid_weights

COVERAGE = 0.8  # of the plan's intervals
LEAST_SPREAD = 0.03  # of log steps about the law, however well a few runs agree
NOISE_SPREAD = 1.6  # Assumption: the factor by which the law with the noise scale may be off, in 80 % of tasks
FEW_SPREAD = 2.0  # the same with a single run on either side
# Assumption: in 95 % of tasks the critical batch lies within a factor of 10 of the noise scale (McCandlish et al. 2018
# speak of an order of magnitude; factors of 0.3 to 7 were seen here). As a standard deviation of its logarithm:
NOISE_DEVIATION = math.log(10.0) / 1.96
GRID = np.geomspace(1e-3, 1e7, 2000)  # samples


@dataclass(frozen=True)
class Critical:
    """A critical batch in samples and its 80 % interval; None is unbounded."""

    value: float | None
    low: float | None
    high: float | None
    source: str


@dataclass(frozen=True)
class Stage:
    """The noise scale at a step of a training; value None: not to be told from infinity."""

    step: int
    value: float | None
    low: float | None
    high: float | None


def from_runs(runs: Sequence[tuple[int, float]], source: str, noise_scale: float | None = None) -> Critical | None:
    """B of S = S_min·(1 + B ÷ global batch) through (global batch, steps) of runs; None from one global batch alone.

    Least squares on log S with every run a point. The interval holds all B whose squared residuals exceed the least by
    no more than t²·s². With a noise scale, B is believed to be near it before the runs are looked at: runs of few
    workers hardly bound it from above, and the B of least squares is then as good as any larger one.

    >>> found = from_runs([(batch, 50 * (1 + 100 / batch)) for batch in (32, 64, 128)], "runs")
    >>> abs(found.value / 100 - 1) < 0.01, found.low < 100 < found.high
    (True, True)
    """
    if len({batch for batch, _ in runs}) < 2:
        return None
    batches, steps = np.array([batch for batch, _ in runs], float), np.log([steps for _, steps in runs])
    residuals = steps - np.log1p(GRID[:, None] / batches)  # (B, run)
    squares = ((residuals - residuals.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    best, degrees = int(squares.argmin()), len(runs) - 2
    value = None if best == len(GRID) - 1 else float(GRID[best])
    if degrees < 1:
        return _widened(Critical(value, value, value, source), FEW_SPREAD)
    variance = max(squares[best] / degrees, LEAST_SPREAD**2)
    if noise_scale:
        return _near(noise_scale, (squares - squares[best]) / variance, degrees, source)
    accepted = np.flatnonzero(squares <= squares[best] + stdtrit(degrees, 0.5 + COVERAGE / 2) ** 2 * variance)
    high = None if accepted[-1] == len(GRID) - 1 else float(GRID[accepted[-1]])
    return Critical(value, float(GRID[accepted[0]]), high, source)


def _near(noise_scale: float, excess: np.ndarray, degrees: int, source: str) -> Critical:
    """Median and 80 % interval of B: near the noise scale before the runs, Student's t of residuals after them."""
    before = -0.5 * (np.log(GRID / noise_scale) / NOISE_DEVIATION) ** 2
    after = np.exp(before - before.max()) * (1 + excess / degrees) ** (-(degrees + 1) / 2)
    places = [(1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2]
    low, middle, high = np.exp(np.interp(places, after.cumsum() / after.sum(), np.log(GRID))).tolist()
    return Critical(middle, low, high, source)


def from_stages(stages: Sequence[Stage], worker_batch: int, source: str) -> Critical:
    """The one B that gives the steps which a noise scale B(t) along a single-worker training gives.

    N workers take Σ (1 + B(t) ÷ (N·b)) ÷ (1 + B(t) ÷ b) over the steps t of one worker, which is (w + (1 − w) ÷ N)
    of them with w the mean of 1 ÷ (1 + B(t) ÷ b), whatever N. So B = b·(1 ÷ w − 1).

    >>> from_stages([Stage(0, 32, None, None), Stage(9, 32, None, None)], worker_batch=32, source="noise").value
    32.0
    """
    weights = trapezoid_weights([stage.step for stage in stages])

    def equivalent(values: Sequence[float | None]) -> float | None:
        share = sum(
            weight / (1 + value / worker_batch) if value is not None else 0.0
            for weight, value in zip(weights, values, strict=True)
        )
        return worker_batch * (1 / share - 1) if share > 0 else None

    found = Critical(
        equivalent([stage.value for stage in stages]),
        equivalent([stage.value if stage.low is None else stage.low for stage in stages]),
        equivalent([stage.high for stage in stages]),
        source,
    )
    return _widened(found, NOISE_SPREAD)


def _widened(found: Critical, factor: float) -> Critical:
    low, high = found.low, found.high
    return Critical(
        found.value, None if low is None else low / factor, None if high is None else high * factor, found.source
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 80 % interval of a new value like these; a single one is its own interval.

    >>> mean_interval([2.0])
    (2.0, 2.0, 2.0)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, mean, mean
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) * (1 + 1 / len(values)))
    half = float(stdtrit(len(values) - 1, 0.5 + COVERAGE / 2)) * spread
    return mean, mean - half, mean + half
