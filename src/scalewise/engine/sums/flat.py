"""All gradients of a model in one vector, on one chunk grid.

The vector holds the parameters' gradients in parameter order and, after them, the buffers that are averaged over
workers (batch-norm statistics). Chunks of a fixed size are the unit in which the vector is spread over processes
and in which norms are taken, so neither depends on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalewise.engine.sums.tree import FoldPlan, FoldStep

CHUNK = 2048
ALIGNMENT = 64  # bytes: where torch itself puts a tensor, and kernels may look at that
BUCKETS = 4  # about this number, so that the exchange can begin during the backward pass …
BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 20, 25 << 20  # … but not so small that each is all latency

Scale = Callable[[Tensor, int], None]  # (a stretch of the sum, where it begins in the flat vector)


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one tensor, in memory order, and where they begin in the flat vector."""

    name: str
    start: int
    stop: int
    flat_start: int


@dataclass(frozen=True)
class Bucket:
    """A stretch of the flat vector that is reduced at once, in equal shards, one per process."""

    start: int
    stop: int
    shard: int

    def shard_range(self, process: int) -> tuple[int, int]:
        """The part of this bucket that `process` sums."""
        return self.start + process * self.shard, self.start + (process + 1) * self.shard


@dataclass(frozen=True)
class Stretch:
    """Weights that one process updates at once, where they begin in the flat vector, and the parameters in them."""

    start: int
    weights: Tensor
    pieces: list[Piece]
    shift: int = 0  # how far before its place its gradient lies, where a process has only gradients of its own

    def place(self, flat: Tensor) -> Tensor:
        """The same place in another flat vector."""
        found = flat[self.start - self.shift : self.start - self.shift + self.weights.numel()]
        return found if self.weights.ndim == 1 else found.as_strided(self.weights.size(), self.weights.stride())

    def places(self) -> list[tuple[str, slice]]:
        """The parameters in it, and where."""
        firsts = [piece.flat_start - self.start for piece in self.pieces]
        return [
            (piece.name, slice(first, first + piece.stop - piece.start))
            for first, piece in zip(firsts, self.pieces, strict=True)
        ]


class FlatLayout:
    """Where each tensor lies in the flat vector."""

    def __init__(self, parameters: Mapping[str, Tensor], averages: Mapping[str, Tensor], processes: int) -> None:
        self.tensors = {**parameters, **averages}
        self.cuts: list[int] = []  # where parameters are cut besides the ends of chunks
        assert all(is_dense(tensor) for tensor in self.tensors.values())
        self.starts: dict[str, int] = {}
        cursor = self._place(parameters, 0)
        self.parameters_stop = cursor
        cursor = self._place(averages, cursor)
        stride = CHUNK * processes
        self.size = _round_up(cursor, stride)
        self.processes = processes
        example = next(iter(self.tensors.values()))
        self.dtype, self.device = example.dtype, example.device

    def _place(self, tensors: Mapping[str, Tensor], cursor: int) -> int:
        for name, tensor in tensors.items():
            self.starts[name] = cursor
            elements = ALIGNMENT // tensor.element_size()
            cursor = _round_up(cursor + tensor.numel(), elements)
        return _round_up(cursor, CHUNK)

    def cut_at_tensors(self) -> None:
        """Note that neighbouring tensors may be on different processes."""
        self.cuts += [start + end for name, start in self.starts.items() for end in (0, self.tensors[name].numel())]

    def new(self) -> Tensor:
        """An empty flat vector."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors' places in `flat`, shaped and strided like the tensors."""
        return [
            flat[start : start + tensor.numel()].as_strided(tensor.size(), tensor.stride())
            for start, tensor in zip(self.starts.values(), self.tensors.values(), strict=True)
        ]

    def adopted(self) -> Tensor:
        """A flat vector with the tensors in their places, so that they and it are the same memory."""
        flat = self.new()
        for tensor, place in zip(self.tensors.values(), self.views(flat), strict=True):
            place.copy_(tensor.detach())
            tensor.data = place
        return flat

    def parameter_stretches(self, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of some ranges in which parameters lie, as long as possible."""
        cut = [(low, min(high, self.parameters_stop)) for low, high in _merge(ranges)]
        return [(low, high) for low, high in cut if low < high and self.pieces([(low, high)])]

    def buckets(self) -> list[Bucket]:
        """From the last parameters, which backward reaches first, to the first."""
        stride = CHUNK * self.processes
        wanted = min(max(BUCKET_BYTES, self.size * self.dtype.itemsize // BUCKETS), MOST_BUCKET_BYTES)
        length = max(1, wanted // (stride * self.dtype.itemsize)) * stride
        stops = range(self.size, 0, -length)
        return [Bucket(max(0, stop - length), stop, (stop - max(0, stop - length)) // self.processes) for stop in stops]

    def pieces(self, ranges: list[tuple[int, int]]) -> list[Piece]:
        """What lies in some ranges of the flat vector, in its order; neighbouring pieces of a tensor are one."""
        found = []
        merged = _merge(ranges)
        for name, start in self.starts.items():
            stop = start + self.tensors[name].numel()
            for low, high in merged:
                first, last = max(start, low), min(stop, high)
                if first < last:
                    found.append(Piece(name, first - start, last - start, first))
        return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return merged


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a tensor that fills its memory without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def chunk_norms(flat: Tensor) -> Tensor:
    """The norm of every chunk; each depends on its own chunk alone."""
    return torch.linalg.vector_norm(flat.view(-1, CHUNK), dim=1)  # (chunk,)


def sum_of_squares(norms: Tensor) -> Tensor:
    """The squared norm of everything, from the norms of its chunks in order."""
    return wide(norms).square().sum()


def wide(tensor: Tensor) -> Tensor:
    """In float64, or as it is on MPS, which has no float64."""
    return tensor if tensor.device.type == "mps" else tensor.double()


class Fold:
    """Adds each worker's gradient into the tree as soon as it exists."""

    def __init__(self, layout: FlatLayout, plan: FoldPlan) -> None:
        self.plan = plan
        self.buffers = [layout.new() for _ in range(plan.buffers)]
        self.views = [layout.views(buffer) for buffer in self.buffers]

    def put(self, leaf: int, sources: list[Tensor]) -> None:
        """Take all tensors of one leaf."""
        step = self.plan.steps[leaf]
        (torch._foreach_add_ if step.add else torch._foreach_copy_)(self.views[step.buffer], sources)
        for target, source in step.merges:
            self.buffers[target].add_(self.buffers[source])

    def put_one(self, leaf: int, index: int, source: Tensor) -> None:
        """Take one tensor of one leaf: the same sums as `put`, element by element."""
        fold_one(self.plan.steps[leaf], self.views, index, source)


def fold_one(step: FoldStep, views: list[list[Tensor]], index: int, source: Tensor) -> None:
    """Take one tensor of one leaf into its place in the buffers."""
    place = views[step.buffer][index]
    if step.add:
        place.add_(source)
    else:
        place.copy_(source)
    for target, other in step.merges:
        views[target][index].add_(views[other][index])


def sum_rows(rows: Sequence[Tensor], plan: FoldPlan) -> Tensor:
    """The sum of rows in the plan's order; rows are overwritten."""
    buffers: list[Tensor] = []
    for number, row in enumerate(rows):
        add_row(buffers, row, plan, number)
    return buffers[0]


def add_row(buffers: list[Tensor], row: Tensor, plan: FoldPlan, number: int) -> None:
    """Take row `number`; after the last one the buffers are the plan's nodes."""
    step = plan.steps[number]
    if step.add:
        buffers[step.buffer].add_(row)
    else:
        buffers.append(row)
    for target, source in step.merges:
        buffers[target].add_(buffers[source])
        del buffers[source]


class Reduction:
    """From the nodes that each process has summed to one sum, and from updated parameters to every process.

    This is the reduction of one process: its fold is the whole sum. Its siblings are in reductions.py.
    """

    spreads = False  # whether updated state must be published, because not every process updates everything

    def __init__(self, layout: FlatLayout, total: Tensor) -> None:
        self.buckets: list[Bucket] = []
        self.sum = total  # valid in `owned` after `finish`
        self.owned = [(0, layout.size)]  # the parts of the flat vector that this process updates
        self.waited_seconds = 0.0  # how long this process has waited for others; on a CPU, where waiting blocks
        self._parameters = total[: layout.parameters_stop]

    def launch(self, bucket: Bucket) -> None:
        """Start on a bucket in which this process's nodes are complete."""

    def finish(self, scale: Scale) -> None:
        """Wait for all buckets; `scale` turns each stretch of the sum into a mean, once."""
        scale(self.sum, 0)

    def squared_norm(self) -> Tensor:
        """‖gradient‖² from the norms of the chunks in order, the same on every process."""
        return sum_of_squares(chunk_norms(self._parameters))

    def complete(self, numbers: Tensor) -> None:
        """Fill in the numbers that other owners have, where each number has one owner and is 0 elsewhere."""

    def publish(self, state: Tensor) -> None:
        """Bring the owners' parts of the flat `state` to every process."""


def mean_factor(worker_batch: int, samples: int, weights: Tensor | None) -> float:
    """What turns the sum of the workers' gradients, each ÷ worker batch, into the mean over the global batch.

    `weights` are those of each worker's samples; None where samples count alike.
    """
    total = float(samples) if weights is None else float(sum(weights.flatten().tolist()))
    return worker_batch / total if total else 1.0


def scaling(workers: int, layout: FlatLayout, factor: float) -> Scale:
    """Gradients times `factor`, averages divided by the number of workers."""

    def scale(stretch: Tensor, start: int) -> None:
        cut = min(max(layout.parameters_stop - start, 0), len(stretch))
        if factor != 1.0:
            stretch[:cut].mul_(factor)
        if workers > 1:
            stretch[cut:].div_(workers)

    return scale


def clip_coefficient(clip_norm: float, squared_norm: Tensor) -> Tensor:
    """What a gradient is multiplied by, as torch.nn.utils.clip_grad_norm_ has it."""
    return (clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
