"""Fully sharded data parallelism on FSDP2: every process holds a part of every tensor and runs some of the workers.

A layer's parameters are gathered when a pass comes to it and released afterwards. The workers' gradients are summed in
the order of the fixed tree (`OrderedScatter`) and norms are taken on the whole vector's chunk grid (grid.py), so the
bytes are those of data parallelism.
"""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from scalewise.engine.parallel import HeldBytes, Setup
from scalewise.engine.parallel.split import SplitStrategy, first_line
from scalewise.engine.parallel.workers import (
    WEIGHT,
    Buffers,
    StepNumbers,
    WorkerNumbers,
    Workers,
    pack,
    square_of,
    step_numbers,
)
from scalewise.engine.sums import reductions
from scalewise.engine.sums.flat import (
    FlatLayout,
    Piece,
    Stretch,
    add_row,
    mean_factor,
    scaling,
    sum_of_squares,
    sum_rows,
)
from scalewise.engine.sums.grid import RangeNorms, chunk_ranges
from scalewise.engine.sums.tree import own_plan, plan_of_all, share
from scalewise.engine.update.optimizer import FlatOptimizer
from scalewise.errors import PlacementError, TaskError


class FullyShardedParallel(SplitStrategy):
    """Every process holds a part of every tensor and runs the same number of workers."""

    def __init__(self, setup: Setup) -> None:
        recipe, team = setup.recipe, setup.team
        self._mine = range(*share(team.rank, team.size, recipe.workers))
        super().__init__(setup, self._mine)
        self._counts = [len(self._mine)] * team.size

        refuse_scalars(setup.model.module)
        self._module = copy.deepcopy(setup.model.module)
        shard(self._module, team.size, recipe.workers)
        sharded = dict(self._module.named_parameters())
        self._held = {name: _local(sharded[name]) for name in setup.model.parameters}
        self._parameters = [sharded[name] for name in self._held]
        self._workers = Workers(setup, self._module, self._parameters, self.feed)
        self._norms: dict[int, Tensor] | None = None  # of one backward pass, by parameter; None: not wanted
        self._listen()

        sizes = [part.numel() for part in self._held.values()]
        self._sum = torch.zeros(sum(sizes), dtype=self._parameters[0].dtype, device=team.device)
        self._gradients = [g.view(p.shape) for g, p in zip(self._sum.split(sizes), self._held.values(), strict=True)]
        layout = FlatLayout(setup.model.parameters, {}, 1)
        self._empty_model()
        self._stretches = self._cut(layout)
        self._optimizer = FlatOptimizer(recipe, layout, self._stretches, dist.all_reduce, setup.model.matrices)
        self._chunk_norms = RangeNorms(layout, chunk_ranges(layout), self._stretches, dist.all_reduce)
        self._hold_averages()

    def _cut(self, layout: FlatLayout) -> list[Stretch]:
        """The local shards: neighbouring elements of parameters, since these are cut by rows."""
        stretches, local = [], 0
        layout.cut_at_tensors()
        for name, part in self._held.items():
            full = layout.tensors[name]
            starts = [first_element(full, process, self._team.size) for process in range(self._team.size)]
            start, first = starts[self._team.rank], layout.starts[name] + starts[self._team.rank]
            layout.cuts += [layout.starts[name] + other for other in starts]
            if part.numel():
                piece = Piece(name, start, start + part.numel(), first)
                weights = part.view(-1).detach().requires_grad_()
                stretches.append(Stretch(first, weights, [piece], shift=first - local))
            local += part.numel()
        return stretches

    def _listen(self) -> None:
        """Take the norms of whole gradients during the backward pass, while each exists for a moment."""
        groups = [part for part in self._module.modules() if isinstance(part, FSDPModule)]
        for group in groups:
            group.unshard()
        whole = dict(self._module.named_parameters())
        for number, name in enumerate(self._held):
            whole[name].register_hook(functools.partial(self._came, number))
        for group in groups:
            group.reshard()

    def _came(self, number: int, gradient: Tensor) -> None:
        if self._norms is not None:
            self._norms[number] = torch._foreach_norm([gradient.detach()])[0]

    def _hold_averages(self) -> None:
        """Batch-norm statistics and their like: every process has them whole; they are averaged in tree order."""
        setup, here = self._setup, dict(self._module.named_buffers())
        averages = {name: here[name] for name in setup.model.averages}
        self._buffers = Buffers(self._module, averages, {name: here[name] for name in setup.model.counters})
        self._averages = [*averages.values()] if setup.recipe.workers > 1 else []
        if self._averages:
            self._layout = FlatLayout({}, averages, setup.team.size)
            self._fold, self._reduction = reductions.build(
                setup.placement, self._layout, setup.team, setup.recipe.workers
            )

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """A pass of one worker on every process at a time; the last one brings the sum over all."""
        recipe = self._setup.recipe
        found: list[WorkerNumbers] = []
        for leaf, worker in enumerate(self._buffers.each(self._mine)):
            found.append(self._worker(step, worker, measures))
            if self._averages:
                self._fold.put(leaf, self._averages)
        gathered = self._team.gather_rows(pack(found, self._team.device, signal), self._counts)
        weights = None if self._setup.task.weight_is_samples else gathered.wait()[:, WEIGHT]
        for place, parameter in zip(self._gradients, self._parameters, strict=True):
            assert parameter.grad is not None
            place.copy_(_local(parameter.grad))
            parameter.grad = None
        self._buffers.check_fixed()
        if self._averages:
            for bucket in self._reduction.buckets:
                self._reduction.launch(bucket)
            self._reduction.finish(scaling(recipe.workers, self._layout, 1.0))
        self._sum.mul_(mean_factor(recipe.worker_batch, self._setup.cuts.samples(step), weights))
        return step_numbers(self, self._setup.recipe.clip_norm, measures, gathered, [*found[0].metrics])

    def _worker(self, step: int, worker: int, measures: bool) -> WorkerNumbers:
        """One worker's passes; its gradient goes where it is summed."""
        assert isinstance(self._module, FSDPModule)
        worker_batch = self._setup.recipe.worker_batch
        found: list[WorkerNumbers] = []
        for parameter in self._parameters:
            parameter.grad = None
        with _only_called():
            for loss, numbers, last in self._workers.passes(step, worker):
                self._module.set_requires_gradient_sync(last)
                self._norms = {} if measures else None
                loss.root(worker_batch).backward()
                if self._norms is not None:
                    norms = [self._norms.get(number, self._sum.new_zeros(())) for number in range(len(self._held))]
                    numbers = numbers.with_norm(square_of(norms) * (worker_batch / numbers.weight) ** 2)
                found.append(numbers)
        return functools.reduce(operator.add, found)

    def mean_gradient(self) -> list[Tensor]:
        """This process's shards."""
        return [self._sum]

    def squared_norm(self) -> Tensor:
        """On the chunk grid where it enters the update; else from the shards, for which less is exchanged."""
        if self._setup.recipe.clip_norm is not None or self._setup.recipe.lr_rule == "adascale":
            (norms,) = self._chunk_norms([[stretch.place(self._sum) for stretch in self._stretches]])
            return sum_of_squares(norms)
        return self._team.total(sum_of_squares(torch.stack(torch._foreach_norm([*self._sum.split(1 << 16)]))))

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Change the local shards and the averaged buffers."""
        self._optimizer.step(self._sum, lr)
        if self._averages:
            torch._foreach_copy_(self._averages, self._layout.views(self._reduction.sum))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, cast(DTensor, parameter.detach()).full_tensor()
        yield from self._module.named_buffers()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this process's shards of the parameters, and the buffers."""
        for name, parameter in self._module.named_parameters():
            part = _local(parameter)
            first = first_element(tensors[name], self._team.rank, self._team.size)
            part.view(-1).copy_(tensors[name].reshape(-1)[first : first + part.numel()])
        for name, buffer in self._module.named_buffers():
            buffer.copy_(tensors[name])
        self._buffers.accept()

    def held(self) -> HeldBytes:
        """The shards, their gradients and their state."""
        parameters = sum(_local(parameter).nbytes for parameter in self._module.parameters())
        return HeldBytes(parameters, self._sum.nbytes, self._optimizer.bytes())


@contextmanager
def _only_called() -> Iterator[None]:
    """Explain what is required where a step, or a layer, uses parameters that are not gathered."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        raise TaskError(
            f"--parallel fsdp needs parameters that are used only while the layer that has them is called; here they "
            f"are used elsewhere too, as by a penalty on weights ({first_line(error)}): use --parallel data"
        ) from error


def refuse_scalars(module: nn.Module) -> None:
    """Refuse a parameter that has no rows to cut."""
    scalar = next((name for name, parameter in module.named_parameters() if not parameter.ndim), None)
    if scalar is not None:
        raise PlacementError(
            f"--parallel fsdp needs parameters of one dimension or more, got the scalar {scalar!r}; give it the shape "
            f"(1,), or use --parallel data"
        )


def shard(module: nn.Module, processes: int, workers: int) -> None:
    """Cut every tensor by rows, in place; layers of a sequence are gathered one after another, else all at once."""
    # a task that changes the model's output in place would be warned by autograd as well
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    layers = [child for child in _sequence(module) if any(True for _ in child.parameters())]
    for part in (*layers, module):
        fully_shard(part, mesh=mesh)
        assert isinstance(part, FSDPModule)
        part.set_custom_reduce_scatter(OrderedScatter(processes, workers))
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_reduce_scatter_unused_params(True)


def _sequence(module: nn.Module) -> list[nn.Module]:
    """The layers that can be gathered by themselves: those of the outermost nn.Sequential."""
    if isinstance(module, nn.Sequential):
        layers = [*module]
    else:
        children = [child for child in module.children() if isinstance(child, nn.Sequential)]
        layers = [layer for child in children for layer in child]
    owners = [id(parameter) for layer in layers for parameter in layer.parameters()]
    shared = len(owners) != len({*owners})  # FSDP2 wants all users of a parameter in one group
    return [] if shared else layers


def first_element(tensor: Tensor, process: int, processes: int) -> int:
    """Where a process's shard of a tensor begins: rows are dealt out as `torch.chunk` does it.

    >>> [first_element(torch.empty(7, 2), process, 4) for process in range(4)]
    [0, 4, 8, 12]
    """
    rows = len(tensor)
    return min(process * -(-rows // processes), rows) * (tensor.numel() // rows if rows else 0)


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor.detach()).to_local()


class OrderedScatter(ReduceScatter):
    """An all-to-all of shards for each round of workers, one of every process; the last round gives the sum.

    Of each process's workers the shards are added up in their order as they come, so that only whole nodes of the tree
    are kept, and at last those nodes in theirs.
    """

    def __init__(self, processes: int, workers: int) -> None:
        self._rounds = workers // processes
        self._plans = [own_plan(process, processes, workers) for process in range(processes)]
        _, self._last = plan_of_all(processes, workers)
        self._round = 0
        self._rows: list[list[Tensor]] = [[] for _ in range(processes)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Take one round of workers; `output_tensor` is the sum after the last one, and means nothing before."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for process, shard in enumerate(received.chunk(len(self._plans))):
            row = shard.clone() if self._rounds > 1 else shard
            add_row(self._rows[process], row, self._plans[process], self._round)
        self._round += 1
        if self._round == self._rounds:
            rows = [row for mine in self._rows for row in mine]
            output_tensor.copy_(sum_rows(rows, self._last))
            self._round, self._rows = 0, [[] for _ in self._plans]
