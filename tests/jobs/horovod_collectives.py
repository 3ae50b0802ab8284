"""Every collective of scalewise.horovod.torch on some processes: values, types, gradients, mistakes.

python -m torch.distributed.run --nproc-per-node N horovod_collectives.py
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

import scalewise.horovod.torch as hvd
from scalewise.horovod.common.util import env

ADDED = [torch.int32, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16]
MOVED = [*ADDED, torch.uint8, torch.int8, torch.int16, torch.bool, torch.complex64]
FLOATS = [torch.float32, torch.float64]
DIMENSIONS = [0, 1, 2, 3]
BEFORE = os.environ.get("HOROVOD_RANK"), os.environ.get("HOROVOD_LOCAL_SIZE")  # before init()


def values(dtype: torch.dtype, dimensions: int, seed: int = 1, sides: int = 5) -> Tensor:
    """The same small whole numbers on every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, [sides] * dimensions, generator=generator).to(dtype)


def check_reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, dimensions in itertools.product(ADDED, DIMENSIONS):
        mine = values(dtype, dimensions) + rank
        rows = torch.stack([values(dtype, dimensions) + one for one in range(size)])
        before = mine.clone()
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert total.dtype == dtype
        assert torch.equal(total, rows.sum(0, dtype=dtype))
        assert torch.equal(mine, before), "allreduce must not touch its input"
        assert torch.equal(hvd.allreduce(mine, average=False), total)
        assert torch.equal(hvd.allreduce(values(dtype, dimensions)), values(dtype, dimensions)), "the average of equals"
        assert torch.equal(hvd.allreduce(mine, op=hvd.Min), rows.amin(0))
        assert torch.equal(hvd.allreduce(mine, op=hvd.Max), rows.amax(0))
        assert torch.equal(hvd.allreduce(mine, op=hvd.Product), rows.prod(0, dtype=dtype))
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        assert torch.equal(mine, total)
    assert hvd.allreduce(torch.tensor([-1, 3])).tolist() == [-1, 3]
    odd = hvd.allreduce(torch.tensor([-1, 3]) * (rank == 0))
    assert odd.tolist() == [0, 3 // size], "whole numbers are rounded towards 0"
    for dtype in (torch.int16, torch.int8, torch.uint8):
        assert hvd.allreduce(torch.ones(3).to(dtype), op=hvd.Sum).tolist() == [size] * 3
    assert hvd.allreduce(torch.tensor([rank == 0, False]), op=hvd.Max).tolist() == [True, False]
    crossed = values(torch.float32, 2).t()
    hvd.allreduce_(crossed, op=hvd.Sum)
    assert torch.equal(crossed, values(torch.float32, 2).t() * size), "a tensor that is not contiguous"


def check_scaling() -> None:
    size = hvd.size()
    for dtype in ADDED:
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
        wide = dtype if dtype.is_floating_point and wide == torch.float64 else wide
        source = values(dtype, 2)
        before = hvd.allreduce(source, op=hvd.Sum, prescale_factor=0.37)
        assert torch.equal(before, (source.to(wide) * 0.37).to(dtype) * size)
        after = hvd.allreduce(source, op=hvd.Sum, postscale_factor=0.37)
        assert torch.equal(after, ((source * size).to(wide) * 0.37).to(dtype))


def check_asynchronous() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [values(dtype, dimensions, seed=3) for dtype, dimensions in itertools.product(ADDED, (1, 2, 3))]
    handles = [hvd.allreduce_async(tensor, op=hvd.Sum) for tensor in tensors]
    assert not all(hvd.poll(handle) for handle in handles) or size == 1
    for tensor, handle in zip(tensors, handles, strict=True):
        assert torch.equal(hvd.synchronize(handle), tensor * size)
        assert hvd.poll(handle)
    # Processes may ask in any order, as long as they use the same names.
    names = [f"tensor {number}" for number in range(40)]
    mine = names[rank:] + names[:rank]
    started = {name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), name=name) for name in mine}
    for number, name in enumerate(names):
        assert hvd.synchronize(started[name]).tolist() == [number] * 3


def check_groups() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [values(torch.float32, 1) + rank, values(torch.int64, 2), values(torch.float32, 3)]
    expected = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors]
    for got, wanted in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum), expected, strict=True):
        assert torch.equal(got, wanted)
    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="together")
    assert all(map(torch.equal, hvd.synchronize(handle), expected))
    hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(map(torch.equal, tensors, expected))
    rows = [torch.full((rank + 1, 2), rank), torch.full((2,), float(rank))]
    gathered = hvd.grouped_allgather(rows)
    assert gathered[0][:, 0].tolist() == [one for one in range(size) for _ in range(one + 1)]
    assert gathered[1].tolist() == [float(one) for one in range(size) for _ in range(2)]
    scattered = hvd.grouped_reducescatter([torch.arange(2 * size), torch.ones(size, 3)], op=hvd.Sum)
    assert scattered[0].tolist() == [2 * rank * size, (2 * rank + 1) * size]
    assert torch.equal(scattered[1], torch.full((1, 3), float(size)))


def check_movements() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, dimensions in itertools.product(MOVED, (1, 2, 3)):
        mine = torch.full([4] * dimensions, rank).to(dtype)
        gathered = hvd.allgather(mine)
        assert list(gathered.shape) == [4 * size] + [4] * (dimensions - 1)
        assert all(torch.equal(part, torch.full_like(mine, one)) for one, part in enumerate(gathered.split(4)))
        uneven = hvd.allgather(torch.full([rank + 2] + [3] * (dimensions - 1), rank).to(dtype))
        assert uneven.flatten(1)[:, 0].tolist() if dimensions > 1 else uneven.tolist()
        assert len(uneven) == sum(one + 2 for one in range(size))
        for root in range(size):
            sent = hvd.broadcast(mine, root)
            assert torch.equal(sent, torch.full_like(mine, root))
            assert torch.equal(mine, torch.full_like(mine, rank)), "broadcast must not touch its input"
            target = mine.clone()
            assert hvd.broadcast_(target, root) is target
            assert torch.equal(target, sent)
        rows = torch.cat([torch.full([rank + 1] + [2] * (dimensions - 1), one) for one in range(size)]).to(dtype)
        splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
        collected, received = hvd.alltoall(rows, splits)
        assert torch.equal(collected, torch.full_like(collected, rank))
        assert received.dtype == torch.int32
        assert received.tolist() == [one + 1 for one in range(size)]
        assert torch.equal(hvd.alltoall(rows), collected), "equal shares without splits"
    assert len(hvd.allgather(torch.zeros(0 if rank else 2, 3))) == 2
    assert len(hvd.allgather(torch.zeros(0, 3))) == 0
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == [*range(size)], "numbers are rows"
    assert hvd.synchronize(hvd.alltoall_async(torch.arange(size), [1] * size))[0].tolist() == [rank] * size
    for dtype in ADDED:
        source = values(dtype, 2, sides=2 * size + 1)
        share = hvd.reducescatter(source, op=hvd.Sum)
        start = 2 * rank + (rank > 0)
        assert torch.equal(share, source[start : start + 2 + (rank == 0)] * size), "one row more for the first"
        assert torch.equal(hvd.synchronize(hvd.reducescatter_async(source)), source[start : start + len(share)])
        assert torch.equal(hvd.reducescatter(source, op=hvd.Max), source[start : start + len(share)])


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype, dimensions in itertools.product(FLOATS, (1, 2, 3)):
        x = values(dtype, dimensions).requires_grad_()
        ones = torch.ones_like(x)
        for op, expected in ((hvd.Sum, size), (hvd.Average, 1)):
            (gradient,) = torch.autograd.grad(hvd.allreduce(x, op=op), x, ones)
            assert torch.equal(gradient, ones * expected)
            (gradient,) = torch.autograd.grad(hvd.grouped_allreduce([x, x.detach()], op=op)[0], x, ones)
            assert torch.equal(gradient, ones * expected)
        for root in range(size):
            (gradient,) = torch.autograd.grad(hvd.broadcast(x, root), x, ones)
            assert torch.equal(gradient, ones * (rank == root))
        own = torch.zeros([rank + 2] + [3] * (dimensions - 1), dtype=dtype, requires_grad=True)
        weights = torch.cat([torch.full([one + 2] + [3] * (dimensions - 1), float(one)) for one in range(size)])
        (gradient,) = torch.autograd.grad(hvd.allgather(own), own, weights.to(dtype))
        assert torch.equal(gradient, torch.full_like(own, rank))
        many = torch.ones([size * 2] + [3] * (dimensions - 1), dtype=dtype, requires_grad=True)
        sent, _ = hvd.alltoall(many, torch.tensor([1] * size, dtype=torch.int32))
        (gradient,) = torch.autograd.grad(sent, many, torch.full_like(sent, rank + 1))
        assert gradient.flatten(1).sum(1).tolist() if dimensions > 1 else gradient.tolist()
        wanted = [one + 1.0 for one in range(size)] + [0.0] * size
        assert torch.equal(
            gradient, torch.tensor(wanted, dtype=dtype).view(-1, *[1] * (dimensions - 1)).expand_as(many)
        )
        for op, expected in ((hvd.Sum, size), (hvd.Average, 1)):
            share = hvd.reducescatter(many, op=op)
            (gradient,) = torch.autograd.grad(share, many, torch.ones_like(share))
            assert torch.equal(gradient, torch.full_like(many, expected))
    with pytest.raises(NotImplementedError, match="Average and Sum only"):
        hvd.allreduce(torch.ones(2, requires_grad=True), op=hvd.Max).sum().backward()
    half = hvd.allreduce(torch.ones(3, requires_grad=True) / 3, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert half[0].item() == pytest.approx(1 / 3, abs=2e-4)
    assert half[0].item() != pytest.approx(1 / 3, abs=1e-7), "it went through 16 bits"


def check_mistakes() -> None:
    rank, size = hvd.rank(), hvd.size()
    odd = rank % 2
    kinds = {True: torch.int32, False: torch.float32}
    mismatches = [
        lambda: hvd.allreduce(torch.ones(3 + odd)),
        lambda: hvd.allreduce(torch.ones([4] * (1 + odd))),
        lambda: hvd.allreduce(torch.ones(4, dtype=kinds[odd == 1])),
        lambda: hvd.allreduce(torch.ones(4), op=(hvd.Sum, hvd.Max)[odd]),
        lambda: hvd.grouped_allreduce([torch.ones(3 + odd), torch.ones(2)]),
        lambda: hvd.allgather(torch.ones(2, 3 + odd)),
        lambda: hvd.allgather(torch.ones(4, dtype=kinds[odd == 1])),
        lambda: hvd.broadcast(torch.ones(2, 3 + odd), 0),
        lambda: hvd.broadcast(torch.ones(4, dtype=kinds[odd == 1]), 0),
        lambda: hvd.broadcast(torch.ones(4), odd),
        lambda: hvd.alltoall(torch.ones(size, 2 + odd)),
        lambda: hvd.alltoall(torch.ones(size, dtype=kinds[odd == 1])),
        lambda: hvd.reducescatter(torch.ones(size + odd, 2)),
        lambda: hvd.reducescatter(torch.ones(size, dtype=kinds[odd == 1])),
        lambda: hvd.broadcast_parameters({"weight": torch.ones(2 + odd)}),
        lambda: hvd.allreduce(torch.ones(3), name="both") if odd else hvd.allgather(torch.ones(3), name="both"),
    ]
    for number, mistake in enumerate(mismatches[:-1]):
        with pytest.raises(hvd.HorovodInternalError, match=r"must be the same on every process, got process 0: .*1: "):
            mistake()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size, f"the job goes on after mistake {number}"
    for kind in (hvd.allreduce_async, hvd.allgather_async, lambda t, name: hvd.broadcast_async(t, 0, name)):
        first = kind(torch.ones(9), name="twice")
        with pytest.raises(ValueError, match="one collective at a time"):
            kind(torch.ones(9), name="twice")
        hvd.synchronize(first)
        hvd.synchronize(kind(torch.ones(9), name="twice"))
    with pytest.raises(ValueError, match="multiple of"):
        hvd.alltoall(torch.ones(size + 1))
    with pytest.raises(ValueError, match="rows of the tensor"):
        hvd.alltoall(torch.ones(size - 1), torch.ones(size, dtype=torch.int32))
    with pytest.raises(ValueError, match="int32"):
        hvd.alltoall(torch.ones(size), torch.ones(size))
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="without a dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="Adasum"):
        hvd.reducescatter(torch.ones(size), op=hvd.Adasum)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast(torch.ones(1), size)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]))


def check_join() -> None:
    rank, size = hvd.rank(), hvd.size()
    for first, dtype in itertools.product((0, 1), (torch.int64, torch.float32)):
        source = values(dtype, 2)
        if rank != first:
            averages = [hvd.allreduce_async(source, name="a"), hvd.allreduce_async(source[0].contiguous(), name="b")]
            for handle, tensor in zip(averages, (source, source[0]), strict=True):
                wanted = tensor * (size - 1)
                whole = wanted.div(size, rounding_mode="trunc" if dtype == torch.int64 else None)
                assert torch.allclose(hvd.synchronize(handle), whole)
            with pytest.raises(RuntimeError, match="only allreduce can continue"):
                hvd.allgather(source)
            with pytest.raises(RuntimeError, match="only allreduce can continue"):
                hvd.broadcast(source, 1 - first)
        last = hvd.join()
        assert last == hvd.broadcast_object(last)
        assert last != first or size == 1


def check_adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        return
    vectors = [torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(one)) for one in range(size)]

    def pair(a: Tensor, b: Tensor) -> Tensor:
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    wanted = pair(*vectors) if size == 2 else pair(pair(*vectors[:2]), pair(*vectors[2:]))
    assert torch.allclose(hvd.allreduce(vectors[rank], op=hvd.Adasum), wanted)
    many = hvd.grouped_allreduce([vectors[rank], vectors[rank] * 1e-3, torch.zeros(3)], op=hvd.Adasum)
    assert torch.allclose(many[1], wanted * 1e-3), "tensor by tensor"
    assert many[2].tolist() == [0, 0, 0]
    axis = torch.zeros(size)
    axis[rank] = rank + 1.0
    assert hvd.allreduce(axis, op=hvd.Adasum).tolist() == [one + 1.0 for one in range(size)]


def check_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    everyone, some = [*range(size)], [*range(1, size)]
    with pytest.raises(ValueError, match="known already"):
        hvd.add_process_set(everyone)
    with pytest.raises(ValueError, match="pass a list of ranks"):
        hvd.ProcessSet(object())
    with pytest.raises(ValueError, match="between 0 and"):
        hvd.add_process_set([size])
    fresh = hvd.ProcessSet(some)
    with pytest.raises(ValueError, match="add_process_set"):
        fresh.size()
    assert hvd.add_process_set(fresh) is fresh
    assert fresh.process_set_id in hvd.process_set_ids()
    assert (fresh.size(), fresh.included()) == (size - 1, rank > 0)
    if fresh.included():
        assert fresh.rank() == rank - 1
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=fresh).item() == sum(some)
        assert hvd.allgather(torch.tensor([rank]), process_set=fresh).tolist() == some
        assert hvd.broadcast(torch.tensor([rank]), size - 1, process_set=fresh).item() == size - 1
        assert hvd.allgather_object(rank, process_set=fresh) == some
        assert hvd.broadcast_object(rank, 1, process_set=fresh) == 1
        assert len(hvd.reducescatter(torch.ones(size - 1), process_set=fresh)) == 1
        assert hvd.alltoall(torch.full((size - 1,), rank), process_set=fresh).tolist() == some
        hvd.barrier(process_set=fresh)
    else:
        with pytest.raises(ValueError, match="only processes of a set"):
            hvd.allreduce(torch.ones(1), process_set=fresh)
    number = fresh.process_set_id
    assert hvd.remove_process_set(fresh)
    assert not hvd.remove_process_set(fresh)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="number must be one of"):
        hvd.process_set_by_id(number)
    assert hvd.add_process_set(fresh).process_set_id == number, "a set can be added again, and numbers are"
    assert str(fresh) == f"ProcessSet(process_set_id={number}, ranks={some}, mpi_comm=None)"
    assert hvd.remove_process_set(fresh)
    hvd.barrier()
    hvd.shutdown()
    twice = hvd.ProcessSet(reversed(some))
    hvd.init(process_sets=[fresh, some, twice, everyone])
    assert (hvd.process_set_ids(), twice.process_set_id) == ([0, 1], 1), "sets that are given twice are one"
    if rank > 0:
        assert hvd.allgather_object(rank, process_set=twice) == some
    assert hvd.remove_process_set(twice)
    assert fresh.process_set_id is None


def check_objects_and_state() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"hello": 123, 0: [1, 2]} if rank == 0 else {}) == {"hello": 123, 0: [1, 2]}
    assert hvd.allgather_object({"rank": rank, "long": "x" * rank * 1000}) == [
        {"rank": one, "long": "x" * one * 1000} for one in range(size)
    ]
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"betas": (0.8, 0.9)}),
        (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    ):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        optimizer = kind(model.parameters(), lr=0.1 * (rank + 1), **(options if rank == 0 else {}))
        if rank == 0:  # as after loading a checkpoint there
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
        hvd.broadcast_parameters([*model.parameters()], root_rank=0)
        hvd.broadcast_optimizer_state(wrapped, root_rank=0)
        states = hvd.allgather_object((model.state_dict(), wrapped.state_dict()))
        weights = [torch.cat([value.flatten().float() for value in state[0].values()]) for state in states]
        assert all(torch.equal(one, weights[0]) for one in weights)
        assert all(str(state[1]) == str(states[0][1]) for state in states)
        assert wrapped.param_groups[0]["lr"] == 0.1
        assert {*wrapped._parameter_names.values()} == {name for name, _ in model.named_parameters()}
        assert len(wrapped.state) == len([*model.parameters()])
        wrapped.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        wrapped.step()
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    free = torch.nn.Parameter(torch.zeros(2))
    hvd.broadcast_optimizer_state(torch.optim.SGD([frozen, free], lr=1.0), root_rank=0)
    assert frozen.grad is None
    assert free.grad.tolist() == [0, 0]


def check_stalls() -> None:
    with env(HOROVOD_STALL_CHECK_TIME_SECONDS="0.05", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.15"):
        if hvd.rank() == 0:
            with (
                pytest.warns(RuntimeWarning, match="make the same calls"),
                pytest.raises(RuntimeError, match="did not ask for it"),
            ):
                hvd.allreduce(torch.ones(1), name="alone")
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def check_life() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == BEFORE
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert int(os.environ["HOROVOD_RANK"]) == rank
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()
    assert not hvd.mpi_threads_supported()
    for _ in range(2):
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            hvd.rank()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        hvd.start_timeline(str(first), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="wanted")
        hvd.stop_timeline()
        with env(HOROVOD_TIMELINE=str(second)):
            hvd.barrier()
            hvd.shutdown()
            hvd.init()
        hvd.allreduce(torch.ones(3), name="wanted")
        if hvd.rank() == 0:
            text = second.read_text()
            assert "NEGOTIATE_ALLREDUCE" in text, "it can be read while the job runs"
            assert "CYCLE_START" not in text
            events = json.loads(first.read_text())
            assert "start_time_since_epoch_in_micros" in events[0]["args"]
            rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
            names = [event["name"] for event in events if event["pid"] == rows["allreduce.wanted"]]
            assert names == ["process_name", "NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
            assert any(event["name"] == "CYCLE_START" for event in events)
        assert (first.exists(), second.exists()) == (hvd.rank() == 0, hvd.rank() == 0), "process 0 writes"
        hvd.stop_timeline()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    hvd.init()  # a second time changes nothing
    checks = [value for name, value in globals().items() if name.startswith("check_")]
    for check in checks:
        check()
        hvd.barrier()
        if hvd.rank() == 0:  # lines of several processes may run into each other
            print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
