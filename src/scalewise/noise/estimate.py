"""A noise scale with its interval and a verdict: enough, or how much is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scalewise.noise.interval import BLOCK_STEPS, Interval, Scatter, scatter

ENOUGH_STEPS = 20
ENOUGH_RATIO = 4.0
LEAST_STEPS = 4  # for any interval at all
MOST_TIMES = 1e6  # the steps that there are: beyond that no number of them is named
# Assumption: where |G|² is hardly to be told from 0, or not at all, it counts as its own standard error when more steps
# are foretold, so that the number is neither endless nor the word of one lucky draw.
LEAST_SIGNAL = 1.0


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise scale in samples, its 95 % interval (`high` None: unbounded), and whether that is enough.

    `more_steps` says about how many steps are missing, `problem` why steps alone will not do.
    """

    value: float | None
    low: float | None
    high: float | None
    enough: bool
    more_steps: int | None = None
    problem: str | None = None

    @property
    def verdict(self) -> str:
        """In words.

        >>> NoiseEstimate(120.0, 30.0, None, enough=False, more_steps=40).verdict
        'not enough: about 40 more steps'
        """
        if self.enough:
            return "enough"
        if self.problem is not None:
            return self.problem
        return "not enough" if self.more_steps is None else f"not enough: about {self.more_steps:,} more steps"

    def to_json(self) -> dict[str, float | bool | None]:
        """As it stands in `noise_scale` of the result."""
        return {"value": self.value, "low": self.low, "high": self.high, "enough": self.enough}


UNKNOWN = NoiseEstimate(None, None, None, enough=False, more_steps=ENOUGH_STEPS)


def ratio_of_means(
    numerator: np.ndarray, denominator: np.ndarray, block: int = BLOCK_STEPS, least: int = ENOUGH_STEPS
) -> NoiseEstimate:
    """mean(numerator) ÷ mean(denominator) over steps, with its 95 % interval.

    Arguments:
        numerator, denominator: one number per step.
        block: neighbouring steps among which their true means hardly move.
        least: steps below which it is never enough.
    """
    steps = len(numerator)
    top, bottom = float(numerator.mean()), float(denominator.mean())
    value = top / bottom if bottom > 0 else None
    if steps < LEAST_STEPS:
        return NoiseEstimate(value, None, None, enough=False, more_steps=least - steps)
    seen = scatter(numerator, denominator, block)
    found = seen.interval()
    enough = steps >= least and value is not None and found.within(ENOUGH_RATIO)
    more = None if enough else _more_steps(seen, least)
    return NoiseEstimate(value, found.low, found.high, enough, more)


def _more_steps(seen: Scatter, least: int) -> int | None:
    """How many steps are missing, if they go on as before; None where that is too far off to be said."""

    def enough(times: float) -> bool:
        return seen.fieller(times, LEAST_SIGNAL).within(ENOUGH_RATIO)

    times = 1.0 if enough(1.0) else smallest(enough, 1.0, MOST_TIMES)
    if times is None:
        return None
    return rounded_up(max(seen.steps * (times - 1), least - seen.steps, 1))


def smallest(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The smallest number, to a twentieth, for which something holds, which then holds for all larger ones."""
    if not holds(high):
        return None
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def rounded_up(number: float) -> int:
    """To two digits, upwards.

    >>> rounded_up(7.2), rounded_up(1234)
    (8, 1300)
    """
    digit = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / digit) * digit


def weighted_mean(estimates: list[NoiseEstimate], weights: list[float]) -> NoiseEstimate:
    """The mean of independent estimates; its interval from theirs (Zou and Donner 2008).

    With value v, ends l and u, and weights w: low = Σw·v − √Σw²(v − l)², high = Σw·v + √Σw²(u − v)². Where one of them
    is unbounded so is the mean, and its lower end is that of the lower ends.
    """
    problem = next((one.problem for one in estimates if one.problem is not None), None)
    values, lows, highs = ([getattr(one, name) for one in estimates] for name in ("value", "low", "high"))
    if problem is not None or None in lows:
        return NoiseEstimate(None, None, None, enough=False, problem=problem)
    value = None if None in values else _weighted(weights, values)
    if value is None or None in highs:
        return NoiseEstimate(value, _weighted(weights, lows), None, enough=False)
    below, above = (
        math.sqrt(sum((weight * (one - end)) ** 2 for weight, one, end in zip(weights, values, ends, strict=True)))
        for ends in (lows, highs)
    )
    found = Interval(value - below, value + above)
    return NoiseEstimate(value, found.low, found.high, enough=found.within(ENOUGH_RATIO))


def _weighted(weights: list[float], values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def trapezoid_weights(steps: Sequence[int]) -> list[float]:
    """Weights of the trapezoid rule over steps; they add up to 1.

    >>> trapezoid_weights([0, 1, 2])
    [0.25, 0.5, 0.25]
    """
    total = steps[-1] - steps[0]
    if not total:
        return [1 / len(steps)] * len(steps)
    before = [steps[0], *steps[:-1]]
    after = [*steps[1:], steps[-1]]
    return [(end - start) / (2 * total) for start, end in zip(before, after, strict=True)]
