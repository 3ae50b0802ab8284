"""Horovod's collectives: at once, asynchronous, in place and several together; gradients flow through the first.

Every process of the set must make each call; calls with a name may come in any order. `process_set` limits a call to
some processes. Asynchronous calls return a handle for `synchronize` and `poll`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scalewise.horovod import wire
from scalewise.horovod.negotiation import Description, Handle, describe
from scalewise.horovod.operations import HorovodInternalError, ReduceOp, chosen
from scalewise.horovod.processes import ProcessSet, global_process_set, rank
from scalewise.horovod.torch.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def _start(
    tensors: Sequence[Tensor],
    into: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    single: bool,
) -> Handle:
    """Start a reduction whose results overwrite `into`: the tensors themselves, or copies of them."""
    if op is ReduceOp.Adasum:
        _check_adasum(tensors, process_set)
    work = [tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous() for tensor in into]
    reduce = wire.reduce_together(work, op, *factors)

    def perform(group: torch.distributed.ProcessGroup) -> Any:  # noqa: ANN401
        reduce(group)
        for target, result in zip(into, work, strict=True):
            if target.data_ptr() != result.data_ptr():
                target.detach().copy_(result)
        return into[0] if single else [*into]

    return process_set.ask("allreduce", name, describe("allreduce", tensors, op, *factors), perform)


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    size = process_set.size()
    if size & (size - 1):
        raise NotImplementedError(
            f"Adasum needs a power of two of processes, got {size}; use op=hvd.Average or another number of processes"
        )
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError(f"Adasum needs floating-point tensors, got {[str(tensor.dtype) for tensor in tensors]}")


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor over processes; the average by default."""
    factors = prescale_factor, postscale_factor
    return _start([tensor], _copies([tensor]), name, chosen(op, average), factors, process_set, single=True)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce a tensor over processes, in place."""
    factors = prescale_factor, postscale_factor
    return _start([tensor], [tensor], name, chosen(op, average), factors, process_set, single=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over processes, in place."""
    result: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """A tensor reduced over processes; the average by default."""
    factors = prescale_factor, postscale_factor
    return _reduced([tensor], name, compression, chosen(op, average), factors, process_set)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors as one."""
    factors = prescale_factor, postscale_factor
    return _start(tensors, _copies(tensors), name, chosen(op, average), factors, process_set, single=False)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to reduce several tensors as one, in place."""
    factors = prescale_factor, postscale_factor
    return _start(tensors, tensors, name, chosen(op, average), factors, process_set, single=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one, in place."""
    result: list[Tensor] = synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Several tensors reduced as one."""
    factors = prescale_factor, postscale_factor
    return _reduced(tensors, name, compression, chosen(op, average), factors, process_set)


def _reduced(
    tensors: Sequence[Tensor],
    name: str | None,
    compression: Compressor,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(name, op, factors, process_set, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, packed, strict=True)]


class _Allreduce(torch.autograd.Function):
    """Gradients are reduced as the tensors were."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, factors, process_set
        return tuple(synchronize(_start(tensors, _copies(tensors), name, op, factors, process_set, single=False)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        op, factors, process_set = ctx.how
        if op not in (ReduceOp.Average, ReduceOp.Sum):
            raise NotImplementedError(f"gradients flow through Average and Sum only, got {op.name}")
        return None, None, None, None, *_reduced(gradients, None, Compression.none, op, factors, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to add up (or average) sparse tensors."""
    op = chosen(op, None)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"sparse tensors can be averaged or added, got op={op.name}; use to_dense()")
    description = Description("sparse_allreduce", (tensor.dtype,), (tuple(tensor.shape),), tensor.device.type, (op,))
    return process_set.ask("sparse_allreduce", name, description, wire.reduce_sparse(tensor.detach(), op))


def _as_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with a first dimension: a number is one row."""
    return [tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach().contiguous() for tensor in tensors]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start to concatenate every process's rows; processes may have other numbers of them."""
    rows = _as_rows([tensor])
    gather = wire.gather(rows)
    description = describe("allgather", rows, free_rows=True)
    return process_set.ask("allgather", name, description, lambda group: gather(group)[0])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather several tensors as one."""
    rows = _as_rows(tensors)
    return process_set.ask("allgather", name, describe("allgather", rows, free_rows=True), wire.gather(rows))


class _Allgather(torch.autograd.Function):
    """A process's own rows of the average of all gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.process_set, ctx.shapes = process_set, [tensor.shape for tensor in tensors]
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        lengths = [shape[0] if shape else 1 for shape in ctx.shapes]
        everyone = allgather(torch.tensor([lengths]), process_set=ctx.process_set)  # (process, tensor)
        starts = everyone[: ctx.process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(gradients, op=ReduceOp.Average, process_set=ctx.process_set)
        parts = zip(reduced, starts, lengths, ctx.shapes, strict=True)
        own = [gradient[start : start + length].reshape(shape) for gradient, start, length, shape in parts]
        return None, None, *own


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Every process's rows, in process order; processes may have other numbers of them."""
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Several tensors gathered as one."""
    return [*_Allgather.apply(name, process_set, *tensors)]  # type: ignore[no-untyped-call]


def _broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
    """Start to overwrite a tensor."""
    work = tensor.detach().contiguous()
    send = wire.broadcast_together([work], root_rank)

    def perform(group: torch.distributed.ProcessGroup) -> Tensor:
        send(group)
        if work.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(work)
        return tensor

    return process_set.ask("broadcast", name, describe("broadcast", [work], f"from {root_rank}"), perform)


def _check_root(root_rank: int, process_set: ProcessSet) -> None:
    if root_rank not in (process_set.ranks or []):
        raise ValueError(f"root_rank must be a process of {process_set}, got {root_rank}")


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to fetch one process's tensor."""
    _check_root(root_rank, process_set)
    return _broadcast(_copies([tensor])[0], root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to overwrite a tensor with one process's."""
    _check_root(root_rank, process_set)
    return _broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with one process's."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


class _Broadcast(torch.autograd.Function):
    """The average of all gradients goes to the process that the tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: ANN401
        ctx.root, ctx.process_set = root, process_set
        result: Tensor = synchronize(broadcast_async(tensor, root, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        reduced = allreduce(gradient, op=ReduceOp.Average, process_set=ctx.process_set)
        return (reduced if rank() == ctx.root else torch.zeros_like(reduced)), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """One process's tensor, on every process."""
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def _rows_to_send(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    if splits is None:
        if tensor.ndim == 0 or len(tensor) % size:
            raise ValueError(
                f"without splits the first dimension must be a multiple of {size} processes, got {tuple(tensor.shape)}"
            )
        return [len(tensor) // size] * size
    counts = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32)
    if counts.dtype is not torch.int32 or counts.shape != (size,):
        raise ValueError(f"splits must be {size} int32 numbers, got {counts.dtype} of shape {tuple(counts.shape)}")
    rows: list[int] = counts.tolist()
    if min(rows) < 0 or sum(rows) > len(tensor):
        raise ValueError(f"splits must be rows of the tensor, which has {len(tensor)}, got {rows}")
    return rows


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send each process some rows; gives the rows received and how many came from each."""
    exchange = wire.exchange_rows(tensor.detach(), _rows_to_send(tensor, splits, process_set.size()))
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def perform(group: torch.distributed.ProcessGroup) -> tuple[Tensor, Tensor]:
        output, received = exchange(group)
        return output, torch.tensor(received, dtype=torch.int32, device=device)

    return process_set.ask("alltoall", name, describe("alltoall", [tensor], free_rows=True), perform)


class _Alltoall(torch.autograd.Function):
    """Gradients go back where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        tensor: Tensor,
        splits: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received, ctx.rows = process_set, received, len(tensor)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        own, _received = synchronize(alltoall_async(gradient, ctx.received, process_set=ctx.process_set))
        unsent = own.new_zeros(ctx.rows - len(own), *own.shape[1:])
        return torch.cat([own, unsent]), None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows that every process sent here; with `splits` also how many came from each."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    single: bool = False,
) -> Handle:
    op = ReduceOp(op)
    if op is ReduceOp.Adasum:
        raise HorovodInternalError("reducescatter cannot do Adasum; use op=hvd.Average, or allreduce")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise HorovodInternalError("reducescatter shares rows among processes, got a number without a dimension")
    held = [tensor.detach() for tensor in tensors]
    description = describe("reducescatter", held, op, *factors)
    scatter = wire.scatter_rows(held, op, *factors)
    return process_set.ask("reducescatter", name, description, (lambda group: scatter(group)[0]) if single else scatter)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce a tensor, of which each process gets some rows."""
    return _scatter([tensor], name, op, (prescale_factor, postscale_factor), process_set, single=True)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce several tensors, of which each process gets some rows."""
    return _scatter(tensors, name, op, (prescale_factor, postscale_factor), process_set)


class _Reducescatter(torch.autograd.Function):
    """Every process gets the gradients of all rows."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, factors, process_set
        return tuple(synchronize(_scatter(tensors, name, op, factors, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        op, factors, process_set = ctx.how
        if op not in (ReduceOp.Average, ReduceOp.Sum):
            raise NotImplementedError(f"gradients flow through Average and Sum only, got {op.name}")
        factor = factors[0] * factors[1] * (process_set.size() if op is ReduceOp.Sum else 1)
        return None, None, None, None, *grouped_allgather([g * factor for g in gradients], process_set=process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This process's rows of a tensor reduced over processes."""
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This process's rows of several tensors reduced over processes."""
    packed = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    reduced = _Reducescatter.apply(name, op, factors, process_set, *(tensor for tensor, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, packed, strict=True)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every process is here."""
    synchronize(process_set.ask("barrier", None, describe("barrier", []), lambda group: None))


def join(device: int = -1) -> int:
    """Say that this process has no more data: it adds nothing to what the others reduce until all have joined.

    Returns the rank of the process that joined last.
    """
    return global_process_set.join()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.is_done()


def synchronize(handle: Handle) -> Any:  # noqa: ANN401
    """What an asynchronous collective gives, once it has ended."""
    return handle.wait()
