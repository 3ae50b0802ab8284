"""How one step is computed over processes: interchangeable siblings behind one protocol.

| name | each process holds | each process computes | what is exchanged |
|---|---|---|---|
| data | the model | some workers | gradients |
| fsdp | a part of every tensor | some workers | parameters, layer by layer, and gradients |
| pipeline | some layers | them, for every worker | activations and their gradients |
| tensor | a part of every large matrix | its part, for every worker | activations and their gradients |

    workers            one worker's part of a step, and its numbers
    model              the task's model on this process's device
    lockstep           workers in turns, for batch norm over all of them
    split, stages      what the last three share; a model as a chain of layers

Public: `build`, `Strategy`, `Setup`, `PlacedModel`, `WorkerNumbers`, `StepNumbers`. Imports data, sums, update,
placement and processes.team of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from scalewise.engine.data.feed import Feed
from scalewise.engine.data.samples import Samples
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import StepNumbers, WorkerStep
from scalewise.engine.placement import Placement
from scalewise.engine.processes.team import Team
from scalewise.engine.update.optimizer import Reader, StateEntry
from scalewise.recipe import Recipe
from scalewise.schedules import Cuts
from scalewise.tasks.task import Task


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


@dataclass(frozen=True)
class HeldBytes:
    """What one process holds between two steps."""

    parameters: int
    gradients: int
    optimizer: int


class Strategy(Protocol):
    """Place the model, compute and reduce the workers' gradients, update, and give the state by name."""

    model: PlacedModel  # its structure; its weights are only up to date within `whole`
    feed: Feed  # the batches of this process's workers

    @property
    def exact(self) -> bool:
        """Whether the bytes so far are those of any other exact placement."""

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean.

        Arguments:
            step: which one.
            signal: that this process received, or 0; every process reads it in the numbers.
            measures: whether to take the norm of every micro batch's gradient.
        """

    def worker_steps(self, step: int) -> Iterator[WorkerStep]:
        """Compute this process's workers' parts of a step again, at the present weights; nothing else changes."""

    def update(self, lr: float) -> None:
        """Change the weights."""

    def whole(self) -> AbstractContextManager[PlacedModel]:
        """The whole model on every process, to evaluate and to store; all processes ask for it together."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers with those of the whole model."""

    def fingerprint(self) -> list[int] | None:
        """A checksum, as two numbers, of the weights that are equal on every process; None where they are split."""

    def non_finite(self) -> str | None:
        """The name of a parameter that is not finite, the same on every process."""

    def state(self) -> list[StateEntry]:
        """What this process holds of the optimizer's state."""

    def emergency_state(self) -> list[StateEntry] | None:
        """The optimizer's whole state after the last whole step, once contact with another process is lost.

        The model is put back to that step, and training cannot continue. None where a process has only a part of it.
        """

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Take over a stored optimizer state."""

    def held(self) -> HeldBytes:
        """What this process holds."""


def build(setup: Setup) -> Strategy:
    """The strategy of the placement; plain data parallelism on one process. torch's engines take time to import."""
    if setup.placement.parallel == "data" or setup.team.size == 1:
        from scalewise.engine.parallel.data import DataParallel

        return DataParallel(setup)
    if setup.placement.parallel == "fsdp":
        from scalewise.engine.parallel.fsdp import FullyShardedParallel

        return FullyShardedParallel(setup)
    if setup.placement.parallel == "pipeline":
        from scalewise.engine.parallel.pipeline import PipelineParallel

        return PipelineParallel(setup)
    from scalewise.engine.parallel.tensor import TensorParallel

    return TensorParallel(setup)
