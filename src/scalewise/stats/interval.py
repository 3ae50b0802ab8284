"""A value with its interval, and the intervals that come from data: of a mean, a median, a weighted sum, a ratio.

**The ratio of two means**, from a series of steps whose true means may move. Given the weights of a step, its samples
are fresh: what is left of a step's numbers after their own expectation is uncorrelated from step to step, whatever path
the weights take. So the error of the window's averages follows from the scatter among neighbouring steps, in short
blocks in which the expectation hardly moves; what moves beyond is not error.

With a and b the two series, the interval is the set of ratios r at which the mean of a − r·b cannot be told from 0
(Fieller 1954); it is unbounded when that of b cannot.

That of b is a square, never below 0. Where it is hardly to be told from 0, two tails of 2.5 % cover 97.5 %: a mean of b
far below 0 excludes every ratio, which nobody believes. There the tails are shared out by likelihood (Feldman and
Cousins 1998), as for any mean that has a bound: to a ratio belong the outcomes that it explains best, beside the best
that the bound allows. If μ is what b should be, in standard errors, they reach from μ − (μ² + d²) ÷ 2μ to μ + d, with d
such that they are 95 %. From μ = 1.96 = d on this is Fieller's interval again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, stdtr, stdtrit

from scalewise.records import SHARES

LEVEL = 0.95
BLOCK_STEPS = 8
TINY, FARTHEST = 1e-12, 1e9

Number = TypeVar("Number", float, float | None)


@dataclass(frozen=True)
class Interval(Generic[Number]):
    """A value with its interval. An end of None is unbounded or unknown; a value of None is unknown."""

    value: Number
    low: Number
    high: Number
    level: float = field(default=LEVEL, kw_only=True)

    def within(self, factor: float) -> bool:
        """Whether the upper end is at most `factor` times the lower one."""
        return self.low is not None and self.high is not None and 0 < self.high <= factor * self.low

    def excludes(self, number: float) -> bool:
        """Whether a number lies outside."""
        return (self.low is not None and self.low > number) or (self.high is not None and self.high < number)

    def inverse(self: Interval[float], factor: float = 1.0) -> Interval[float]:
        """factor ÷ value: from seconds per byte to bytes per second."""
        value, low, high = (factor / part if part else math.inf for part in (self.value, self.high, self.low))
        return Interval(value, low, high, level=self.level)

    def to_json(self) -> dict[str, Any]:
        """Value and ends."""
        return {"value": self.value, "low": self.low, "high": self.high}


def as_json(record: Any) -> dict[str, Any]:  # noqa: ANN401  (any dataclass)
    """A dataclass as its JSON object; what is in it and has a form of its own (`to_json`) takes that."""
    return {field.name: _in_json(getattr(record, field.name)) for field in fields(record)}


def _in_json(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    return as_json(value) if is_dataclass(value) else value


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors an interval of Student's t reaches to either side.

    >>> round(t_quantile(1e9), 2), round(t_quantile(4), 2)
    (1.96, 2.78)
    """
    return float(stdtrit(freedom, 0.5 + level / 2))


def mean_interval(values: Sequence[float], level: float = LEVEL, *, new: bool = False) -> Interval[float]:
    """The mean of some values with its interval, or with that of one more value like these; of a single one a point.

    >>> mean_interval([2.0])
    Interval(value=2.0, low=2.0, high=2.0, level=0.95)
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, mean, mean, level=level)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile(count - 1, level) * math.sqrt(variance * (new + 1 / count))
    return Interval(mean, mean - half, mean + half, level=level)


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Two of the values between which the median lies, with at least this confidence if there are enough of them.

    The number of values below the median is binomial, whatever their distribution.

    >>> median_interval([5, 1, 4, 2, 3, 7, 6, 9, 8])
    (2, 8)
    """
    ordered = sorted(values)
    likely = next(below for below in range(len(ordered) + 1) if bdtr(below, len(ordered), 0.5) >= (1 - level) / 2)
    skipped = max(0, likely - 1)
    return ordered[skipped], ordered[-1 - skipped]


def weighted_sum(parts: Sequence[Interval[float]], weights: Sequence[float]) -> Interval[float]:
    """Σw·v of independent estimates; its interval from theirs (Zou and Donner 2008).

    With value v, ends l and u, and weights w: low = Σw·v − √Σw²(v − l)², high = Σw·v + √Σw²(u − v)².
    """
    value = sum(weight * part.value for weight, part in zip(weights, parts, strict=True))
    below, above = (
        math.sqrt(sum((weight * distance) ** 2 for weight, distance in zip(weights, distances, strict=True)))
        for distances in ([part.value - part.low for part in parts], [part.high - part.value for part in parts])
    )
    return Interval(value, value - below, value + above)


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

    @property
    def ratio(self) -> float | None:
        """Top ÷ bottom; None where the bottom is not above 0."""
        return self.top / self.bottom if self.bottom > 0 else None

    def interval(self) -> Interval[float | None]:
        """The ratio with its interval."""
        found = self.fieller()
        if self.top <= 0 or self.bottom_bottom <= 0:
            return found
        if found.high is not None and self._standing(1 / found.high)[1] >= t_quantile(self.freedom):
            return found
        return Interval(self.ratio, self._low(), self._high())

    def fieller(self, more: float = 1.0, least_signal: float = -math.inf) -> Interval[float | None]:
        """The interval of equal tails, or about what it would be after `more` times as many steps of the same kind.

        The mean of the bottom counts as at least `least_signal` of its present standard errors.
        """
        bottom = max(self.bottom, least_signal * math.sqrt(self.bottom_bottom))
        square = t_quantile(self.freedom * more) ** 2 / more
        a = bottom**2 - square * self.bottom_bottom
        b = self.top * bottom - square * self.top_bottom
        c = self.top**2 - square * self.top_top
        spread = math.sqrt(max(b * b - a * c, 0.0))
        low = c / (b + spread) if c > 0 and b + spread > 0 else 0.0  # the smaller root, written so that a may be 0
        return Interval(self.ratio, low, (b + spread) / a if bottom > 0 and a > 0 else None)

    def _high(self) -> float | None:
        """The largest ratio to which the bottom is not too large."""

        def excess(inverse: float) -> float:
            deviation, mean = self._standing(inverse)
            return deviation - reach(mean, self.freedom)[0]

        if excess(0.0) <= 0:
            return None
        return 1 / _root(excess, 0.0, self.bottom / self.top)

    def _low(self) -> float:
        """The smallest ratio to which the bottom is not too small."""

        def excess(inverse: float) -> float:
            deviation, mean = self._standing(inverse)
            return deviation + reach(mean, self.freedom)[1]

        inside = max(self.bottom, math.sqrt(self.bottom_bottom)) / self.top
        while excess(inside) <= 0:
            inside /= 2
        outside = 2 * inside
        while excess(outside) > 0:
            outside *= 2
            if outside > FARTHEST * inside:  # the top is hardly to be told from 0 either
                return 0.0
        return 1 / _root(excess, inside, outside)

    def _standing(self, inverse: float) -> tuple[float, float]:
        """If the ratio is 1 ÷ inverse: how far the bottom lies above its mean, and that mean, in standard errors."""
        variance = self.bottom_bottom - 2 * inverse * self.top_bottom + inverse**2 * self.top_top
        error = math.sqrt(max(variance, TINY * self.bottom_bottom))
        return (self.bottom - inverse * self.top) / error, inverse * self.top / error


def reach(mean: float, freedom: float) -> tuple[float, float]:
    """How far above and how far below a mean that cannot be negative its outcomes lie, all in standard errors.

    >>> above, below = reach(mean=1.0, freedom=1e9)
    >>> round(above, 2), round(below, 2)
    (1.82, 2.16)
    """
    both = t_quantile(freedom)
    if mean >= both:
        return both, both
    one = float(stdtrit(freedom, LEVEL))
    if mean <= 0:
        return one, math.inf

    def below(above: float) -> float:
        return (mean**2 + above**2) / (2 * mean)

    def excess(above: float) -> float:
        return float(stdtr(freedom, above) - stdtr(freedom, -below(above))) - LEVEL

    above = one if excess(one) >= 0 else float(brentq(excess, one, both, xtol=1e-6))
    return above, below(above)


def _root(function: Callable[[float], float], start: float, stop: float) -> float:
    return float(brentq(function, start, stop, xtol=TINY * stop, rtol=1e-9))


def scatter(top: np.ndarray, bottom: np.ndarray, block: int = BLOCK_STEPS) -> Scatter:
    """Means and their errors from the scatter within blocks of neighbours, among which the true means hardly move."""
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


ROUNDING = 1e-9
POINTS, SHARE = 0.005, 0.01  # what still counts as not inferior: half a point of accuracy, or 1 % of any other metric


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
    gaps = [high - low for low, high in pairwise(sorted(values))]
    return min((gap for gap in gaps if gap > ROUNDING * max(map(abs, values))), default=0.0)


def margin(metric: str, reference: float) -> float:
    """How much worse than the reference still counts as not inferior.

    >>> margin("accuracy", 0.98), margin("loss", 2.0)
    (0.005, 0.02)
    """
    return POINTS if metric in SHARES else SHARE * abs(reference)


def not_inferior(difference: Interval[float], metric: str, reference: float, higher_is_better: bool) -> bool:
    """Whether the whole interval of (value − reference) lies within the margin.

    >>> not_inferior(Interval(0.001, -0.004, 0.006), "accuracy", 0.98, higher_is_better=True)
    True
    >>> not_inferior(Interval(0.01, -0.01, 0.03), "loss", 2.0, higher_is_better=False)
    False
    """
    worst = -difference.low if higher_is_better else difference.high
    return worst <= margin(metric, reference)
