"""Pipeline parallelism: every process holds some layers and computes them for every worker.

The workers come in turn, each with its micro batches one behind another (1F1B). So each worker's gradient is computed
alone, at its fixed shape, in the order of its micro batches, and is summed over workers in the tree's order; norms are
taken on the whole model's chunk grid. The bytes are those of data parallelism, except where the model draws random
numbers. A worker with M micro batches leaves each of P stages idle for (P − 1) ÷ (M + P − 1) of its time.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from scalewise.engine.data import streams
from scalewise.engine.parallel import Setup
from scalewise.engine.parallel.split import LocalStrategy, check_split, dry_run, first_micro_batch
from scalewise.engine.parallel.stages import given, model_input, named, split
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
from scalewise.tasks.task import Batch, Number

ONLY_CALLS = "--parallel pipeline needs a task whose step does nothing with the model but call it"


class MeasuredStage(PipelineStage):
    """A stage that takes each micro batch's gradient by itself: its norms, and the sum, micro batch by micro batch."""

    def __init__(
        self, setup: Setup, module: nn.Module, parameters: Sequence[Tensor], flow: tuple[Tensor, Tensor]
    ) -> None:
        """Nothing is computed yet; `flow` is an example of a micro batch when it comes here and when it leaves."""
        team = setup.team
        super().__init__(module, team.rank, team.size, team.device, input_args=flow[0], output_args=flow[1])
        self._setup, self._trained = setup, parameters
        self.begin(False)

    def begin(self, measures: bool) -> None:
        """Forget the worker before."""
        self._measures = measures
        self.norms: list[Tensor] = []  # of each micro batch's gradient: (parameter,)
        self.sums: list[Tensor] = []
        for parameter in self._trained:
            parameter.grad = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own signature
        """As torch does it, in the recipe's precision."""
        with precision(self._setup.recipe, self._setup.team.device):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """As torch does it; then the gradient is taken away."""
        super().backward_one_chunk(*args, **kwargs)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        if self._measures:
            self.norms.append(torch.stack(torch._foreach_norm(gradients)))
        if self.sums:
            torch._foreach_add_(self.sums, gradients)
        else:
            self.sums = gradients
        for parameter in self._trained:
            parameter.grad = None


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
        self._batches: list[Batch] = []  # of the worker that passes, where a stage needs them
        self._losses: list[WorkerNumbers] = []  # of its micro batches, on the last stage
        self._scheduled = functools.cache(self._schedule)

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
        workers = self._buffers.each(range(self._setup.recipe.workers))
        rows, found = zip(*[self._worker(step, worker, measures) for worker in workers], strict=True)
        self._buffers.check_fixed()
        if self._metric_names is None:
            mine = [*found[0].metrics] if found[0] is not None else []
            self._metric_names = self._team.shared(mine, self._team.size - 1)
        table = self._exchanged(rows, found, self._metric_names, signal, self._setup.cuts.micro_batches(step))
        return self._reduced(step, measures, table, self._metric_names)

    def _schedule(self, count: int) -> tuple[MeasuredStage, Schedule1F1B | ScheduleGPipe]:
        """How `count` micro batches pass the stages of all processes."""
        stage = MeasuredStage(self._setup, self._stage, [*self._held.values()], self._flow)
        # torch has no 1F1B for fewer micro batches than stages: then all go forward and all come back
        kind = Schedule1F1B if count >= stage.num_stages else ScheduleGPipe
        return stage, kind(stage, count, loss_fn=self._root, scale_grads=False)

    def _root(self, output: Tensor, micro: Tensor) -> Tensor:
        """Where backward starts from the last stage's output; the numbers of the micro batch are kept."""
        recipe, model = self._setup.recipe, self.model.module
        with precision(recipe, self._team.device), given(model, output):
            loss = self._setup.task.evaluate(model, self._batches[int(micro)], recipe.label_smoothing)
        self._losses.append(WorkerNumbers.of(loss))
        return loss.root(recipe.worker_batch)

    def _worker(self, step: int, worker: int, measures: bool) -> tuple[list[Number], WorkerNumbers | None]:
        """One worker's micro batches through the pipeline, and its gradient into the sum.

        Returns the norms of its gradients, (micro batch, parameter of the model) with 0 where another stage has the
        parameter, and the micro batches' weights; on the last stage also the worker's numbers.
        """
        recipe, rank, task = self._setup.recipe, self._team.rank, self._setup.task
        streams.seed_everything(
            streams.key("worker", recipe.seed, step, worker, *([rank] if rank else [])), self._team.device
        )
        start = streams.random_state()[0]
        count = self._setup.cuts.micro_batches(step)
        stage, schedule = self._scheduled(count)
        ends = stage.is_first or stage.is_last
        self._batches = [self.feed.batch(step, worker, micro) for micro in range(count)] if ends else []
        self._losses = []
        stage.begin(measures)
        if stage.is_first:
            inputs = [model_input(task, self.model.module, batch) for batch in self._batches]
            schedule.step(torch.cat(inputs) if count > 1 else inputs[0], return_outputs=False)
        else:
            numbers = torch.arange(count) if stage.is_last else None  # torch hands the loss its part of the target
            schedule.step(target=numbers, return_outputs=False)
        self._fold.put(worker, [*stage.sums, *self._averages])
        self.exact = self.exact and torch.equal(start, streams.random_state()[0])
        places = [place for place, name in enumerate(self.model.parameters) if name in self._held]
        norms = torch.zeros(count, len(self.model.parameters), dtype=torch.float64)
        for row, mine in zip(norms, stage.norms, strict=False):
            row[places] = mine.double().cpu()
        weights = [one.weight for one in self._losses] or [0.0] * count
        whole = functools.reduce(operator.add, self._losses) if self._losses else None
        return [*norms.flatten().tolist(), *weights], whole

    def _exchanged(
        self,
        rows: Sequence[list[Number]],
        found: Sequence[WorkerNumbers | None],
        names: list[str],
        signal: int,
        count: int,
    ) -> Tensor:
        """Every worker's numbers on every process, as `pack` lays them out, from what each stage has of them."""
        device, workers, norms = self._team.device, len(rows), count * len(self.model.parameters)
        nothing = WorkerNumbers(0.0, 0.0, dict.fromkeys(names, (0.0, 0.0)))
        packed = pack([one or nothing for one in found], device, signal)
        table = torch.cat([numbers_tensor(rows, device), packed, packed.new_full((workers, 1), self.exact)], 1)
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
