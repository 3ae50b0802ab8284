"""The critical batch: what a global batch costs in steps and in samples.

To reach a given loss at global batch B takes (McCandlish et al. 2018, section 2.3)

    S = S_min · (1 + B_crit ÷ B) steps        E = S · B = E_min · (1 + B ÷ B_crit) samples        E_min = S_min · B_crit

so that (S ÷ S_min − 1) · (E ÷ E_min − 1) = 1. At B = B_crit both are twice their minimum: a sample is worth half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import stdtrit

from scalewise.stats.noise_scale import NoiseEstimate

Method = Literal["noise scale", "branch", "sweep"]

CONFIDENCE = 0.95
FLAT, STEEP = 1e-6, 1e6  # of the smallest and largest global batch: beyond, the law is S = const and S ∝ 1/B
GRID_POINTS = 500
NEAR = 2.0  # ratio up to which two methods are said to be near each other


@dataclass(frozen=True)
class Estimated:
    """A number and its 95 % interval; `high` None: unbounded, `value` None: not known."""

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        """Value and interval."""
        return asdict(self)


@dataclass(frozen=True)
class CriticalBatch:
    """A critical batch in samples, its 95 % interval (`high` None: unbounded), and how it was found.

    `value` is None where it is beyond anything that was measured, or nothing is known at all.
    """

    value: float | None
    low: float | None
    high: float | None
    method: Method

    @property
    def identified(self) -> bool:
        """Whether the interval is bounded on both sides."""
        return self.value is not None and bool(self.low) and self.high is not None

    @property
    def bounded(self) -> bool:
        """Whether anything is ruled out: a number from data that fit 0 and infinity as well is none to go by.

        >>> CriticalBatch(13.0, 0.0, None, "sweep").bounded, CriticalBatch(None, 1024.0, None, "branch").bounded
        (False, True)
        """
        if self.low is None and self.high is None:
            return self.value is not None  # its interval is not known, which is not the same as without end
        return bool(self.low) or self.high is not None

    def efficiency(self, global_batch: float) -> Estimated:
        """What a sample is worth at a global batch, beside one at a tiny batch: 1 ÷ (1 + B ÷ B_crit).

        >>> CriticalBatch(900.0, 450.0, None, "sweep").efficiency(100)
        Estimated(value=0.9, low=0.8181818181818182, high=1.0)
        """
        low = None if self.low is None else efficiency(global_batch, self.low)
        high = 1.0 if self.high is None else efficiency(global_batch, self.high)
        return Estimated(None if self.value is None else efficiency(global_batch, self.value), low, high)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `critical_batch`."""
        return asdict(self)

    def __str__(self) -> str:
        if self.value is not None and not self.bounded:
            return f"not bounded (best fit {self.value:,.0f})"
        if self.value is None:
            return f"at least {self.low:,.0f}" if self.low else "not known"
        if self.high is None:
            return f"{self.value:,.0f} (at least {self.low:,.0f})" if self.low else f"{self.value:,.0f} (no interval)"
        return f"{self.value:,.0f} ({self.low or 0:,.0f} to {self.high:,.0f})"


def from_noise(estimate: NoiseEstimate) -> CriticalBatch:
    """The cheap estimate: the critical batch is the noise scale (McCandlish et al. 2018, appendix D)."""
    return CriticalBatch(estimate.value, estimate.low, estimate.high, "noise scale")


def efficiency(global_batch: float, critical: float) -> float:
    """Share of a sample's worth that is left at a global batch.

    >>> efficiency(900, 900)
    0.5
    """
    return critical / (critical + global_batch)


@dataclass(frozen=True)
class Law:
    """S = S_min · (1 + B_crit ÷ B) through steps measured at some global batches."""

    global_batches: tuple[int, ...]
    steps: tuple[float, ...]  # the median of the runs at each
    critical: CriticalBatch

    @property
    def least_steps(self) -> float | None:
        """S_min: steps at an infinite global batch; None where the steps never stopped falling."""
        return None if self.critical.value is None else math.exp(self._fit.intercept(self._fit.best))

    @property
    def least_samples(self) -> float | None:
        """E_min: samples at a tiny global batch; None where the steps never began to fall."""
        best = self._fit.best
        return math.exp(self._fit.intercept(best) + best) if self.critical.value != 0 else None

    @property
    def residual(self) -> float:
        """Standard deviation of log S about the law: 0.05 is about 5 %."""
        return math.sqrt(self._fit.variance)

    def steps_at(self, global_batch: float) -> Estimated:
        """Steps at any global batch, with the interval for the median of as many runs as went into the law."""
        return self._fit.predicted(global_batch)

    def to_json(self) -> dict[str, Any]:
        """The law's numbers and the points behind it."""
        return {
            "critical_batch": self.critical.to_json(),
            "least_steps": self.least_steps,
            "least_samples": self.least_samples,
            "residual": self.residual,
            "points": [{"global_batch": batch, "steps": steps}
                       for batch, steps in zip(self.global_batches, self.steps, strict=True)],
        }  # fmt: skip

    @property
    def _fit(self) -> _Fit:
        return _Fit(np.array(self.global_batches, float), np.log(np.array(self.steps, float)))


def fit_law(runs: Iterable[tuple[int, float]]) -> Law:
    """The law through (global batch, steps) pairs; several runs at one global batch count by their median.

    Least squares on log S. The interval of B_crit is the profile likelihood's: all values whose squared residuals
    exceed the least by no more than t² · s², where s² = RSS ÷ (batches − 2). So it holds what seeds do and what an
    imperfectly tuned learning rate does to a whole global batch. It is unbounded above when the data do not bend away
    from S ∝ 1 ÷ B, and 0 is in it when they do not bend away from S = const.

    >>> law = fit_law((batch, 50 * (1 + 200 / batch)) for batch in (25, 50, 100, 200, 400, 800))
    >>> round(law.critical.value), round(law.steps_at(300).value, 1)
    (200, 83.3)
    """
    by_batch: dict[int, list[float]] = {}
    for global_batch, steps in runs:
        by_batch.setdefault(global_batch, []).append(steps)
    batches = sorted(by_batch)
    medians = [float(np.median(by_batch[batch])) for batch in batches]
    if not batches:
        return Law((), (), CriticalBatch(None, None, None, "sweep"))
    fit = _Fit(np.array(batches, float), np.log(np.array(medians)))
    return Law(tuple(batches), tuple(medians), fit.critical())


class _Fit:
    """Residuals of log S as a function of log B_crit; the other parameter, log S_min, has a closed form."""

    def __init__(self, batches: np.ndarray, log_steps: np.ndarray) -> None:
        self._batches, self._log_steps = batches, log_steps
        self._grid = np.linspace(math.log(FLAT * batches.min()), math.log(STEEP * batches.max()), GRID_POINTS)
        self._on_grid = self._squares(self._grid)
        self.best = self._minimum()
        self.least = self.rss(self.best)

    def rss(self, log_critical: float) -> float:
        """Squared residuals, with the best S_min for this B_crit."""
        return float(self._squares(np.array([log_critical]))[0])

    def intercept(self, log_critical: float) -> float:
        """log S_min for this B_crit."""
        return float(self._intercepts(np.array([log_critical]))[0])

    def _residuals(self, log_critical: np.ndarray) -> np.ndarray:
        """Of S_min = 1; (B_crit, global batch)."""
        return self._log_steps - np.log1p(np.exp(log_critical)[:, None] / self._batches)

    def _intercepts(self, log_critical: np.ndarray) -> np.ndarray:
        return self._residuals(log_critical).mean(axis=1)

    def _squares(self, log_critical: np.ndarray) -> np.ndarray:
        residuals = self._residuals(log_critical)
        return ((residuals - residuals.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)

    @property
    def variance(self) -> float:
        """s² of log S about the law."""
        return self.least / (len(self._batches) - 2) if len(self._batches) > 2 else 0.0

    def critical(self) -> CriticalBatch:
        """The best B_crit and its interval."""
        if len(self._batches) < 3:
            return CriticalBatch(None, None, None, "sweep")
        first, last = self._accepted_ends()
        value = 0.0 if self.best == self._grid[0] else None if self.best == self._grid[-1] else math.exp(self.best)
        low = 0.0 if first is None else math.exp(first)
        return CriticalBatch(value, low, None if last is None else math.exp(last), "sweep")

    def predicted(self, global_batch: float) -> Estimated:
        """Steps at a global batch: the union, over accepted values of B_crit, of what a new point may be.

        For a given B_crit a new point y costs n ÷ (n + 1) · (y − ŷ)² more, so y is accepted up to the limit's distance.
        """
        value = math.exp(self._curve(np.array([self.best]), global_batch)[0])
        limit, count = self._limit(), len(self._batches)
        if limit is None:
            return Estimated(value, None, None)
        accepted = np.append(self._grid[self._on_grid <= limit], self.best)
        half = np.sqrt(np.maximum(limit - self._squares(accepted), 0.0) * (count + 1) / count)
        middle = self._curve(accepted, global_batch)
        return Estimated(value, math.exp((middle - half).min()), math.exp((middle + half).max()))

    def _curve(self, log_critical: np.ndarray, global_batch: float) -> np.ndarray:
        return self._intercepts(log_critical) + np.log1p(np.exp(log_critical) / global_batch)

    def _minimum(self) -> float:
        """The best grid point, refined; an end of the grid stands for 0 or infinity."""
        index = int(self._on_grid.argmin())
        if index in (0, GRID_POINTS - 1) or self._on_grid.max() - self._on_grid.min() == 0:
            return float(self._grid[index])
        found = minimize_scalar(self.rss, bounds=(self._grid[index - 1], self._grid[index + 1]), method="bounded",
                                options={"xatol": 1e-9})  # fmt: skip
        flat = min(self._on_grid[0], self._on_grid[-1])  # as good at an end, up to rounding: nothing bends
        return float(found.x) if found.fun < flat * (1 - 1e-9) else float(self._grid[int(self._on_grid.argmin())])

    def _limit(self) -> float | None:
        degrees = len(self._batches) - 2
        if degrees < 1:
            return None
        t = float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))
        return self.least + t**2 * self.variance

    def _accepted_ends(self) -> tuple[float | None, float | None]:
        """The least and largest accepted log B_crit; None where an end of the grid is accepted."""
        limit = self._limit()
        assert limit is not None

        def excess(value: float) -> float:
            return self.rss(value) - limit

        first = None if self._on_grid[0] <= limit else _crossing(excess, float(self._grid[0]), self.best)
        last = None if self._on_grid[-1] <= limit else _crossing(excess, self.best, float(self._grid[-1]))
        return first, last


def _crossing(function: Callable[[float], float], start: float, stop: float) -> float:
    """Where a function changes sign; at the end where it hardly does."""
    if function(start) * function(stop) >= 0:
        return start if abs(function(start)) < abs(function(stop)) else stop
    return float(brentq(function, start, stop, xtol=1e-6))


@dataclass(frozen=True)
class HeldOut:
    """A global batch that was left out of the law, what the law says of it, and what was measured."""

    global_batch: int
    predicted: Estimated
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off: 0.1 is 10 % too many steps."""
        assert self.predicted.value is not None
        return self.predicted.value / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """Prediction, measurement and error."""
        return {
            "global_batch": self.global_batch,
            "predicted_steps": self.predicted.to_json(),
            "measured_steps": self.measured,
            "error": self.error,
        }


def held_out_one_by_one(runs: Sequence[tuple[int, float]]) -> list[HeldOut]:
    """Every global batch but the smallest and the largest, predicted from all others."""
    whole = fit_law(runs)
    found = []
    for global_batch, measured in list(zip(whole.global_batches, whole.steps, strict=True))[1:-1]:
        rest = fit_law([run for run in runs if run[0] != global_batch])
        found.append(HeldOut(global_batch, rest.steps_at(global_batch), measured))
    return found


def agreement(cheap: CriticalBatch, direct: CriticalBatch) -> str:
    """One sentence on whether the cheap estimate and the direct measurement say the same."""
    pair = f"{cheap.method} {cheap}, {direct.method} {direct}"
    if not cheap.bounded or not direct.bounded:
        unknown = direct if cheap.bounded else cheap
        return f"they cannot be compared, as the {unknown.method} gives no critical batch: {pair}"
    apart = _ratio(cheap, direct)
    if direct.value is None and overlap(cheap, direct):
        return f"they do not contradict each other, but the {direct.method} gives a lower bound only: {pair}"
    if overlap(cheap, direct):
        return f"they agree, their intervals overlap{f' ({apart})' if apart else ''}: {pair}"
    near = _factor(cheap, direct) <= NEAR
    return (
        f"they disagree{', though not by much' if near else ''}: {apart or 'their intervals do not overlap'}: {pair}; "
        f"trust the {direct.method}, which was measured by training"
    )


def overlap(one: CriticalBatch, other: CriticalBatch) -> bool:
    """Whether some critical batch lies in both intervals."""

    def ends(batch: CriticalBatch) -> tuple[float, float]:
        bounded = batch.low is not None or batch.high is not None
        value = math.inf if batch.value is None else batch.value
        return (batch.low or 0.0, math.inf if batch.high is None else batch.high) if bounded else (value, value)

    (one_low, one_high), (other_low, other_high) = ends(one), ends(other)
    return one_low <= other_high and other_low <= one_high


def _factor(one: CriticalBatch, other: CriticalBatch) -> float:
    if not one.value or not other.value:
        return math.inf
    return max(one.value / other.value, other.value / one.value)


def _ratio(cheap: CriticalBatch, direct: CriticalBatch) -> str:
    if not cheap.value or not direct.value:
        return ""
    larger, smaller = (cheap, direct) if cheap.value >= direct.value else (direct, cheap)
    return f"the {larger.method}'s is {_factor(cheap, direct):.2g} times the {smaller.method}'s"
