"""Tensor parallelism on DTensor: every process holds a part of every large matrix and computes it for every worker.

All processes pass the same samples; activations are gathered or summed within a layer. The sums of partial products are
taken by the backend, in its own order: close, not exact.

Which matrices of a model are split over processes, and how: torch's column and row parallelism.

In a pair (Linear, element-wise layers, Linear) of an nn.Sequential the first matrix is split by outputs, the second by
inputs, so that only the sum of the second's outputs is exchanged. Any other Linear is split by outputs, which are then
gathered.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from scalewise.engine.data.feed import Feed
from scalewise.engine.parallel import Setup
from scalewise.engine.parallel.split import LocalStrategy, check_split, dry_run, first_micro_batch
from scalewise.engine.parallel.workers import (
    SIGNAL,
    SQUARED_NORMS,
    Buffers,
    Ready,
    StepNumbers,
    WorkerNumbers,
    Workers,
    pack,
    square_of,
)
from scalewise.engine.sums.flat import sum_of_squares
from scalewise.engine.update.optimizer import NUMBERS, Reader, StateEntry
from scalewise.errors import TaskError
from scalewise.tasks.task import Loss, MeanLoss, Number

IN_TURN = (
    "--parallel tensor needs pairs of layers (Linear, activation, Linear in an nn.Sequential) that are called one "
    "after the other, with nothing else done to what is between them or to their parameters"
)


class TensorParallel(LocalStrategy):
    """Every process holds a part of every split matrix, and all of the rest."""

    exact = False  # the backend sums partial products in its own order

    def __init__(self, setup: Setup) -> None:
        recipe, team = setup.recipe, setup.team
        super().__init__(setup, range(recipe.workers))
        self._module = copy.deepcopy(setup.model.module)
        batch = first_micro_batch(setup)
        whole = dry_run(setup, self._module, batch)
        group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, team.device.type)
        parallelize_module(self._module, mesh, plan(self._module, team.size))
        for layer in self._module.modules():
            if isinstance(layer, ELEMENT_WISE) and getattr(layer, "inplace", False):
                layer.inplace = False  # the same numbers: what a split layer returns must not be overwritten
        self._empty_model()
        here = dict(self._module.named_parameters())
        placements = {name: p.placements[0] for name, p in here.items() if isinstance(p, DTensor)}
        self._dims = {name: placement.dim for name, placement in placements.items() if isinstance(placement, Shard)}
        buffers = dict(self._module.named_buffers())
        averages = {name: buffers[name] for name in setup.model.averages}
        self._buffers = Buffers(self._module, averages, {name: buffers[name] for name in setup.model.counters})
        self._hold_part({name: _part(here[name]) for name in setup.model.parameters}, averages)
        parameters = [_put_back(self._module, name, here[name], part) for name, part in self._held.items()]
        self._counts_here = [name in self._dims or team.leads for name in self._held]
        check_split(setup, whole, self._module, batch, IN_TURN)
        self._workers = _SplitWorkers(setup, self._module, parameters, self.feed, self._counts_here)

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """Every worker in turn, on all processes at once."""
        found: list[WorkerNumbers] = []
        for worker in self._buffers.each(range(self._setup.recipe.workers)):
            gradients, numbers = self._workers.gradient(step, worker, measures)
            found.append(numbers)
            self._fold.put(worker, [*gradients, *self._averages])
        self._buffers.check_fixed()
        table = self._exchanged(pack(found, self._team.device, signal))
        return self._reduced(step, measures, table, [*found[0].metrics])

    def _exchanged(self, table: Tensor) -> Tensor:
        """The workers' numbers, which all processes have, with the norms of all parts and any process's signal."""
        gathered = self._team.gather_rows(table, [len(table)] * self._team.size).wait()
        processes = gathered.view(self._team.size, *table.shape)  # (process, worker, number)
        numbers = processes[0].clone()
        numbers[:, SQUARED_NORMS] = processes[:, :, SQUARED_NORMS].sum(0)
        numbers[:, SIGNAL] = processes[:, :, SIGNAL].amax(0)
        return numbers

    def squared_norm(self) -> Tensor:
        """From each process's parts of the mean gradient, and from the first one's of what all have."""
        gradients = self._layout.views(self._reduction.sum)[: len(self._held)]
        mine = [gradient for gradient, counts in zip(gradients, self._counts_here, strict=True) if counts]
        return self._team.total(sum_of_squares(torch.stack(torch._foreach_norm(mine))))  # some matrix is split

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield from self._module.named_buffers()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this process's parts of the parameters, and the buffers."""
        for name, parameter in self._module.named_parameters():
            _part(parameter).copy_(self._cut(name, tensors[name]))
        for name, buffer in self._module.named_buffers():
            buffer.copy_(tensors[name])
        self._buffers.accept()

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """This process's part of a whole tensor."""
        dim = self._dims.get(name)
        return tensor if dim is None else tensor.chunk(self._team.size, dim)[self._team.rank]

    def state(self) -> list[StateEntry]:
        """The optimizer's state of whole parameters, on the first process: a split by columns has no simple place."""
        entries = self._optimizer.state()
        for number, entry in enumerate(entries):
            dim = self._dims.get(_parameter_of(entry.name))
            if dim is not None and entry.shape:
                mine = entry.tensor.view(entry.shape).contiguous()
                parts = [torch.empty_like(mine) for _ in range(self._team.size)]
                dist.all_gather(parts, mine)
                whole = torch.cat(parts, dim)
                entries[number] = StateEntry(entry.name, whole.flatten(), 0, tuple(whole.shape))
        return entries if self._team.leads else []

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Fill the optimizer's state for this process's parts."""

        def read_part(name: str, start: int, stop: int) -> Tensor:
            parameter = _parameter_of(name)
            if parameter not in self._dims or name.split(".", 2)[1] in NUMBERS:
                return read(name, start, stop)
            shape = self.model.parameters[parameter].shape
            whole = read(name, 0, shape.numel()).view(shape)
            return self._cut(parameter, whole).reshape(-1)[start:stop]

        self._optimizer.load(names, read_part)


class _SplitWorkers(Workers):
    """Gradients of this process's parts; norms of the parts that count here, so that nothing counts twice."""

    def __init__(
        self, setup: Setup, module: nn.Module, parameters: list[Tensor], feed: Feed, counts_here: list[bool]
    ) -> None:
        super().__init__(setup, module, parameters, feed)
        self._counts_here = counts_here
        self._sums = [torch.zeros_like(_part(parameter)) for parameter in parameters] if self._sums else []

    def _backward(self, loss: Loss | MeanLoss, ready: Ready | None) -> list[Tensor]:
        gradients = super()._backward(loss, ready)
        for number, (gradient, parameter) in enumerate(zip(gradients, self._parameters, strict=True)):
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradients[number] = gradient.redistribute(placements=parameter.placements).to_local()
        return gradients

    def _square_norm(self, gradients: list[Tensor]) -> Number:
        mine = [gradient for gradient, counts in zip(gradients, self._counts_here, strict=True) if counts]
        return square_of(torch._foreach_norm(mine))  # some matrix is split


def _part(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter, as a plain tensor."""
    return cast(DTensor, parameter.detach()).to_local() if isinstance(parameter, DTensor) else parameter


def _put_back(module: nn.Module, name: str, parameter: Tensor, part: Tensor) -> Tensor:
    """Give the module a parameter whose local part lies where `part` does."""
    if not isinstance(parameter, DTensor):
        return parameter
    owner, _, last = name.rpartition(".")
    local = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)
    renewed = nn.Parameter(local, requires_grad=parameter.requires_grad)
    module.get_submodule(owner).register_parameter(last, renewed)
    return renewed


def _parameter_of(entry: str) -> str:
    """The parameter in optimizer.<kind>.<parameter>."""
    return entry.split(".", 2)[2]


ELEMENT_WISE = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.Mish,
    nn.Identity,
)  # fmt: skip


def plan(module: nn.Module, processes: int) -> dict[str, ParallelStyle]:
    """How each Linear that can be split is split, by its name."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))  # a layer may have two names
    used = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    linears = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and max(used[id(parameter)] for parameter in layer.parameters()) == 1
    }
    pairs = [
        (first, second)
        for first, second in _pairs(module)
        if first in linears and second in linears and not linears[first].out_features % processes
    ]
    if not pairs:
        raise TaskError(
            f"--parallel tensor needs pairs of layers to split (Linear, activation, Linear in an nn.Sequential, of an "
            f"inner width that {processes} processes divide), {type(module).__name__} has none; use --parallel fsdp or "
            f"pipeline"
        )
    found: dict[str, ParallelStyle] = {}
    for first, second in pairs:
        found[first], found[second] = ColwiseParallel(), RowwiseParallel()
    for name, layer in linears.items():
        if name not in found and not layer.out_features % processes:
            found[name] = ColwiseParallel(output_layouts=Replicate())
    return found


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Names of two Linear layers with nothing but element-wise layers between; each layer is in one pair at most."""
    pairs = []
    for prefix, sequence in module.named_modules():
        if type(sequence) is nn.Sequential:
            waiting: str | None = None
            for number, layer in sequence._modules.items():  # `named_children` leaves out a layer that comes twice
                name = f"{prefix}.{number}" if prefix else number
                if type(layer) is nn.Linear:
                    if waiting is not None:
                        pairs.append((waiting, name))
                    waiting = name if waiting is None else None
                elif not isinstance(layer, ELEMENT_WISE):
                    waiting = None
    return pairs
