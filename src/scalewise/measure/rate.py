"""Throughput from timed rounds: medians, their spread, and the knee of the curve."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import binom

KNEE = 0.9  # share of the best throughput
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rate:
    """Samples per second at one worker batch: the median over rounds and its interval."""

    worker_batch: int
    samples_per_second: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Knee:
    """The smallest worker batch with 90 % of the best throughput.

    low: the smallest that may have it, given the noise of the rounds; high: the smallest that surely has it.
    """

    worker_batch: int
    low: int
    high: int


def rate(worker_batch: int, rounds: Sequence[float]) -> Rate:
    """The throughput of one worker batch from its rounds."""
    low, high = median_interval(rounds)
    return Rate(worker_batch, statistics.median(rounds), low, high, len(rounds))


def find_knee(rounds: Mapping[int, Sequence[float]], share: float = KNEE) -> Knee:
    """Where the curve bends, from samples per second by worker batch and round.

    Worker batches are compared within a round, in which the machine was as busy for all of them: the median of the
    ratios to the best worker batch decides, and its interval gives the bounds.

    >>> find_knee({1: [10, 11, 10], 2: [19, 21, 20], 4: [20, 22, 21]}).worker_batch
    2
    """
    best = max(rounds, key=lambda batch: statistics.median(rounds[batch]))
    ratios = {
        batch: [own / other for own, other in zip(rounds[batch], rounds[best], strict=True)] for batch in sorted(rounds)
    }
    bounds = {batch: median_interval(values) for batch, values in ratios.items()}
    return Knee(
        worker_batch=next(batch for batch, values in ratios.items() if statistics.median(values) >= share),
        low=next(batch for batch, (_, high) in bounds.items() if high >= share),
        high=next(batch for batch, (low, _) in bounds.items() if low >= share),
    )


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two of the values between which the median lies, with at least this confidence if there are enough of them.

    The number of values below the median is binomial, whatever their distribution.

    >>> median_interval([5, 1, 4, 2, 3, 7, 6, 9, 8])
    (2, 8)
    """
    ordered = sorted(values)
    outside = int(binom.ppf((1 - confidence) / 2, len(ordered), 0.5))  # the first that is not too unlikely
    skipped = max(0, outside - 1)
    return ordered[skipped], ordered[-1 - skipped]
