"""Horovod's collectives: at once, asynchronous, in place and several together; gradients flow through the first.

Every process of the set must make each call; calls with a name may come in any order. `process_set` limits a call to
some processes. Asynchronous calls return a handle for `synchronize` and `poll`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from scalewise.horovod import wire
from scalewise.horovod.common.exceptions import HorovodInternalError
from scalewise.horovod.negotiation import Description, Handle, Perform, describe
from scalewise.horovod.processes import ProcessSet, global_process_set, rank
from scalewise.horovod.torch.compression import Compression, Compressor
from scalewise.horovod.wire import ReduceOp

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


P = ParamSpec("P")
Start = Callable[[Sequence[Tensor]], Handle]
Backward = Callable[
    [Sequence[Tensor]], Sequence[Tensor]
]  # from the gradients of what came out to those of what went in


def _of_one(grouped: Callable[Concatenate[Sequence[Tensor], P], Any], description: str) -> Callable[..., Any]:
    """The collective of one tensor, from that of several."""
    first, *others = inspect.signature(grouped).parameters.values()

    def alone(tensor: Tensor, *arguments: P.args, **named: P.kwargs) -> Any:  # noqa: ANN401
        given = grouped([tensor], *arguments, **named)
        return given.of_one() if isinstance(given, Handle) else given[0]

    alone.__name__, alone.__doc__ = grouped.__name__.removeprefix("grouped_"), description
    alone.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [first.replace(name="tensor", annotation=Tensor), *others]
    )
    return alone


def _waiting(start: Callable[P, Handle], description: str) -> Callable[P, Any]:
    """The collective that waits for the one that `start` starts."""

    @wraps(start)
    def finished(*arguments: P.args, **named: P.kwargs) -> Any:  # noqa: ANN401
        return synchronize(start(*arguments, **named))

    finished.__name__, finished.__doc__ = start.__name__.replace("_async", ""), description
    return finished


def _on_copies(start: Callable[P, Handle], description: str) -> Callable[P, Handle]:
    """The collective whose results overwrite copies of its first argument: a tensor, or several."""
    signature = inspect.signature(start)

    @wraps(start)
    def started(*arguments: P.args, **named: P.kwargs) -> Handle:
        given = signature.bind(*arguments, **named)
        first = next(iter(given.arguments))
        tensors = given.arguments[first]
        given.arguments[first] = _copies([tensors])[0] if isinstance(tensors, Tensor) else _copies(tensors)
        return start(*given.args, **given.kwargs)

    started.__name__, started.__doc__ = start.__name__.removesuffix("_"), description
    return started


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction, also from `average`, which older scripts give.

    >>> chosen(None, None).name, chosen(None, False).name
    ('Average', 'Sum')
    """
    if average is None:
        return ReduceOp.Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError(f"give op or average, not both; got op={ReduceOp(op).name} and average={average}")
    return ReduceOp.Average if average else ReduceOp.Sum


def in_place(tensors: Sequence[Tensor], collective: Callable[..., None], *how: object) -> Perform:
    """A collective that overwrites contiguous tensors, for `tensors` that need not be."""
    work = [tensor.detach().contiguous() for tensor in tensors]

    def perform(group: torch.distributed.ProcessGroup) -> list[Tensor]:
        collective(work, *how, group)
        for target, result in zip(tensors, work, strict=True):
            if target.data_ptr() != result.data_ptr():
                target.detach().copy_(result)
        return [*tensors]

    return perform


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
    how = chosen(op, average), prescale_factor, postscale_factor
    if how[0] is ReduceOp.Adasum:
        _check_adasum(tensors, process_set)
    perform = in_place(tensors, wire.reduce_together, *how)
    return process_set.ask(name, describe("allreduce", tensors, *how), perform)


allreduce_async_ = _of_one(
    grouped_allreduce_async_, "Start to reduce a tensor over processes, in place; the average by default."
)
allreduce_async = _on_copies(allreduce_async_, "Start to reduce a tensor over processes; the average by default.")
allreduce_ = _waiting(allreduce_async_, "Reduce a tensor over processes, in place.")
grouped_allreduce_async = _on_copies(grouped_allreduce_async_, "Start to reduce several tensors as one.")
grouped_allreduce_ = _waiting(grouped_allreduce_async_, "Reduce several tensors as one, in place.")


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
    how = chosen(op, average), prescale_factor, postscale_factor, process_set

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        _check_differentiable(how[0])
        return grouped_allreduce(gradients, None, None, Compression.none, *how)  # as the tensors were

    return _compressed(tensors, compression, lambda held: grouped_allreduce_async(held, None, name, *how), backward)


allreduce = _of_one(grouped_allreduce, "A tensor reduced over processes; the average by default.")


class _Differentiable(torch.autograd.Function):
    """A collective that gradients flow through: `start` begins it, `backward` gives the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, start: Start, backward: Backward, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.gradients_of = backward
        return tuple(start(tensors).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        return None, None, *ctx.gradients_of(gradients)


def _differentiable(start: Start, backward: Backward, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*_Differentiable.apply(start, backward, *tensors)]  # type: ignore[no-untyped-call]


def _compressed(tensors: Sequence[Tensor], compression: Compressor, start: Start, backward: Backward) -> list[Tensor]:
    """A collective that gradients flow through, on compressed tensors."""
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = _differentiable(start, backward, [tensor for tensor, _ in packed])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, packed, strict=True)]


def _check_differentiable(op: ReduceOp) -> None:
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise NotImplementedError(f"gradients flow through Average and Sum only, got {op.name}")


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to add up (or average) sparse tensors."""
    op = chosen(op, None)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise ValueError(f"sparse tensors can be averaged or added, got op={op.name}; use to_dense()")
    description = Description("sparse_allreduce", (tensor.dtype,), (tuple(tensor.shape),), tensor.device.type, (op,))
    return process_set.ask(name, description, partial(wire.reduce_sparse, tensor.detach().coalesce(), op))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather several tensors as one; a number is one row."""
    rows = [tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor.detach().contiguous() for tensor in tensors]

    def gather(group: torch.distributed.ProcessGroup) -> list[Tensor]:
        return [wire.gathered_rows(row, group) for row in rows]

    return process_set.ask(name, describe("allgather", rows, free_rows=True), gather)


allgather_async = _of_one(
    grouped_allgather_async, "Start to concatenate every process's rows; processes may have other numbers of them."
)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Several tensors gathered as one."""
    shapes = [tensor.shape for tensor in tensors]

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        """This process's own rows of the average of all gradients."""
        lengths = [shape[0] if shape else 1 for shape in shapes]
        everyone = allgather(torch.tensor([lengths]), process_set=process_set)  # (process, tensor)
        starts = everyone[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(gradients, op=ReduceOp.Average, process_set=process_set)
        parts = zip(reduced, starts, lengths, shapes, strict=True)
        return [gradient[start : start + length].reshape(shape) for gradient, start, length, shape in parts]

    return _differentiable(lambda held: grouped_allgather_async(held, name, process_set), backward, tensors)


allgather = _of_one(
    grouped_allgather, "Every process's rows, in process order; processes may have other numbers of them."
)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to overwrite a tensor with one process's."""
    return _broadcast([tensor], root_rank, name, process_set).of_one()


def _broadcast(tensors: Sequence[Tensor], root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
    if root_rank not in (process_set.ranks or []):
        raise ValueError(f"root_rank must be a process of {process_set}, got {root_rank}")
    perform = in_place(tensors, wire.broadcast_together, root_rank)
    return process_set.ask(name, describe("broadcast", tensors, f"from {root_rank}"), perform)


broadcast_async = _on_copies(broadcast_async_, "Start to fetch one process's tensor.")
broadcast_ = _waiting(broadcast_async_, "Overwrite a tensor with one process's.")


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """One process's tensor, on every process."""

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        """The average of all gradients, on the process that the tensor came from."""
        (reduced,) = grouped_allreduce(gradients, op=ReduceOp.Average, process_set=process_set)
        return [reduced if rank() == root_rank else torch.zeros_like(reduced)]

    return _differentiable(lambda held: _broadcast(_copies(held), root_rank, name, process_set), backward, [tensor])[0]


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
    rows = _rows_to_send(tensor, splits, process_set.size())
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def perform(group: torch.distributed.ProcessGroup) -> tuple[Tensor, Tensor]:
        output, received = wire.exchange_rows(tensor.detach(), rows, group)
        return output, torch.tensor(received, dtype=torch.int32, device=device)

    return process_set.ask(name, describe("alltoall", [tensor], free_rows=True), perform)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rows that every process sent here; with `splits` also how many came from each."""
    rows = len(tensor)

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients go back where the rows came from."""
        own, _ = synchronize(alltoall_async(gradients[0], received, process_set=process_set))
        return [torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])]

    output, received = _differentiable(
        lambda held: alltoall_async(held[0], splits, name, process_set), backward, [tensor]
    )
    return output if splits is None else (output, received)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce several tensors, of which each process gets some rows."""
    how = ReduceOp(op), prescale_factor, postscale_factor
    if how[0] is ReduceOp.Adasum:
        raise HorovodInternalError("reducescatter cannot do Adasum; use op=hvd.Average, or allreduce")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise HorovodInternalError("reducescatter shares rows among processes, got a number without a dimension")
    held = [tensor.detach() for tensor in tensors]
    return process_set.ask(name, describe("reducescatter", held, *how), partial(wire.scatter_rows, held, *how))


reducescatter_async = _of_one(
    grouped_reducescatter_async, "Start to reduce a tensor, of which each process gets some rows."
)


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
    how = op, process_set, prescale_factor, postscale_factor

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        """Every process gets the gradients of all rows."""
        _check_differentiable(op)
        factor = prescale_factor * postscale_factor * (process_set.size() if op is ReduceOp.Sum else 1)
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    return _compressed(tensors, compression, lambda held: grouped_reducescatter_async(held, name, *how), backward)


reducescatter = _of_one(grouped_reducescatter, "This process's rows of a tensor reduced over processes.")


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every process is here."""
    synchronize(process_set.ask(None, describe("barrier", []), lambda group: None))


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
