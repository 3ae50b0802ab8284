"""Which matrices of a model are split over processes, and how: torch's column and row parallelism.

In a pair (Linear, element-wise layers, Linear) of an nn.Sequential the first matrix is split by outputs, the second by
inputs, so that only the sum of the second's outputs is exchanged. Any other Linear is split by outputs, which are then
gathered.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from scalewise.errors import TaskError

ELEMENT_WISE = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.Mish,
    nn.Identity,
)  # fmt: skip


def split_matrices(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace parameters by this process's parts of them, in place."""
    parallelize_module(module, mesh, plan(module, mesh.size()))
    for layer in module.modules():
        if isinstance(layer, ELEMENT_WISE) and getattr(layer, "inplace", False):
            layer.inplace = False  # the same numbers: what a split layer returns must not be overwritten


def plan(module: nn.Module, processes: int) -> dict[str, ParallelStyle]:
    """How each Linear that can be split is split, by its name."""
    used = Counter(id(parameter) for parameter in _with_repetition(module))
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


def _with_repetition(module: nn.Module) -> list[nn.Parameter]:
    """Every parameter as often as the model has it: a layer may be there under two names."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return [*chain.from_iterable(part.parameters(recurse=False) for part in parts)]


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
