"""From a few measured peaks to the largest worker batch: a line, and a search that begins where it points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 0.03


@dataclass(frozen=True)
class Line:
    """Bytes above the baseline: fixed + per_sample × samples."""

    fixed: float
    per_sample: float

    def peak(self, batch: int) -> float:
        """The peak at so many samples."""
        return self.fixed + self.per_sample * batch

    def largest(self, room: float) -> float:
        """The samples with which the peak just fits; infinite where they need nothing."""
        return (room - self.fixed) / self.per_sample if self.per_sample > 0 else float("inf")


def fit_line(points: Sequence[Sequence[int]], per_sample: float = 0.0) -> Line:
    """The line through measured points (samples, bytes) with the least relative errors, squared.

    Arguments:
        points: at least one.
        per_sample: the slope to assume when there is only one.

    >>> round(fit_line([(1, 1_000), (2, 1_500), (4, 2_500)]).largest(10_500), 6)
    20.0
    """
    samples, peaks = np.array(points, float).T
    if len(samples) == 1:
        return Line(float(peaks[0] - per_sample * samples[0]), per_sample)
    scaled = np.stack([1 / peaks, samples / peaks], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(scaled, np.ones(len(peaks)), rcond=None)
    return Line(float(fixed), float(slope)) if slope > 0 else Line(float(peaks.max()), 0.0)


def largest_fitting(
    start: float,
    fits: Callable[[int], bool],
    smallest: int,
    most: int,
    tolerance: float = TOLERANCE,
) -> int:
    """The largest number of samples that fits, to within the tolerance; 0 when not even the fewest do.

    Goes from the start in steps that double until one number fits and another does not, then halves the distance.

    Arguments:
        start: where to begin: the prediction.
        fits: whether so many samples fit; with more samples it must not become true again.
        smallest: the fewest, and the unit: numbers are multiples of it.
        most: the most samples of interest.
        tolerance: relative distance at which a number that fits is close enough to one that does not.

    >>> largest_fitting(70, lambda batch: batch <= 1000, smallest=1, most=100_000, tolerance=0.0)
    1000
    """
    limit = max(1, most // smallest)  # counted in units of the smallest
    low, high = 0, limit + 1  # fits (nothing does), does not fit (or is of no interest)
    candidate = int(min(max(start / smallest, 1), limit))
    stride = max(1, int(tolerance * candidate))
    while high - low > max(1, tolerance * low):
        if fits(candidate * smallest):
            low = candidate
        else:
            high = candidate
        candidate = _next(low, high, limit, stride)
        stride *= 2
    return low * smallest


def _next(low: int, high: int, limit: int, stride: int) -> int:
    """Upwards while nothing has failed, downwards while nothing has fitted, else the middle."""
    if high > limit:
        return min(low + stride, limit)
    if low == 0:
        return max(high - stride, 1)
    return (low + high) // 2
