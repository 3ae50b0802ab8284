"""Means over seeds, and whether two rows differ by more than seeds do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from scalewise.stats.interval import Interval, t_quantile

ROUNDING = 1e-9


@dataclass(frozen=True)
class Spread:
    """A metric over seeds: mean, sample standard deviation (None for one value), and the values by seed."""

    mean: float | None
    std: float | None
    values: list[float]

    def to_json(self) -> dict[str, float | list[float] | None]:
        """As it stands in a row."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, std=1.4142135623730951, values=[1.0, 3.0])
    """
    count = len(values)
    mean = math.fsum(values) / count if count else None
    std = None
    if mean is not None and count > 1:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Spread(mean, std, list(values))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval[float] | None:
    """The mean of (value − reference) over the seeds that both have, with its interval; None for fewer than two.

    mean ± t(0.975, n − 1) · s ÷ √n, where s is the deviation of the differences: what a seed does to both (the start
    weights, the order of the samples) cancels.
    """
    seeds = sorted(values.keys() & reference.keys())
    differences = spread([values[seed] - reference[seed] for seed in seeds])
    if differences.mean is None or differences.std is None:
        return None
    deviation = differences.std
    if deviation <= ROUNDING * abs(differences.mean):  # equal differences: of a coarse metric they are no certainty
        deviation = resolution([given[seed] for given in (values, reference) for seed in seeds]) / math.sqrt(12)
    half = t_quantile(len(seeds) - 1) * deviation / math.sqrt(len(seeds))
    return Interval(differences.mean, differences.mean - half, differences.mean + half)


def resolution(values: Sequence[float]) -> float:
    """The smallest step between two different values: that of an accuracy on n samples is 1 ÷ n or a little more.

    >>> resolution([0.5, 0.75, 0.5, 1.0])
    0.25
    """
    gaps = [high - low for low, high in itertools.pairwise(sorted(values))]
    return min((gap for gap in gaps if gap > ROUNDING * max(map(abs, values))), default=0.0)
