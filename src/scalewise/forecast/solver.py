"""Many small fits of ε(m) = α·m^β + γ at once: Levenberg–Marquardt on log residuals with Huber's weights.

The unknowns of a fit are (a, b, g) with ε = exp(a + b·x) + g and x the log of m, centred; b ≤ 0 and 0 ≤ g are kept by
projection. All arrays are (fit, …), so that many starts and many values of γ cost one pass through numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HUBER = 1.345  # residual, in units of their scale, from which on it counts linearly: 95 % efficient if they are normal
STEPS, SETTLED = 40, 1e-7  # at most so many steps, until none is longer than this
STEEPEST = -3.0  # β of a curve; Hestness et al. 2017 find −0.07 to −0.5
MOST = 1.05  # of the least error: what γ may be


@dataclass(frozen=True)
class Solutions:
    """The unknowns of some fits, (fit, 3), and Huber's loss of each, in squared log units."""

    unknowns: Array
    losses: Array


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
    """A straight line through log(ε − γ), for γ some shares of the least error; (fit · share, 3)."""
    least = np.exp(logs.min(axis=1))  # (fit,)
    gamma = (shares[None, :] * least[:, None]).reshape(-1, 1)  # (fit · share, 1)
    repeated = np.repeat(np.exp(logs), len(shares), axis=0)
    rest = np.log(np.maximum(repeated - gamma, 1e-3 * repeated))
    centre = x - x.mean()
    slope = np.clip((rest * centre).sum(axis=1) / (centre**2).sum(), STEEPEST, 0.0)
    level = rest.mean(axis=1) - slope * x.mean()
    return np.column_stack([level, slope, gamma[:, 0]])


def solve(x: Array, logs: Array, first: Array, scale: float, free_floor: bool = True) -> Solutions:
    """The fits from some starts.

    Arguments:
        x: centred log sizes, (point,).
        logs: log errors, (fit, point).
        first: where each fit starts, (fit, 3).
        scale: of the residuals, for Huber.
        free_floor: whether γ is fitted; else it stays where it starts.
    """
    most = MOST * np.exp(logs.min(axis=1))
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
    return Solutions(at, losses)


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
