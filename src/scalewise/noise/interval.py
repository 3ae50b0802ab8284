"""The ratio of two means with a 95 % interval, from a series of steps whose true means may move.

Given the weights of a step, its samples are fresh: what is left of a step's numbers after their own expectation is
uncorrelated from step to step, whatever path the weights take. So the error of the window's averages follows from the
scatter among neighbouring steps, in short blocks in which the expectation hardly moves; what moves beyond is not error.

With a and b the two series, the interval is the set of ratios r at which the mean of a − r·b cannot be told from 0
(Fieller 1954); it is unbounded when that of b cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import stdtrit

BLOCK_STEPS = 8


@dataclass(frozen=True)
class Interval:
    """Ends of the interval of a ratio; `high` None where it is unbounded."""

    low: float | None
    high: float | None

    def within(self, factor: float) -> bool:
        """Whether the upper end is at most so many times the lower one."""
        return self.low is not None and self.high is not None and 0 < self.high <= factor * self.low


@dataclass(frozen=True)
class Scatter:
    """Two means, the covariance of their errors, and with how many degrees of freedom that is known."""

    steps: int
    top: float
    bottom: float
    top_top: float
    top_bottom: float
    bottom_bottom: float
    freedom: float

    def interval(self, more: float = 1.0, least_signal: float = -math.inf) -> Interval:
        """The interval, or about what it would be after `more` times as many steps of the same kind.

        Arguments:
            more: as many times the steps.
            least_signal: what the mean of the bottom counts as at least, in its present standard errors.
        """
        bottom = max(self.bottom, least_signal * math.sqrt(self.bottom_bottom))
        square = float(stdtrit(self.freedom * more, 0.975)) ** 2 / more
        a = bottom**2 - square * self.bottom_bottom
        b = self.top * bottom - square * self.top_bottom
        c = self.top**2 - square * self.top_top
        spread = math.sqrt(max(b * b - a * c, 0.0))
        low = c / (b + spread) if c > 0 and b + spread > 0 else 0.0  # the smaller root, written so that a may be 0
        return Interval(low, (b + spread) / a if bottom > 0 and a > 0 else None)


def scatter(top: np.ndarray, bottom: np.ndarray, block: int = BLOCK_STEPS) -> Scatter:
    """Means and their errors from the scatter within blocks of neighbouring steps.

    Arguments:
        top, bottom: the series, of which mean(top) ÷ mean(bottom) is sought.
        block: neighbours among which the true means hardly move.
    """
    series = np.stack([top, bottom])  # (2, step)
    steps = series.shape[1]
    edges = np.linspace(0, steps, max(1, steps // block) + 1).round().astype(int).tolist()
    parts = [series[:, start:stop] for start, stop in pairwise(edges)]
    shares = np.array([part.shape[1] / steps for part in parts])
    covariances = np.stack([np.cov(part) for part in parts]) * shares[:, None, None]  # (block, 2, 2)
    means = series.mean(axis=1)
    whole = covariances.sum(axis=0) / steps
    return Scatter(
        steps=steps,
        top=float(means[0]),
        bottom=float(means[1]),
        top_top=float(whole[0, 0]),
        top_bottom=float(whole[0, 1]),
        bottom_bottom=float(whole[1, 1]),
        freedom=_freedom(covariances, means, np.array([part.shape[1] - 1 for part in parts])),
    )


def _freedom(covariances: np.ndarray, means: np.ndarray, degrees: np.ndarray) -> float:
    """Degrees of freedom of a − r·b's variance: fewer where a few blocks hold most of it (Satterthwaite 1946)."""
    weights = np.array([means[1], -means[0]])  # a − r·b with r = ā ÷ b̄, times b̄
    parts = np.einsum("i,nij,j->n", weights, covariances, weights)
    total, each = float(parts.sum()) ** 2, float((parts**2 / (degrees + 2)).sum())
    return min(max(total / each, 1.0), float(degrees.sum())) if each > 0 else float(degrees.sum())
