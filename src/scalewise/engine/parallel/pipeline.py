"""Pipeline parallelism: every process holds some layers and computes them for every worker.

The workers come in turn, each with its micro batches one behind another (1F1B). So each worker's gradient is computed
alone, at its fixed shape, in the order of its micro batches, and is summed over workers in the tree's order; norms are
taken on the whole model's chunk grid. The bytes are those of data parallelism, except where the model draws random
numbers. A worker with M micro batches leaves each of P stages idle for (P − 1) ÷ (M + P − 1) of its time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.data import streams
from scalewise.engine.parallel import Setup
from scalewise.engine.parallel.split import LocalStrategy, check_split, dry_run, first_micro_batch
from scalewise.engine.parallel.stages import LastStage, MeasuredStage, Passage, given, model_input, named, split
from scalewise.engine.parallel.workers import (
    SIGNAL,
    SQUARED_NORMS,
    Buffers,
    StepNumbers,
    WorkerNumbers,
    numbers_tensor,
    pack,
    precision,
)
from scalewise.engine.sums.flat import FlatLayout
from scalewise.tasks.task import Number

ONLY_CALLS = "--parallel pipeline needs a task whose step does nothing with the model but call it"


@dataclass(frozen=True)
class _StageNumbers:
    """What one stage has of one worker: its gradients' norms, and on the last stage the worker's numbers."""

    norms: list[Number]  # (micro batch, parameter of the model), 0 where another stage has the parameter
    weights: list[Number]  # (micro batch,)
    numbers: WorkerNumbers | None


class PipelineParallel(LocalStrategy):
    """Every process holds one stage."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, range(setup.recipe.workers))
        self._metric_names: list[str] | None = None  # known to the last stage alone at first
        self.exact = True  # as far as is known, no layer draws random numbers, whose order is then another one
        self._place_stage()
        own, model = self._own, setup.model
        averages = {name: own[name] for name in model.averages if name in own}
        self._buffers = Buffers(self._stage, averages, {name: own[name] for name in model.counters if name in own})
        self._hold_part({name: own[name] for name in model.parameters if name in own}, averages, self._whole)
        self._passage = Passage(self._new_stage)

    def _place_stage(self) -> None:
        """Split a copy of the model, keep one stage of it, and empty the model itself."""
        setup, rank = self._setup, self._team.rank
        module = copy.deepcopy(setup.model.module)
        names = {id(tensor): name for name, tensor in named(module)}
        batch = first_micro_batch(setup)
        with precision(setup.recipe, self._team.device), streams.undisturbed():
            whole, given_first = dry_run(setup, module, batch), model_input(setup.task, module, batch)
            stages, flows = split(module, given_first, self._team.size)
        self._owners = {names[id(tensor)]: owner for owner, part in enumerate(stages) for _, tensor in named(part)}
        self._stage = stages[rank]
        self._own = {names[id(tensor)]: tensor for _, tensor in named(self._stage)}
        before, after = (flow.detach() for flow in flows[rank : rank + 2])
        self._flow = before.requires_grad_() if rank else before, after.requires_grad_()
        self._whole = FlatLayout(setup.model.parameters, {}, 1)
        self._whole.cut_at_tensors()
        self._empty_model()
        with given(setup.model.module, flows[-1]):
            check_split(setup, whole, setup.model.module, batch, ONLY_CALLS)

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """Every worker in turn through all stages; this process sums the gradients of its own."""
        found = []
        self._buffers.remember()
        for worker in range(self._setup.recipe.workers):
            if worker:
                self._buffers.restore()
            found.append(self._worker(step, worker, measures))
        self._buffers.check_fixed()
        names = self._agreed_names(found)
        table = self._exchanged(found, names, signal)
        return self._reduced(step, measures, table, names)

    def _new_stage(self) -> MeasuredStage:
        parameters = [*self._held.values()]
        under = functools.partial(precision, self._setup.recipe, self._team.device)
        return MeasuredStage(self._stage, parameters, self._flow, self._team, under)

    def _worker(self, step: int, worker: int, measures: bool) -> _StageNumbers:
        """One worker's micro batches through the pipeline, and its gradient into the sum."""
        recipe, rank, task = self._setup.recipe, self._team.rank, self._setup.task
        streams.seed_everything(
            streams.key("worker", recipe.seed, step, worker, *([rank] if rank else [])), self._team.device
        )
        start = streams.random_state()[0]
        count = self._setup.cuts.micro_batches(step)
        ends = rank in (0, self._team.size - 1)
        batches = [self.feed.batch(step, worker, micro) for micro in range(count)] if ends else []
        inputs = [model_input(task, self.model.module, batch) for batch in batches] if not rank else []
        last = LastStage(self._setup, batches)
        stage = self._passage.run(count, inputs, last.root, measures)
        self._put(worker, stage.sums)
        self.exact = self.exact and torch.equal(start, streams.random_state()[0])
        return _StageNumbers(self._spread(stage.norms, count), last.weights or [0.0] * count, last.numbers)

    def _spread(self, norms: list[Tensor], count: int) -> list[Number]:
        """The norms of this stage's parameters among those of the model, micro batch by micro batch."""
        places = [place for place, name in enumerate(self.model.parameters) if name in self._held]
        table = torch.zeros(count, len(self.model.parameters), dtype=torch.float64)
        for row, mine in zip(table, norms, strict=False):
            row[places] = mine.double().cpu()
        found: list[Number] = table.flatten().tolist()
        return found

    def _agreed_names(self, found: list[_StageNumbers]) -> list[str]:
        """The names of the metrics, from the last stage."""
        if self._metric_names is None:
            mine = found[0].numbers
            names = [*mine.metrics] if mine is not None else []
            self._metric_names = self._team.shared(names, self._team.size - 1)
        return self._metric_names

    def _exchanged(self, found: list[_StageNumbers], names: list[str], signal: int) -> Tensor:
        """Every worker's numbers on every process, as `pack` lays them out, from what each stage has of them."""
        device, workers = self._team.device, len(found)
        count, norms = len(found[0].weights), len(found[0].norms)
        nothing = WorkerNumbers(0.0, 0.0, dict.fromkeys(names, (0.0, 0.0)))
        packed = pack([one.numbers or nothing for one in found], device, signal)
        own = numbers_tensor([[*one.norms, *one.weights] for one in found], device)
        table = torch.cat([own, packed, packed.new_full((workers, 1), self.exact)], 1)
        gathered = self._team.gather_rows(table, [workers] * self._team.size).wait()
        stages = gathered.view(self._team.size, *table.shape)  # (stage, worker, number)
        numbers = stages[-1, :, norms + count : -1].clone()
        squares = stages[:, :, :norms].sum(0).view(workers, count, -1).square().sum(2)  # (worker, micro batch)
        shares = (self._setup.recipe.worker_batch / stages[-1, :, norms : norms + count]).square()
        numbers[:, SQUARED_NORMS] = sum((squares * shares).unbind(1))  # in order, as a worker by itself adds them
        numbers[:, SIGNAL] = stages[:, :, -2].amax(0)
        self.exact = bool(stages[:, :, -1].all())
        return numbers

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
