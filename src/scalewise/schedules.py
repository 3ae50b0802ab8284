"""Learning rates as functions of progress.

A schedule maps progress (single-worker-equivalent samples) to a learning rate. It never sees steps or workers,
so it cannot run N times too fast. A step's rate is the schedule in the middle of the samples it consumes, which
keeps the rate summed over samples the same, to second order, for every global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scalewise.recipe import Recipe, ScheduleName

Schedule = Callable[[float], float]
GROWS_AT = (0.5, 0.75)  # where `step` lowers the rate and `growth` raises the global batch


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


def step(peak: float, total: float, drop: float = 10.0) -> Schedule:
    """Divide by `drop` after half and again after three quarters of the samples."""
    return lambda progress: peak / drop ** sum(progress >= share * total for share in GROWS_AT)


DECAYS: dict[ScheduleName, Callable[[float, float], Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": step,
    "growth": constant,  # the global batch grows instead: see Cuts
}


def build(recipe: Recipe, samples_per_epoch: int) -> Schedule:
    """The whole schedule of a recipe: warm-up, then decay over the samples that are left.

    Warm-up starts at the single-worker rate when the LR rule raises it, else at 0.
    """
    peak = recipe.lr * recipe.lr_factor
    total = float(recipe.total_steps(samples_per_epoch) * recipe.step_progress)
    rising = min(recipe.warmup_epochs * samples_per_epoch, total)
    falling = max(total - rising, 1.0)
    decay = step(peak, falling, recipe.drop) if recipe.schedule == "step" else DECAYS[recipe.schedule](peak, falling)
    if rising == 0:
        return decay
    rise = warmup(recipe.lr if recipe.lr_factor > 1 else 0.0, peak, rising)
    return lambda progress: rise(progress) if progress < rising else decay(progress - rising)


@dataclass(frozen=True)
class _Phase:
    """Steps from `first_step` on, which begin at sample `start` and take `parts` worker batches per worker."""

    first_step: int
    start: int
    parts: int


class Cuts:
    """How steps cut the sample stream into global batches: equal ones, or growing ones (Smith et al. 2018).

    Instead of dividing the rate by `drop`, `growth` multiplies the global batch by it: each worker adds up the
    gradients of several worker batches, at the same progress. The noise of an update falls alike, in fewer steps.

    >>> cuts = Cuts(Recipe(worker_batch=10, epochs=8.0, schedule="growth", drop=2), samples=100)
    >>> [cuts.parts(step) for step in (0, 39, 40, 50)], cuts.total_steps, cuts.start(cuts.total_steps)
    ([1, 1, 2, 4], 55, 800)
    """

    def __init__(self, recipe: Recipe, samples: int) -> None:
        self.micro_batch = recipe.rows
        self._workers, self._micro_batches = recipe.workers, recipe.micro_batches
        self._global_batch = recipe.global_batch
        self.total_steps = recipe.total_steps(samples)
        self._phases = [_Phase(0, 0, 1)]
        if recipe.schedule == "growth":
            self._grow(self.total_steps, recipe.drop)

    def _grow(self, equal_steps: int, drop: int) -> None:
        """Cut the same samples into larger steps; what does not fill one is left to the next phase.

        The last phase shares out what is left among steps of about its size; one that is shorter is one step.
        """
        ends = [round(share * equal_steps) for share in (0.0, *GROWS_AT, 1.0)]
        self._phases.clear()
        self.total_steps = start = done = 0
        for number, last in enumerate(ends[1:]):
            left = last - done
            if not left:
                continue
            parts = min(drop**number, left)
            steps = left // parts
            if last == equal_steps:
                steps = round(left / parts)
                parts = round(left / steps)
            self._phases.append(_Phase(self.total_steps, start, parts))
            self.total_steps += steps
            done += steps * parts
            start += steps * parts * self._global_batch

    def start(self, step: int) -> int:
        """Where in the stream a step begins: the samples seen before it."""
        phase = self._phase(step)
        return phase.start + (step - phase.first_step) * phase.parts * self._global_batch

    def parts(self, step: int) -> int:
        """Worker batches that each worker takes in a step."""
        return self._phase(step).parts

    def samples(self, step: int) -> int:
        """Samples of all workers in a step."""
        return self._phase(step).parts * self._global_batch

    def micro_batches(self, step: int) -> int:
        """Micro batches of each worker in a step."""
        return self._phase(step).parts * self._micro_batches

    def gradients(self, step: int) -> int:
        """Gradients, one for each micro batch of each worker, that make the mean of a step."""
        return self._workers * self.micro_batches(step)

    @property
    def most_parts(self) -> int:
        """Worker batches that each worker takes in the largest step."""
        return self._phases[-1].parts

    def _phase(self, step: int) -> _Phase:
        return next(phase for phase in reversed(self._phases) if phase.first_step <= step)
