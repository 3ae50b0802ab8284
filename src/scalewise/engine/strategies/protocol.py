"""What every kind of parallelism does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from scalewise.engine.model import PlacedModel
from scalewise.engine.placement import Placement
from scalewise.engine.samples import Samples
from scalewise.engine.team import Gathered, Team
from scalewise.engine.update import Reader, StateEntry
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
