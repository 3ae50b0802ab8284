"""What every kind of parallelism does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.data.samples import Samples
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.placement import Placement
from scalewise.engine.processes.team import Gathered, Team
from scalewise.engine.sums.flat import FlatLayout
from scalewise.engine.sums.reductions.protocol import Scale
from scalewise.engine.update.optimizer import Reader, StateEntry
from scalewise.recipe import Recipe
from scalewise.schedules import Cuts
from scalewise.tasks.task import Number, Task


@dataclass(frozen=True)
class Setup:
    """What a strategy is built from: a task, how and where it is learned, its samples, and the model at its start."""

    task: Task
    recipe: Recipe
    placement: Placement
    team: Team
    samples: Samples
    cuts: Cuts
    model: PlacedModel

    def measures(self, step: int) -> bool:
        """Whether the norm of every micro batch's gradient is wanted in a step."""
        groups = self.recipe.workers * self.cuts.parts(step) * self.recipe.micro_batches
        return (self.placement.noise or self.recipe.lr_rule == "adascale") and groups > 1


@dataclass(frozen=True)
class StepNumbers:
    """A step's numbers on their way: read them a step late, so that nothing waits."""

    rows: Gathered  # (worker, number); the last number is the signal that the worker's process was sent, or 0
    squared_norm: Tensor | None
    fingerprinted: bool = False  # whether each row ends with the fingerprint of its process's weights before the step


@dataclass(frozen=True)
class WorkerStep:
    """One worker's part of a step: its numbers, as in a step's rows without the signal, and its gradients."""

    worker: int
    numbers: list[Number]
    gradients: list[Tensor]  # of the parameters, in order; they are overwritten by the next worker


@dataclass(frozen=True)
class HeldBytes:
    """What one process holds between two steps."""

    parameters: int
    gradients: int
    optimizer: int


class Strategy(Protocol):
    """Place the model, compute and reduce the workers' gradients, update, and give the state by name."""

    model: PlacedModel  # its structure; its weights are only up to date within `whole`

    @property
    def exact(self) -> bool:
        """Whether the bytes so far are those of any other exact placement."""

    @property
    def metric_names(self) -> list[str]:
        """The metrics in each worker's numbers, in order; known after the first step."""

    @property
    def waited_seconds(self) -> float:
        """How long this process has waited for its samples so far."""

    def samples_of(self, step: int, worker: int) -> tuple[list[int], list[int]]:
        """The training samples of one worker in one step, and their epochs."""

    def gradients(self, step: int, signal: int) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean; tell all processes of a signal sent here."""

    def worker_steps(self, step: int) -> Iterator[WorkerStep]:
        """This process's workers' parts of a step once more, at the weights as they are; nothing else changes."""

    def update(self, lr: float) -> None:
        """Change the weights."""

    def whole(self) -> AbstractContextManager[PlacedModel]:
        """The whole model on every process, to evaluate and to store; all processes ask for it together."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers with those of the whole model."""

    def fingerprint(self) -> list[int] | None:
        """A number, in halves, of the weights that every process must hold alike; None where none does."""

    def broken(self) -> str | None:
        """The name of a parameter that is not finite, the same on every process."""

    def state(self) -> list[StateEntry]:
        """What this process holds of the optimizer's state."""

    def survived(self) -> list[StateEntry] | None:
        """After contact with another process was lost: the optimizer's whole state after the last whole step, to which
        the model is put back; None where a process has only a part of it. Nothing goes on from here."""

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Take over a stored optimizer state."""

    def held(self) -> HeldBytes:
        """What this process holds."""

    def close(self) -> None:
        """End what runs beside the training."""


def norm_matters(recipe: Recipe) -> bool:
    """Whether the norm of the mean gradient enters the update, and not only the records."""
    return recipe.clip_norm is not None or recipe.lr_rule == "adascale"


def mean_factor(recipe: Recipe, parts: int, weights: Tensor | None) -> float:
    """What turns the sum of the workers' gradients, each ÷ worker batch, into the mean over the global batch.

    Arguments:
        recipe, parts: how large the global batch is, and how many times that in this step.
        weights: the weight of each worker's samples; None where samples count alike.
    """
    total = float(parts * recipe.global_batch) if weights is None else float(sum(weights.flatten().tolist()))
    return recipe.worker_batch / total if total else 1.0


def scaling(recipe: Recipe, layout: FlatLayout, factor: float) -> Scale:
    """Gradients times `factor`, averages divided by the number of workers."""

    def scale(stretch: Tensor, start: int) -> None:
        cut = min(max(layout.parameters_stop - start, 0), len(stretch))
        if factor != 1.0:
            stretch[:cut].mul_(factor)
        if recipe.workers > 1:
            stretch[cut:].div_(recipe.workers)

    return scale


def clip_coefficient(clip_norm: float, squared_norm: Tensor) -> Tensor:
    """What a gradient is multiplied by, as torch.nn.utils.clip_grad_norm_ has it."""
    return (clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)


def overflows(numbers: StepNumbers) -> bool:
    """Whether a step's mean gradient is not finite, where that is known without waiting: on a CPU, if measured."""
    square = numbers.squared_norm
    return square is not None and square.is_cpu and not math.isfinite(square)


def first_broken(strategy: Strategy, step: int, team: Team) -> tuple[int, str] | None:
    """The first worker with a gradient that is not finite, and its first such parameter; the same on every process."""
    names = [*strategy.model.parameters]
    mine = [(one.worker, name) for one in strategy.worker_steps(step) for name in broken_parameters(one, names)]
    found = [mine[:1]]
    if team.size > 1:
        found *= team.size
        dist.all_gather_object(found, mine[:1])
    return min((first for one in found for first in one), default=None, key=lambda first: first[0])


def broken_parameters(one: WorkerStep, names: list[str]) -> list[str]:
    """The parameters whose gradients are not finite."""
    return [name for name, gradient in zip(names, one.gradients, strict=True) if not gradient.isfinite().all()]
