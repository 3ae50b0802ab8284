"""What each collective does on torch.distributed, for every dtype and for sizes that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.processes.team import all_gather
from scalewise.engine.sums.flat import sum_rows
from scalewise.engine.sums.tree import plan_of_all, split
from scalewise.horovod.negotiation import Description, Perform


class ReduceOp(IntEnum):
    """How values of several processes become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


# Types that the backends cannot add, and what they are added in.
WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32}
OPERATIONS = {
    ReduceOp.Average: dist.ReduceOp.SUM,
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}
FOLDS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    ReduceOp.Average: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.Sum: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.Min: lambda rows: rows.amin(0),
    ReduceOp.Max: lambda rows: rows.amax(0),
    ReduceOp.Product: lambda rows: rows.prod(0, dtype=rows.dtype),
}


def reduce_together(
    tensors: Sequence[Tensor], op: ReduceOp, before: float, after: float, group: dist.ProcessGroup
) -> None:
    """Reduce contiguous tensors in place, those of one type in one message."""
    alike: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(f"{tensor.dtype} {tensor.device}", []).append(tensor)
    for _, parts in sorted(alike.items()):
        if op is ReduceOp.Adasum:
            for part in parts:
                scale(part, before)
                part.copy_(adasum([*gathered_rows(part.unsqueeze(0), group)]))
                scale(part, after)
        elif len(parts) == 1:
            reduce_flat(parts[0].view(-1), op, before, after, group)
        else:
            flat = torch.cat([part.view(-1) for part in parts])
            reduce_flat(flat, op, before, after, group)
            pieces = flat.split([part.numel() for part in parts])
            torch._foreach_copy_([part.view(-1) for part in parts], [*pieces])


def reduce_flat(flat: Tensor, op: ReduceOp, before: float, after: float, group: dist.ProcessGroup) -> None:
    """Reduce one contiguous vector in place."""
    scale(flat, before)
    wide = flat.to(WIDER.get(flat.dtype, flat.dtype))
    dist.all_reduce(wide, op=OPERATIONS[op], group=group)
    if wide is not flat:
        flat.copy_(wide)
    if op is ReduceOp.Average:
        divide(flat, group.size())
    scale(flat, after)


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; whole numbers in float64, rounded towards 0."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def divide(tensor: Tensor, count: int) -> None:
    """Divide in place; whole numbers are rounded towards 0, as by Horovod."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(count)
    elif tensor.dtype is not torch.bool:
        tensor.copy_(tensor.div(count, rounding_mode="trunc"))


def adasum(vectors: list[Tensor]) -> Tensor:
    """Maleki et al. 2020: (1 − a·b ÷ 2‖a‖²) a + (1 − a·b ÷ 2‖b‖²) b, pair by pair in a tree.

    Orthogonal vectors are added, equal ones are averaged:

    >>> adasum([torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])]).tolist()
    [2.0, 3.0]
    >>> adasum([torch.tensor([2.0, 0.0]), torch.tensor([2.0, 0.0])]).tolist()
    [2.0, 0.0]
    """
    if len(vectors) == 1:
        return vectors[0]
    (_, middle), _ = split((0, len(vectors)))
    a, b = adasum(vectors[:middle]), adasum(vectors[middle:])
    wide_a, wide_b = a.double(), b.double()
    dot = (wide_a * wide_b).sum()
    squares = wide_a.square().sum(), wide_b.square().sum()
    weights = [1 - dot / (2 * square) if square > 0 else square.new_ones(()) for square in squares]
    return (weights[0] * wide_a + weights[1] * wide_b).to(a.dtype)


def gathered_rows(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all processes' tensors, in process order; each may have another number of them."""
    counts = torch.empty(group.size(), dtype=torch.int64)
    all_gather(counts, torch.tensor([len(tensor)]), group).wait()
    most = int(counts.max())
    mine = tensor.contiguous()
    if len(tensor) < most:
        mine = tensor.new_zeros(most, *tensor.shape[1:])
        mine[: len(tensor)] = tensor
    everyone = tensor.new_empty(group.size() * most, *tensor.shape[1:])
    all_gather(_bytes(everyone), _bytes(mine), group).wait()
    if bool((counts == most).all()):
        return everyone
    pieces = zip(everyone.split(most) if most else [], counts.tolist(), strict=True)
    return torch.cat([piece[:count] for piece, count in pieces])


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: moving needs no arithmetic, so every type can be moved."""
    return tensor.view(-1).view(torch.uint8)


def broadcast_together(tensors: Sequence[Tensor], root: int, group: dist.ProcessGroup) -> None:
    """Overwrite contiguous tensors with those of one process, all in one message."""
    memories = [_bytes(tensor) for tensor in tensors if tensor.numel()]
    if len(memories) == 1:
        dist.broadcast(memories[0], src=root, group=group)
    elif memories:
        together = torch.cat(memories)
        dist.broadcast(together, src=root, group=group)
        torch._foreach_copy_(memories, [*together.split([len(memory) for memory in memories])])


def send_bytes(data: bytes, root: int, group: dist.ProcessGroup) -> bytes:
    """What one process has, on all of them."""
    held = [data]
    dist.broadcast_object_list(held, src=root, group=group)
    return held[0]


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """What every process has, on all of them."""
    found = [data] * group.size()
    dist.all_gather_object(found, data, group=group)
    return found


def exchange_rows(tensor: Tensor, splits: list[int], group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """Send the next splits[i] rows to process i; the rows received, and how many came from each."""
    sizes = torch.empty(group.size(), dtype=torch.int64)
    dist.all_to_all_single(sizes, torch.tensor(splits, dtype=torch.int64), group=group)
    received: list[int] = sizes.tolist()
    output = tensor.new_empty(sum(received), *tensor.shape[1:])
    width = tensor.element_size() * tensor.shape[1:].numel()
    dist.all_to_all_single(
        _bytes(output),
        _bytes(tensor[: sum(splits)].contiguous()),
        [rows * width for rows in received],
        [rows * width for rows in splits],
        group=group,
    )
    return output, received


def scatter_rows(
    tensors: Sequence[Tensor], op: ReduceOp, before: float, after: float, group: dist.ProcessGroup
) -> list[Tensor]:
    """Each process's share of the rows of the reduced tensors; the first ones get one more when it does not divide."""
    size, outputs = group.size(), []
    for tensor in tensors:
        splits = [len(tensor) // size + (rank < len(tensor) % size) for rank in range(size)]
        source = tensor.clone()
        scale(source, before)
        rows, received = exchange_rows(source, splits, group)
        output = FOLDS[op](rows.view(size, received[0], *tensor.shape[1:]))
        if op is ReduceOp.Average:
            divide(output, size)
        scale(output, after)
        outputs.append(output)
    return outputs


def reduce_sparse(held: Tensor, op: ReduceOp, group: dist.ProcessGroup) -> Tensor:
    """The sum or mean of coalesced sparse tensors, whose entries are gathered."""
    indices = gathered_rows(held.indices().t().contiguous(), group).t()
    values = gathered_rows(held.values(), group)
    if op is ReduceOp.Average:
        divide(values, group.size())
    return torch.sparse_coo_tensor(indices, values, held.shape, check_invariants=False).coalesce()


def reduce_ordered(nodes: Sequence[Tensor], passes: int, divisor: int, group: dist.ProcessGroup) -> None:
    """The sum over `passes` leaves of every process in the order of scalewise's tree; into nodes[0].

    `nodes` are those of the tree that this process holds whole. As in the engine's ordered reduction, every process
    sums one shard of all vectors and the shards are gathered.
    """
    size, workers = group.size(), passes * group.size()
    held, plan = plan_of_all(size, workers)
    shard = -(-len(nodes[0]) // size)
    received: list[list[Tensor]] = [[] for _ in range(size)]
    for number in range(max(held)):
        senders = [process for process in range(size) if held[process] > number]
        sends = number < len(nodes)
        mine = torch.nn.functional.pad(nodes[number], (0, shard * size - len(nodes[0]))) if sends else nodes[0][:0]
        out = nodes[0].new_empty(len(senders) * shard)
        incoming = [shard if process in senders else 0 for process in range(size)]
        dist.all_to_all_single(out, mine, incoming, [shard if sends else 0] * size, group=group)
        for process, row in zip(senders, out.split(shard), strict=True):
            received[process].append(row)
    total = sum_rows([row for rows in received for row in rows], plan)
    if divisor > 1:
        total.div_(divisor)
    whole = nodes[0].new_empty(shard * size)
    all_gather(whole, total, group).wait()
    nodes[0].copy_(whole[: len(nodes[0])])


def with_zeros(description: Description) -> Perform | None:
    """What a process does that has joined: it adds nothing. None where a request needs something of everyone."""
    if description.kind == "barrier":
        return lambda group: None
    if description.kind != "allreduce":
        return None
    shapes = [[size or 0 for size in shape] for shape in description.shapes]
    pairs = zip(shapes, description.dtypes, strict=True)
    zeros = [torch.zeros(shape, dtype=dtype, device=description.device) for shape, dtype in pairs]
    op = description.details[0]
    assert isinstance(op, ReduceOp)
    return partial(reduce_together, zeros, op, 1.0, 1.0)
