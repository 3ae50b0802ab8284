"""Learning rates as functions of progress.

A schedule maps progress (single-worker-equivalent samples) to a learning rate. It never sees steps or workers,
so it cannot run N times too fast. A step's rate is the schedule in the middle of the samples it consumes, which
keeps the rate summed over samples the same, to second order, for every global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scalewise.recipe import Recipe, ScheduleName

Schedule = Callable[[float], float]


def warmup(start: float, peak: float, samples: float) -> Schedule:
    """Rise linearly from `start` to `peak` over the first `samples` samples (Goyal et al. 2017).

    >>> warmup(0.0, 0.8, 100)(50)
    0.4
    """
    return lambda progress: start + (peak - start) * min(1.0, progress / samples)


def constant(peak: float, total: float) -> Schedule:
    """Stay at `peak`."""
    return lambda progress: peak


def cosine(peak: float, total: float) -> Schedule:
    """Fall from `peak` to 0 along half a cosine: peak · (1 + cos(π · progress ÷ total)) ÷ 2."""
    return lambda progress: peak * (1 + math.cos(math.pi * min(1.0, progress / total))) / 2


def linear(peak: float, total: float) -> Schedule:
    """Fall from `peak` to 0 in a straight line."""
    return lambda progress: peak * (1 - min(1.0, progress / total))


def step(peak: float, total: float) -> Schedule:
    """Divide by 10 after half and again after three quarters of the samples."""
    return lambda progress: peak * 0.1 ** ((progress >= total / 2) + (progress >= 0.75 * total))


DECAYS: dict[ScheduleName, Callable[[float, float], Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": step,
}


def build(recipe: Recipe, samples_per_epoch: int) -> Schedule:
    """The whole schedule of a recipe: warm-up, then decay over the samples that are left.

    Warm-up starts at the single-worker rate when the LR rule raises it, else at 0.
    """
    peak = recipe.lr * recipe.lr_factor
    total = float(recipe.total_steps(samples_per_epoch) * recipe.global_batch)
    rising = min(recipe.warmup_epochs * samples_per_epoch, total)
    decay = DECAYS[recipe.schedule](peak, max(total - rising, 1.0))
    if rising == 0:
        return decay
    rise = warmup(recipe.lr if recipe.lr_factor > 1 else 0.0, peak, rising)
    return lambda progress: rise(progress) if progress < rising else decay(progress - rising)
