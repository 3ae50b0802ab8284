"""Costs from timings: a fixed part and a part per unit, whatever else the machine was doing.

    seconds = α · messages + β · units

With one message and units in bytes this is the α–β model of a collective (Hockney 1994); with two messages per process
and the bytes that a ring sends it is the link between processes (scalewise.links); with units in FLOPs it is an
operation on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

ITERATIONS = 20
TUNING = 1.345  # Huber's: 95 % of the efficiency of least squares where noise is normal
RESAMPLES = 300
CONFIDENCE = 0.95
TINY = 1e-300


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def inverse(self, factor: float = 1.0) -> Estimate:
        """factor ÷ value: from seconds per byte to bytes per second."""
        return Estimate(*(factor / part if part else float("inf") for part in (self.value, self.high, self.low)))


@dataclass(frozen=True)
class Cost:
    """α of one message and β of one unit.

    misfit: the median relative distance of a timing from the line: small where the model holds.
    """

    fixed_seconds: Estimate
    unit_seconds: Estimate
    misfit: float

    def seconds(self, units: float, messages: float = 1.0) -> float:
        """What so many units take."""
        return messages * self.fixed_seconds.value + units * self.unit_seconds.value


def fit(messages: Sequence[float], units: Sequence[float], timings: Sequence[Sequence[float]], seed: int = 0) -> Cost:
    """The cost that explains some timings; a timing counts by its relative distance, and outliers count little.

    Arguments:
        messages, units: of each case; there must be two different ratios of them.
        timings: of each case, seconds in every round; their median is fitted.
        seed: of the resampling that gives the intervals.

    >>> cost = fit([1, 1, 1], [10, 100, 1000], [[1.1], [2.0], [11.0]])
    >>> round(cost.fixed_seconds.value, 6), round(cost.unit_seconds.value, 6)
    (1.0, 0.01)
    """
    design = np.stack([np.asarray(messages, float), np.asarray(units, float)], axis=1)  # (case, coefficient)
    rounds = np.asarray(timings, float)  # (case, round)
    if len({tuple(row / row[0]) for row in design}) < 2:
        raise ValueError("two sizes at least are needed to tell a fixed cost from one per unit")
    generator = np.random.default_rng(seed)
    chosen = generator.integers(rounds.shape[1], size=(RESAMPLES, *rounds.shape))
    drawn = np.take_along_axis(np.broadcast_to(rounds, chosen.shape), chosen, axis=2)  # (resample, case, round)
    medians = np.median(rounds, axis=1)
    lines = _robust_lines(design, np.vstack([medians, np.median(drawn, axis=2)]))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(lines[1:], [tail, 100 - tail], axis=0)
    fixed, unit = (
        Estimate(float(value), float(min(least, value)), float(max(most, value)))
        for value, least, most in zip(lines[0], low, high, strict=True)
    )
    return Cost(fixed, unit, float(np.median(np.abs(medians / (design @ lines[0]) - 1))))


def _robust_lines(design: Numbers, seconds: Numbers) -> Numbers:
    """Coefficients (resample, coefficient) for seconds (resample, case), none of them below 0.

    Iteratively reweighted least squares of the distances relative to the line, with Huber's weights.
    """
    expected = seconds
    lines = np.zeros((len(seconds), 2))
    trust = np.ones_like(seconds)
    for _ in range(ITERATIONS):
        lines = _non_negative(design, seconds, trust / expected**2)
        expected = np.maximum(lines @ design.T, TINY)
        distance = np.abs(seconds / expected - 1)
        scale = np.maximum(1.4826 * np.median(distance, axis=1, keepdims=True), 1e-9)
        trust = np.minimum(1.0, TUNING * scale / np.maximum(distance, TINY))
    return lines


def _non_negative(design: Numbers, seconds: Numbers, weights: Numbers) -> Numbers:
    """Weighted least squares by the normal equations; where a coefficient would be below 0, the other one alone."""
    first, second = design.T
    squares = weights @ np.stack([first * first, first * second, second * second], axis=1)  # (resample, 3)
    targets = (weights * seconds) @ design  # (resample, coefficient)
    determinant = np.maximum(squares[:, 0] * squares[:, 2] - squares[:, 1] ** 2, TINY)
    fixed = (squares[:, 2] * targets[:, 0] - squares[:, 1] * targets[:, 1]) / determinant
    unit = (squares[:, 0] * targets[:, 1] - squares[:, 1] * targets[:, 0]) / determinant
    return np.stack(
        [
            np.where(unit < 0, targets[:, 0] / squares[:, 0], np.maximum(fixed, 0.0)),
            np.where(fixed < 0, targets[:, 1] / squares[:, 2], np.maximum(unit, 0.0)),
        ],
        axis=1,
    )
