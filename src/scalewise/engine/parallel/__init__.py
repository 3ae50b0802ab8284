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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from scalewise.engine.data.feed import Feed
from scalewise.engine.data.samples import Samples
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import StepNumbers, WorkerStep
from scalewise.engine.placement import Placement, loader_processes
from scalewise.engine.processes.team import Team
from scalewise.engine.update.optimizer import FlatOptimizer, Reader, StateEntry
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


class Strategy:
    """Place the model, compute and reduce the workers' gradients, update, and give the state by name."""

    exact: bool = True  # whether the bytes so far are those of any other exact placement
    _optimizer: FlatOptimizer

    def __init__(self, setup: Setup, workers: range) -> None:
        """Nothing is placed yet; `workers` are those whose batches this process needs."""
        self.model = setup.model  # its structure; its weights are only up to date within `whole`
        self._setup, self._team = setup, setup.team
        loaders = loader_processes(setup.placement, setup.team.here)
        self.feed = Feed(setup.task, setup.recipe, setup.samples, setup.cuts, setup.team.device, workers, loaders)

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean.

        Every process reads the `signal` that one has received, or 0, in the numbers. `measures` says whether to take
        the norm of every micro batch's gradient.
        """
        raise NotImplementedError

    def squared_norm(self) -> Tensor:
        """Of the mean gradient."""
        raise NotImplementedError

    def mean_gradient(self) -> list[Tensor]:
        """What this process holds of it."""
        raise NotImplementedError

    def worker_steps(self, step: int) -> Iterator[WorkerStep]:
        """Compute this process's workers' parts of a step again, at the present weights; nothing else changes.

        Nothing where no process ever holds a worker's whole gradient.
        """
        return iter(())

    def update(self, lr: float) -> None:
        """Change the weights."""
        raise NotImplementedError

    def whole(self) -> AbstractContextManager[PlacedModel]:
        """The whole model on every process, to evaluate and to store; all processes ask for it together."""
        raise NotImplementedError

    @contextmanager
    def evaluated(self) -> Iterator[PlacedModel]:
        """`whole`, with the weights to evaluate and to use: Schedule-Free's mean x, else those that are trained."""
        with self._optimizer.evaluated() as differs:
            if differs:
                self._publish()
            with self.whole() as model:
                yield model
        if differs:
            self._publish()

    def _publish(self) -> None:
        """Bring every process the weights that others update. No-op where none does."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers with those of the whole model."""
        raise NotImplementedError

    def fingerprint(self) -> list[int] | None:
        """A checksum, as two numbers, of the weights that are equal on every process; None where they are split."""
        return None

    def non_finite(self) -> str | None:
        """The name of a parameter that is not finite, the same on every process."""
        raise NotImplementedError

    def state(self) -> list[StateEntry]:
        """What this process holds of the optimizer's state."""
        return self._optimizer.state()

    def emergency_state(self) -> list[StateEntry] | None:
        """The optimizer's whole state after the last whole step, once contact with another process is lost.

        The model is put back to that step, and training cannot continue. None where a process has only a part of it.
        """
        return None

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Take over a stored optimizer state."""
        self._optimizer.load(names, read)

    def held(self) -> HeldBytes:
        """What this process holds."""
        raise NotImplementedError


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
