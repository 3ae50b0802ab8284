"""The learning curve ε(m) = α·m^β + γ (Hestness et al. 2017) through measured errors, and what it leaves open.

Fitted with Huber's loss on log residuals from many starts. Intervals are the profile likelihood's: γ is held at many
values, α and β are fitted to each, and every curve is accepted that raises the loss by no more than t²·s² over the
least, s² being the variance of the residuals. So they know that γ and β can stand in for each other, which a bootstrap
around the best curve did not: it covered 90 to 95 % where 95 % were meant, at several times the work (docs/log.md).

Many small fits of ε(m) = α·m^β + γ at once: Levenberg–Marquardt on log residuals with Huber's weights.

The unknowns of a fit are (a, b, g) with ε = exp(a + b·x) + g and x the log of m, centred; b ≤ 0 and 0 ≤ g are kept by
projection. All arrays are (fit, …), so that many starts and many values of γ cost one pass through numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalewise.errors import DataError
from scalewise.stats.interval import Interval, t_quantile

LEAST_SIZES = 4  # three unknowns, and one to see whether they fit
START_SHARES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.97])  # of the least error: γ of the starts
NORMAL_LOSS = 0.9326  # Huber's mean loss of standard normal residuals, whose mean square is 1
COARSE, FINE = 40, 40  # values of γ that are held
LEAST_SCALE = 1e-4  # of log residuals; a curve without any noise is still not known better
IDENTIFIED_RATIO = 4.0  # between the ends of γ's interval, up to which it counts as known


@dataclass(frozen=True)
class LearningCurve:
    """A fitted learning curve ε(m) = α·m^β + γ with 95 % intervals, and all curves that the data accept."""

    alpha: Interval[float]
    beta: Interval[float]
    gamma: Interval[float]
    identified: bool  # whether γ is known: 0 is not in its interval, whose ends are within a factor of four
    spread: float  # standard deviation of log ε about the curve; 0.05 is about 5 %
    unknowns: Array  # (curve, 3), the best one first
    room: Array  # (curve,): t²·s² less what the loss of each exceeds the least by
    inverse: Array  # (curve, 2, 2), of their normal equations of a and b
    centre: float  # of log m

    def at(self, size: float) -> Interval[float]:
        """The error that a new measurement at some size would show: its own noise comes on top of the curves'."""
        x = math.log(size) - self.centre
        values = curve(self.unknowns, np.array([x]))[:, 0]
        leverage = self._leverage(1 - self.unknowns[:, 2] / values, np.full(len(values), x))
        middle, half = np.log(values), np.sqrt(np.maximum(self.room, 0.0) * (leverage + 1))
        return Interval(math.exp(middle[0]), math.exp((middle - half).min()), math.exp((middle + half).max()))

    def size_for(self, error: float) -> Interval[float | None]:
        """Samples at which the curves come down to an error; None where the best one, or the last, never does."""
        a, b, g = self.unknowns.T
        reaches = (g < error) & (b < 0)
        if not reaches.any():
            return Interval(None, None, None)
        safe = np.where(reaches, (error - g) / error, 1.0)
        x = np.where(reaches, (np.log(np.where(reaches, error - g, 1.0)) - a) / np.where(reaches, b, -1.0), 0.0)
        half = np.sqrt(np.maximum(self.room, 0.0) * self._leverage(safe, x)) / np.abs(np.where(reaches, b * safe, 1.0))
        ends = np.stack([x - half, x + half])[:, reaches] + self.centre
        value = _exp(x[0] + self.centre) if reaches[0] else None
        return Interval(value, _exp(ends.min()), _exp(ends.max()) if reaches.all() else None)

    def _leverage(self, share: Array, x: Array) -> Array:
        """Variance of log ε at x, in units of s², for γ held."""
        gradient = np.stack([share, share * x], axis=1)
        found: Array = np.einsum("ci,cij,cj->c", gradient, self.inverse, gradient)
        return found


def _exp(value: float) -> float:
    return math.exp(min(float(value), 700.0))


def fit(points: Sequence[tuple[float, float]]) -> LearningCurve:
    """The learning curve through (size, error) pairs; several errors at one size are several points.

    >>> found = fit([(m, 2.0 * m**-0.5 + 0.1) for m in (100, 200, 400, 800, 1600, 3200, 6400)])
    >>> round(found.alpha.value, 2), round(found.beta.value, 2), round(found.gamma.value, 3), found.identified
    (2.0, -0.5, 0.1, True)
    >>> round(found.size_for(0.12).value)
    10000
    """
    sizes, errors = _checked(points)
    centre = float(np.log(sizes).mean())
    x, logs = np.log(sizes) - centre, np.log(errors)
    scale = 1.0  # first without robustness, to learn the scale
    for _ in range(2):
        found, losses = solve(x, logs, starts(x, logs, START_SHARES), scale)
        best = found[[losses.argmin()]]  # (1, 3)
        residuals = logs - np.log(curve(best, x)[0])
        spent = math.sqrt(len(x) / max(len(x) - 3, 1))  # three residuals, on the unknowns
        scale = max(1.4826 * float(np.median(np.abs(residuals))) * spent, LEAST_SCALE)
    least = float(huber(residuals[None, :], scale)[0])
    variance = max(least / (NORMAL_LOSS * (len(x) - 3)), LEAST_SCALE**2)
    limit = t_quantile(len(x) - 3) ** 2 * variance
    return _described(*_accepted(x, logs, best, least, scale, limit), centre, math.sqrt(variance))


def _checked(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    sizes, errors = (np.array(column, float) for column in zip(*points, strict=True)) if points else (np.empty(0),) * 2
    wrong = [(m, e) for m, e in points if not (0 < m < math.inf and 0 < e < math.inf)]
    if wrong:
        raise DataError(f"a learning curve needs sizes and errors above 0, got {wrong[0]}; leave that point out")
    if len(set(sizes)) < LEAST_SIZES:
        raise DataError(
            f"a learning curve needs errors at {LEAST_SIZES} or more sizes, got {len(set(sizes))}; add smaller or "
            f"larger ones"
        )
    return sizes, errors


def _accepted(
    x: Array, logs: Array, best: Array, least: float, scale: float, limit: float
) -> tuple[Array, Array, Array]:
    """Curves with γ held at many values, coarse ones first and then fine ones where the data accept them."""

    def held(values: Array) -> tuple[Array, Array]:
        first = starts(x, logs, values / np.exp(logs.min()))
        found, losses = solve(x, logs, first, scale, free_floor=False)
        return found, least + limit - losses

    grid = np.linspace(0.0, MOST * float(np.exp(logs.min())), COARSE)
    _, room = held(grid)
    inside = np.append(grid[room >= 0], best[0, 2])
    step = grid[1]
    fine = np.linspace(max(inside.min() - step, 0.0), min(inside.max() + step, grid[-1]), FINE)
    unknowns, room = held(fine)
    unknowns, room = np.concatenate([best, unknowns]), np.append(limit, room)
    keep = room >= 0
    unknowns, room = unknowns[keep], room[keep]
    values = curve(unknowns, x)
    share = 1 - unknowns[:, 2:3] / values
    weights = np.minimum(1.0, HUBER * scale / np.maximum(np.abs(logs - np.log(values)), 1e-300))
    jacobian = np.stack([share, share * x], axis=2)
    normal = np.einsum("cp,cpi,cpj->cij", weights, jacobian, jacobian) + 1e-12 * np.eye(2)
    return unknowns, room, np.linalg.inv(normal)


def _described(unknowns: Array, room: Array, inverse: Array, centre: float, spread: float) -> LearningCurve:
    """The best curve in its own terms, with the intervals over all accepted ones."""
    a, b, g = unknowns.T
    wide = np.sqrt(np.maximum(room, 0.0))
    level = a - b * centre  # log α; its gradient in (a, b) is (1, −centre)
    gradient = np.array([1.0, -centre])
    of_level = wide * np.sqrt(np.einsum("i,cij,j->c", gradient, inverse, gradient))
    of_slope = wide * np.sqrt(inverse[:, 1, 1])
    low, high = float(g.min()), float(g.max())
    return LearningCurve(
        alpha=Interval(_exp(level[0]), _exp((level - of_level).min()), _exp((level + of_level).max())),
        beta=Interval(float(b[0]), float((b - of_slope).min()), min(0.0, float((b + of_slope).max()))),
        gamma=Interval(float(g[0]), low, high),
        identified=low > 0 and high <= IDENTIFIED_RATIO * low,
        spread=spread,
        unknowns=unknowns,
        room=room,
        inverse=inverse,
        centre=centre,
    )


Array = NDArray[np.float64]

HUBER = 1.345  # residual, in units of their scale, from which on it counts linearly: 95 % efficient if they are normal
STEPS, SETTLED = 40, 1e-7  # most steps, and the longest step that counts as settled
STEEPEST = -3.0  # β of a curve; Hestness et al. 2017 find −0.07 to −0.5
MOST = 1.05  # of the least error: what γ may be


def curve(unknowns: Array, x: Array) -> Array:
    """ε of every fit at every x."""
    power: Array = np.exp(unknowns[:, 0:1] + unknowns[:, 1:2] * x)
    return power + unknowns[:, 2:3]


def huber(residuals: Array, scale: float) -> Array:
    """Huber's loss of each fit: squares, beyond HUBER · scale growing linearly."""
    size, limit = np.abs(residuals), HUBER * scale
    total: Array = np.where(size <= limit, size**2, 2 * limit * size - limit**2).sum(axis=-1)
    return total


def starts(x: Array, logs: Array, shares: Array) -> Array:
    """A straight line through log(ε − γ), for γ some shares of the least error; (share, 3)."""
    errors, gamma = np.exp(logs), shares * np.exp(logs.min())
    rest = np.log(np.maximum(errors - gamma[:, None], 1e-3 * errors))  # (share, point)
    centre = x - x.mean()
    slope = np.clip((rest * centre).sum(axis=1) / (centre**2).sum(), STEEPEST, 0.0)
    level = rest.mean(axis=1) - slope * x.mean()
    return np.column_stack([level, slope, gamma])


def solve(x: Array, logs: Array, first: Array, scale: float, free_floor: bool = True) -> tuple[Array, Array]:
    """The unknowns of the fits from some starts, (fit, 3), and Huber's loss of each, in squared log units.

    Arguments:
        x: centred log sizes, (point,).
        logs: log errors, (point,).
        first: where each fit starts, (fit, 3).
        scale: of the residuals, for Huber.
        free_floor: whether γ is fitted; else it stays where it starts.
    """
    most = MOST * np.exp(logs.min())
    at, damping = first.copy(), np.full(len(first), 1e-3)
    losses = huber(logs - np.log(curve(at, x)), scale)
    for _ in range(STEPS):
        step = _step(x, logs, at, scale, damping, free_floor)
        tried = at + step
        tried[:, 1] = np.clip(tried[:, 1], STEEPEST, 0.0)
        tried[:, 2] = np.clip(tried[:, 2], 0.0, most)
        there = huber(logs - np.log(curve(tried, x)), scale)
        better = there < losses
        at[better], losses[better] = tried[better], there[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
        if np.abs(step).max() < SETTLED:
            break
    return at, losses


def _step(x: Array, logs: Array, at: Array, scale: float, damping: Array, free_floor: bool) -> Array:
    """The damped Gauss–Newton step of every fit."""
    values = curve(at, x)
    share = (values - at[:, 2:3]) / values  # of the power law in ε
    floor = free_floor / values
    jacobian = np.stack([share, share * x, floor], axis=2)  # (fit, point, 3)
    residuals = logs - np.log(values)
    weights = np.minimum(1.0, HUBER * scale / np.maximum(np.abs(residuals), 1e-300))
    weighted = jacobian * weights[:, :, None]
    normal = np.einsum("fpi,fpj->fij", weighted, jacobian)
    diagonal = np.einsum("fii->fi", normal)
    normal += np.eye(3) * ((1 + damping[:, None]) * diagonal + 1e-12 - diagonal)[:, None, :]
    slope = np.einsum("fpi,fp->fi", weighted, residuals)
    step: Array = np.linalg.solve(normal, slope[:, :, None])[:, :, 0]
    return step
