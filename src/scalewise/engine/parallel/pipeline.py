"""Pipeline parallelism: every process holds some layers and computes them for every worker.

The workers come in turn, each with its micro batches one behind another (1F1B). So each worker's gradient is computed
alone, at its fixed shape, in the order of its micro batches, and is summed over workers in the tree's order; norms are
taken on the whole model's chunk grid. The bytes are those of data parallelism, except where the model draws random
numbers. A worker with M micro batches leaves each of P stages idle for (P − 1) ÷ (M + P − 1) of its time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.data import streams
from scalewise.engine.data.feed import Feed
from scalewise.engine.parallel.model import Buffers, PlacedModel
from scalewise.engine.parallel.protocol import HeldBytes, Setup, StepNumbers, WorkerStep, mean_factor
from scalewise.engine.parallel.split import Holding, Shelf, broken_anywhere, check_parts, example, tried
from scalewise.engine.parallel.stages import LastStage, MeasuredStage, Passage, given, model_input, named, split
from scalewise.engine.parallel.workers import numbers_tensor, precision
from scalewise.engine.placement import loader_processes
from scalewise.engine.processes.team import Gathered
from scalewise.engine.sums.flat import FlatLayout
from scalewise.engine.update.optimizer import Reader, StateEntry
from scalewise.tasks.task import Number

ONLY_CALLS = "--parallel pipeline needs a task whose step does nothing with the model but call it"


@dataclass(frozen=True)
class _Row:
    """What one process knows of one worker: its stage's norms, and on the last stage the worker's numbers."""

    norms: list[Number]  # (micro batch, parameter of the model), 0 where another stage has the parameter
    weights: list[Number]
    numbers: list[Number]


class PipelineParallel:
    """Every process holds one stage."""

    def __init__(self, setup: Setup) -> None:
        recipe, team = setup.recipe, setup.team
        self.model, self._setup, self._team = setup.model, setup, team
        loaders = loader_processes(setup.placement, team.here)
        workers = range(recipe.workers)
        self._feed = Feed(setup.task, recipe, setup.samples, setup.cuts, team.device, workers, loaders)
        self.metric_names: list[str] = []
        self._width: int | None = None  # of the numbers of a worker, which the last stage alone knows at first
        self._draws = False  # whether any stage draws random numbers, as far as is known
        self._place_stage()
        own, model = self._own, setup.model
        self._parameters = {name: own[name] for name in model.parameters if name in own}
        averages = {name: own[name] for name in model.averages if name in own}
        self._buffers = Buffers(self._stage, averages, {name: own[name] for name in model.counters if name in own})
        self._holding = Holding(recipe, self._parameters, averages, self._whole)
        self._passage = Passage(self._new_stage)

    def _place_stage(self) -> None:
        """Split a copy of the model, keep one stage of it, and put the model itself on the shelf."""
        setup, rank = self._setup, self._team.rank
        module = copy.deepcopy(setup.model.module)
        names = {id(tensor): name for name, tensor in named(module)}
        batch = example(setup)
        with precision(setup.recipe, self._team.device), streams.undisturbed():
            whole, given_first = tried(setup, module, batch), model_input(setup.task, module, batch)
            stages, flows = split(module, given_first, self._team.size)
        self._owners = {names[id(tensor)]: owner for owner, part in enumerate(stages) for _, tensor in named(part)}
        self._stage = stages[rank]
        self._own = {names[id(tensor)]: tensor for _, tensor in named(self._stage)}
        before, after = (flow.detach() for flow in flows[rank : rank + 2])
        self._flow = before.requires_grad_() if rank else before, after.requires_grad_()
        self._whole = FlatLayout(setup.model.parameters, {}, 1)
        self._whole.cut_at_tensors()
        self._shelf = Shelf(setup.model)
        with given(setup.model.module, flows[-1]):
            check_parts(setup, whole, setup.model.module, batch, ONLY_CALLS)

    @property
    def exact(self) -> bool:
        """Whether no layer draws random numbers, whose order is then another one."""
        return not self._draws

    @property
    def waited_seconds(self) -> float:
        """How long this process has waited for its samples so far."""
        return self._feed.waited_seconds

    def samples_of(self, step: int, worker: int) -> tuple[list[int], list[int]]:
        """The training samples of one worker in one step, and their epochs."""
        return self._feed.samples_of(step, worker)

    def gradients(self, step: int, signal: int) -> StepNumbers:
        """Every worker in turn through all stages; this process sums the gradients of its own."""
        rows = []
        self._buffers.remember()
        for worker in range(self._setup.recipe.workers):
            if worker:
                self._buffers.restore()
            rows.append(self._worker(step, worker))
        self._buffers.check_fixed()
        table = self._exchanged(rows, signal)
        weights = None if self._setup.task.weight_is_samples else table[:, 1]
        self._holding.finish(mean_factor(self._setup.recipe, self._setup.cuts.parts(step), weights))
        measured = self._setup.recipe.clip_norm is not None or self._setup.measures(step)
        square = self._holding.clipped(self._holding.squared_norm()) if measured else None
        return StepNumbers(Gathered(table, None, [len(table)]), square)

    def _new_stage(self) -> MeasuredStage:
        parameters = [*self._parameters.values()]
        under = functools.partial(precision, self._setup.recipe, self._team.device)
        return MeasuredStage(self._stage, parameters, self._flow, self._team, under)

    def _worker(self, step: int, worker: int) -> _Row:
        """One worker's micro batches through the pipeline, and its gradient into the sum."""
        recipe, rank, task = self._setup.recipe, self._team.rank, self._setup.task
        streams.seed_everything(
            streams.key("worker", recipe.seed, step, worker, *([rank] if rank else [])), self._team.device
        )
        start = streams.random_state()[0]
        count = self._setup.cuts.parts(step) * recipe.micro_batches
        ends = rank in (0, self._team.size - 1)
        batches = [self._feed.batch(step, worker, micro) for micro in range(count)] if ends else []
        inputs = [model_input(task, self.model.module, batch) for batch in batches] if not rank else []
        last = LastStage(self._setup, batches)
        stage = self._passage.run(count, inputs, last.root, self._setup.measures(step))
        self._holding.put(worker, stage.sums)
        self._draws = self._draws or not torch.equal(start, streams.random_state()[0])
        self.metric_names = last.names or self.metric_names
        return _Row(self._spread(stage.norms, count), last.weights or [0.0] * count, last.numbers)

    def _spread(self, norms: list[Tensor], count: int) -> list[Number]:
        """The norms of this stage's parameters among those of the model, micro batch by micro batch."""
        places = [place for place, name in enumerate(self.model.parameters) if name in self._parameters]
        table = torch.zeros(count, len(self.model.parameters), dtype=torch.float64)
        for row, mine in zip(table, norms, strict=False):
            row[places] = mine.double().cpu()
        found: list[Number] = table.flatten().tolist()
        return found

    def _exchanged(self, rows: list[_Row], signal: int) -> Tensor:
        """Every worker's numbers on every process, (worker, number), from what each stage knows of them."""
        if self._width is None:
            known = [(self.metric_names, len(rows[0].numbers))]
            dist.broadcast_object_list(known, self._team.size - 1)
            self.metric_names, self._width = known[0]
        nothing: list[Number] = [0.0] * self._width
        mine = [[*row.norms, *row.weights, *(row.numbers or nothing), signal, self._draws] for row in rows]
        table = numbers_tensor(mine, self._team.device)
        everybody = self._team.gather_rows(table, [len(rows)] * self._team.size).wait()
        stages = everybody.view(self._team.size, *table.shape)  # (stage, worker, number)
        count, norms = len(rows[0].weights), len(rows[0].norms)
        numbers = stages[-1, :, norms + count :].clone()
        squares = stages[:, :, :norms].sum(0).view(len(rows), count, -1).square().sum(2)  # (worker, micro batch)
        shares = (self._setup.recipe.worker_batch / stages[-1, :, norms : norms + count]).square()
        numbers[:, 2] = sum((squares * shares).unbind(1))  # one after another, as a worker by itself does it
        self._draws = bool(stages[:, :, -1].any())
        numbers[:, -2] = stages[:, :, -2].amax(0)
        return numbers[:, :-1]

    def update(self, lr: float) -> None:
        """Change the stage's weights and averaged buffers."""
        self._holding.update(lr)

    def whole(self) -> AbstractContextManager[PlacedModel]:
        """The model with every stage's weights."""
        return self._shelf.filled(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, place in self.model.tensors().items():
            tensor = self._own[name].detach() if name in self._own else torch.empty_like(place)
            dist.broadcast(tensor, self._owners[name])
            yield name, tensor

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this stage's parameters and buffers."""
        for name, tensor in self._own.items():
            tensor.copy_(tensors[name])
        self._buffers.accept()

    def worker_steps(self, step: int) -> Iterator[WorkerStep]:
        """None: no process ever holds a worker's whole gradient."""
        return iter(())

    def fingerprint(self) -> list[int] | None:
        """None: no two processes hold the same."""
        return None

    def broken(self) -> str | None:
        """The name of a parameter that is not finite, the same on every process."""
        return broken_anywhere(self._parameters.items(), self._team)

    def state(self) -> list[StateEntry]:
        """The optimizer's state of this stage."""
        return self._holding.optimizer.state()

    def survived(self) -> list[StateEntry] | None:
        """A process has a part of it only."""
        return None

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Fill the optimizer's state of this stage."""
        self._holding.optimizer.load(names, read)

    def held(self) -> HeldBytes:
        """The stage, its sums over workers, and its state."""
        return self._holding.held()

    def close(self) -> None:
        """End the loader processes."""
        self._feed.close()
