"""Collectives as functions of one process, each on a buffer of so many bytes, counted as nccl-tests does.

The bytes are those of the whole buffer: all that is gathered, all that is scattered. Algorithm bandwidth is bytes ÷
seconds; bus bandwidth multiplies it by what a link must carry at least per byte, so that it can be held against the
hardware's and does not fall with the number of processes by itself (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md):

    2·(P − 1) ÷ P of all-reduce and the ordered reduction, (P − 1) ÷ P of all-gather, reduce-scatter and all-to-all,
    1 of broadcast
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine import reductions
from scalewise.engine.flat import FlatLayout
from scalewise.engine.placement import Placement
from scalewise.engine.team import Team, all_gather

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Exchange:
    """A collective that is ready to be done again and again."""

    bytes: int
    run: Callable[[], object]


def _buffer(team: Team, size: int) -> Tensor:
    """At least `size` bytes, in equal parts for the processes."""
    part = max(1, -(-size // (ELEMENT_BYTES * team.size)))
    return torch.zeros(part * team.size, device=team.device)


def _exchange(buffer: Tensor, run: Callable[[], object]) -> Exchange:
    return Exchange(buffer.numel() * ELEMENT_BYTES, run)


def _all_reduce(team: Team, size: int) -> Exchange:
    buffer = _buffer(team, size)
    return _exchange(buffer, lambda: dist.all_reduce(buffer))


def _all_gather(team: Team, size: int) -> Exchange:
    whole = _buffer(team, size)
    mine = whole.chunk(team.size)[team.rank].clone()
    return _exchange(whole, lambda: all_gather(whole, mine).wait())


def _reduce_scatter(team: Team, size: int) -> Exchange:
    whole = _buffer(team, size)
    mine = whole.chunk(team.size)[team.rank].clone()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    return _exchange(whole, lambda: scatter(mine, whole))


def _all_to_all(team: Team, size: int) -> Exchange:
    outgoing = _buffer(team, size)
    incoming = torch.empty_like(outgoing)
    return _exchange(outgoing, lambda: dist.all_to_all_single(incoming, outgoing))


def _broadcast(team: Team, size: int) -> Exchange:
    buffer = _buffer(team, size)
    return _exchange(buffer, lambda: dist.broadcast(buffer, 0))


def _ordered(team: Team, size: int) -> Exchange:
    """The engine's own reduction of a gradient, one worker per process; its flat vector has whole chunks."""
    gradient = _buffer(team, size)
    layout = FlatLayout({"gradient": gradient}, {}, team.size)
    _, reduction = reductions.build(Placement(), layout, team, team.size)

    def run() -> None:
        for bucket in reduction.buckets:
            reduction.launch(bucket)
        reduction.finish(lambda stretch, start: None)

    return Exchange(layout.size * ELEMENT_BYTES, run)


EXCHANGES: dict[str, Callable[[Team, int], Exchange]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "ordered": _ordered,
}


def bus_factor(name: str, processes: int) -> float:
    """What a link must carry at least, as a part of the bytes.

    >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    part = (processes - 1) / processes
    return {"all-reduce": 2 * part, "ordered": 2 * part, "broadcast": 1.0}.get(name, part)
