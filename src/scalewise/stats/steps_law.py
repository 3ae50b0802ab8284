"""The critical-batch law S = S_min · (1 + B_crit ÷ B) through measured steps: the one fit, for `measure` and `plan`.

Least squares on log S. The interval of B_crit is the profile likelihood's: all values whose squared residuals exceed
the least by no more than t² · s², where s² = RSS ÷ (points − 2), and s at least 3 %, however well a few points agree.
It is unbounded above when the data do not bend away from S ∝ 1 ÷ B, and 0 is in it when they do not bend away from
S = const.

A point is what errs on its own: in a sweep the median of the seeds at a global batch, whose tuned learning rate may be
off for all of them (so s holds that too); of runs by one rule every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from scalewise.stats.critical_batch import CriticalBatch, Method, overlap, predicted
from scalewise.stats.interval import LEVEL, Interval, t_quantile

FLAT, STEEP = 1e-6, 1e6  # of the smallest and largest global batch: beyond, the law is S = const and S ∝ 1/B
GRID_POINTS = 2000
LEAST_SPREAD = 0.03  # of log steps about the law


@dataclass
class Law:
    """S = S_min · (1 + B_crit ÷ B) through steps measured at some global batches.

    Residuals of log S are a function of log B_crit; the other parameter, log S_min, has a closed form.
    """

    global_batches: tuple[int, ...]
    steps: tuple[float, ...]
    method: Literal["sweep", "runs"]

    def __post_init__(self) -> None:
        self._batches, self._log_steps = np.array(self.global_batches, float), np.log(np.array(self.steps))
        low, high = math.log(FLAT * self._batches.min()), math.log(STEEP * self._batches.max())
        self._grid = np.linspace(low, high, GRID_POINTS)
        self._on_grid = self._squares(self._grid)
        self._best = self._minimum()
        self._least = self._rss(self._best)
        self.freedom = max(len(self.steps) - 2, 0) if len({*self.global_batches}) > 1 else 0  # 0: any law fits
        mean_square = self._least / self.freedom if self.freedom else 0.0
        self.residual = math.sqrt(mean_square)  # standard deviation of log S about the law: 0.05 is about 5 %
        self._variance = max(mean_square, LEAST_SPREAD**2)
        self.critical = self.at_level(LEVEL)

    @property
    def least_steps(self) -> float | None:
        """S_min: steps at an infinite global batch; None where the steps never stopped falling."""
        return None if self.critical.value is None else math.exp(self._intercept())

    @property
    def least_samples(self) -> float | None:
        """E_min: samples at a tiny global batch; None where the steps never began to fall."""
        return math.exp(self._intercept() + self._best) if self.critical.value != 0 else None

    def at_level(self, level: float) -> CriticalBatch:
        """The critical batch with an interval of any level; nothing from two points, which any law fits."""
        limit = self._limit(level)
        if limit is None:
            return CriticalBatch(None, None, None, self.method, level=level)
        first, last = self._accepted_ends(limit)
        best, ends = self._best, (self._grid[0], self._grid[-1])
        value = 0.0 if best == ends[0] else None if best == ends[1] else math.exp(best)
        low, high = 0.0 if first is None else math.exp(first), last and math.exp(last)
        return CriticalBatch(value, low, high, self.method, level=level)

    def near(self, prior: CriticalBatch, level: float = LEVEL) -> CriticalBatch:
        """The critical batch, believed to lie in `prior` before the steps are looked at: median and interval.

        The prior is normal in log B on either side of its value, flat where it has no end; the likelihood is Student's.
        """
        assert prior.value
        apart = self._grid - math.log(prior.value)
        deviations = [abs(math.log(end / prior.value)) / t_quantile(math.inf, prior.level) if end else math.inf
                      for end in (prior.low, prior.high)]  # fmt: skip
        before = -0.5 * (apart / np.where(apart < 0, *deviations)) ** 2
        excess = (self._on_grid - self._least) / self._variance
        after = np.exp(before) * (1 + excess / self.freedom) ** (-(self.freedom + 1) / 2)
        places = [0.5, (1 - level) / 2, (1 + level) / 2]
        value, low, high = np.exp(np.interp(places, after.cumsum() / after.sum(), self._grid)).tolist()
        method: Method = "sweep and noise scale" if self.method == "sweep" else "runs and noise scale"
        return CriticalBatch(value, low, high, method, level=level)

    def steps_at(self, global_batch: float) -> Interval[float | None]:
        """Steps at any global batch, with the interval of one more point.

        That is the union, over accepted values of B_crit, of what a new point may be. For a given B_crit a new point y
        costs n ÷ (n + 1) · (y − ŷ)² more, so y is accepted up to the limit's distance.
        """
        value = math.exp(self._curve(np.array([self._best]), global_batch)[0])
        limit, count = self._limit(LEVEL), len(self.steps)
        if limit is None:
            return Interval(value, None, None)
        accepted = np.append(self._grid[self._on_grid <= limit], self._best)
        half = np.sqrt(np.maximum(limit - self._squares(accepted), 0.0) * (count + 1) / count)
        middle = self._curve(accepted, global_batch)
        return Interval(value, math.exp((middle - half).min()), math.exp((middle + half).max()))

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

    def _minimum(self) -> float:
        """The best grid point, refined; an end of the grid stands for 0 or infinity."""
        index = int(self._on_grid.argmin())
        if index in (0, GRID_POINTS - 1) or self._on_grid.max() - self._on_grid.min() == 0:
            return float(self._grid[index])
        found = minimize_scalar(self._rss, bounds=(self._grid[index - 1], self._grid[index + 1]), method="bounded",
                                options={"xatol": 1e-9})  # fmt: skip
        flat = min(self._on_grid[0], self._on_grid[-1])  # as good at an end, up to rounding: nothing bends
        return float(found.x) if found.fun < flat * (1 - 1e-9) else float(self._grid[index])

    def _intercept(self) -> float:
        """log S_min."""
        return float(self._residuals(np.array([self._best])).mean(axis=1)[0])

    def _residuals(self, log_critical: np.ndarray) -> np.ndarray:
        """Of S_min = 1; (B_crit, global batch)."""
        return self._log_steps - np.log1p(np.exp(log_critical)[:, None] / self._batches)

    def _squares(self, log_critical: np.ndarray) -> np.ndarray:
        """Squared residuals, with the best S_min for each B_crit."""
        residuals = self._residuals(log_critical)
        return ((residuals - residuals.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)

    def _rss(self, log_critical: float) -> float:
        return float(self._squares(np.array([log_critical]))[0])

    def _curve(self, log_critical: np.ndarray, global_batch: float) -> np.ndarray:
        return self._residuals(log_critical).mean(axis=1) + np.log1p(np.exp(log_critical) / global_batch)

    def _limit(self, level: float) -> float | None:
        return self._least + t_quantile(self.freedom, level) ** 2 * self._variance if self.freedom else None

    def _accepted_ends(self, limit: float) -> tuple[float | None, float | None]:
        """The least and largest accepted log B_crit; None where an end of the grid is accepted."""

        def excess(value: float) -> float:
            return self._rss(value) - limit

        first = None if self._on_grid[0] <= limit else _crossing(excess, float(self._grid[0]), self._best)
        last = None if self._on_grid[-1] <= limit else _crossing(excess, self._best, float(self._grid[-1]))
        return first, last


def fit_law(points: Iterable[tuple[int, float]], method: Literal["sweep", "runs"] = "sweep") -> Law:
    """The law through (global batch, steps) pairs, of which there must be one at least.

    >>> law = fit_law((batch, 50 * (1 + 200 / batch)) for batch in (25, 50, 100, 200, 400, 800))
    >>> round(law.critical.value), round(law.steps_at(300).value, 1)
    (200, 83.3)
    """
    batches, steps = zip(*sorted(points), strict=True)
    return Law(batches, steps, method)


def medians(runs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The median steps of the runs at each global batch."""
    by_batch: dict[int, list[float]] = {}
    for global_batch, steps in runs:
        by_batch.setdefault(global_batch, []).append(steps)
    return [(global_batch, float(np.median(by_batch[global_batch]))) for global_batch in sorted(by_batch)]


def to_go_by(noise: CriticalBatch | None, direct: Law | CriticalBatch | None, level: float = LEVEL) -> CriticalBatch:
    """The critical batch that follows from everything that was measured: the one answer of `measure` and `plan`.

    What training shows stands alone where it gives an upper end. A law that does not is taken together with what the
    noise scale predicts: the best fit is then as good as any larger value. Branches have no law to do that with: where
    they show nothing, or a lower bound that the noise scale lies above, the noise scale counts.

    Arguments:
        noise: as the noise scale gives it, with its sampling error (`from_noise`).
        direct: what trainings gave: a law through their steps, or a critical batch without one.
        level: of the interval; the value does not depend on it.
    """
    noise = noise or CriticalBatch(None, None, None, "noise scale")
    shown = direct.critical if isinstance(direct, Law) else direct
    if direct is None or shown is None or (isinstance(direct, Law) and not direct.freedom):
        return predicted(noise).at_level(level)
    if shown.high is not None or not (noise.value and noise.bounded):
        return direct.at_level(level)
    if isinstance(direct, Law):
        return direct.near(predicted(noise), level)
    use_noise = not shown.bounded or (shown.value is None and overlap(noise, shown))
    return (predicted(noise) if use_noise else shown).at_level(level)


def _crossing(function: Callable[[float], float], start: float, stop: float) -> float:
    """Where a function changes sign; at the end where it hardly does."""
    if function(start) * function(stop) >= 0:
        return start if abs(function(start)) < abs(function(stop)) else stop
    return float(brentq(function, start, stop, xtol=1e-6))


@dataclass(frozen=True)
class HeldOut:
    """A global batch that was left out of the law, what the law says of it, and what was measured."""

    global_batch: int
    predicted: Interval[float | None]
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


def held_out_one_by_one(runs: Iterable[tuple[int, float]]) -> list[HeldOut]:
    """Every global batch but the smallest and the largest, predicted from all others."""
    points, found = medians(runs), []
    for global_batch, measured in points[1:-1]:
        rest = fit_law([point for point in points if point[0] != global_batch])
        found.append(HeldOut(global_batch, rest.steps_at(global_batch), measured))
    return found
