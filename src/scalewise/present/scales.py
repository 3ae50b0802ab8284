"""From numbers to places on a chart, and the round numbers beside its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scalewise.present.words import percent, short

TICKS = 5


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Arguments:
        title: with the unit.
        log: each step a factor.
        share: numbers between 0 and 1, shown as percentages.
        ticks: where to put them, instead of round numbers.
        low, high: that it covers at least.
    """

    title: str
    log: bool = False
    share: bool = False
    ticks: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None

    def shown(self, value: float) -> str:
        """A number at a tick."""
        return percent(value, 0 if abs(value * 100 - round(value * 100)) < 1e-6 else 1) if self.share else short(value)


@dataclass(frozen=True)
class Scale:
    """Numbers from low to high at places from start to end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a number."""
        low, high, at = (_logarithm(one) if self.log else one for one in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        """Round numbers within.

        >>> Scale(0.0, 0.97, 0, 1).ticks(), Scale(30, 600, 0, 1, log=True).ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8], [50, 100, 200, 500])
        """
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def fitted(values: Iterable[float], axis: Axis, start: float, end: float, room: float = 0.0) -> Scale:
    """A scale that holds all values, with so much room beyond them, but not beyond a bound of the axis itself."""
    wanted = [*values, *(one for one in (axis.low, axis.high) if one is not None)]
    known = [value for value in wanted if not axis.log or value > 0] or [1.0]
    low, high = min(known), max(known)
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    below, above = room * (low != axis.low), room * (high != axis.high)
    if axis.log:
        ratio = high / low
        return Scale(low / ratio**below, high * ratio**above, start, end, log=True)
    return Scale(low - (high - low) * below, high + (high - low) * above, start, end)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / TICKS
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = min(20, math.floor(high / step + 1e-9) - first + 1)
    return [float(f"{(first + index) * step:.12g}") for index in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    stride = max(1, decades // TICKS)
    factors = (1, 2, 5) if decades <= 3 else (1,)
    powers = [10.0**power if power < 0 else 10**power for power in range(first, last + 1, stride)]
    found = [power * factor for power in powers for factor in factors]
    within = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    return within if len(within) > 2 else _linear_ticks(low, high)


def _logarithm(value: float) -> float:
    return math.log10(value) if value > 0 else -100.0
