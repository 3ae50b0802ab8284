"""Bytes that a process sends and receives for others, counted where torch hands them to its backend, by what they are.

A collective counts as its classic algorithm sends it: a ring for all-reduce, 2·(P − 1) ÷ P of the data, all-gather and
reduce-scatter, P − 1 messages for all-to-all and from the root of a broadcast. What they are follows from
the caller on the stack: the engine's reductions or torch's engines.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scalewise.engine.processes.team import Team

Kind = Literal["gradients", "parameters", "activations", "activation_gradients", "numbers"]
KINDS: tuple[Kind, ...] = ("gradients", "parameters", "activations", "activation_gradients", "numbers")

# (end of the file's name, function or nothing) -> what is sent from there; the innermost that is known decides
PLACES: dict[tuple[str, str], Kind] = {
    ("processes/team.py", "gather_rows"): "numbers",
    ("sums/reductions.py", "_gather_norms"): "numbers",
    ("sums/reductions.py", "complete"): "numbers",
    ("sums/reductions.py", "squared_norm"): "numbers",
    ("sums/reductions.py", "publish"): "parameters",
    ("sums/reductions.py", ""): "gradients",
    ("engine/parallel/fsdp.py", "__call__"): "gradients",
    ("_fully_shard/_fsdp_collectives.py", ""): "parameters",
    ("pipelining/schedules.py", ""): "activations",
    ("tensor/_redistribute.py", ""): "activations",
}


class Traffic(NamedTuple):
    """Bytes out and in, and messages out."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    def plus(self, *others: Traffic) -> Traffic:
        """All of them together."""
        return Traffic(*map(sum, zip(self, *others, strict=True)))


class Payload(TorchDispatchMode):
    """Within it, what this process sends and receives is counted."""

    def __init__(self, team: Team) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._team = team
        self.found: dict[Kind, Traffic] = defaultdict(Traffic)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Count a collective, and do what was asked for."""
        if func.namespace in ("c10d", "_c10d_functional"):
            traffic = _traffic(func.__name__.split(".")[0], args, self._team)
            if traffic is not None:
                kind = self._kind(func.__name__, args)
                self.found[kind] = self.found[kind].plus(traffic)
        return func(*args, **(kwargs or {}))

    def _kind(self, name: str, args: tuple[Any, ...]) -> Kind:
        kind, backward = _asked_by(sys._getframe(2))
        if kind != "activations":
            return kind
        if name.startswith(("send", "recv")):  # forward they go up the stages, backward down
            upwards = (args[2] > self._team.rank) == name.startswith("send")
            return "activations" if upwards else "activation_gradients"
        return "activation_gradients" if backward else "activations"


def _asked_by(frame: FrameType | None) -> tuple[Kind, bool]:
    """What is sent, by the innermost place that is known, and whether a backward pass asked."""
    kind: Kind | None = None
    backward = False
    while frame is not None:
        code = frame.f_code
        backward = backward or code.co_name == "backward"
        if kind is None and not code.co_name.startswith("<"):  # a comprehension is in the function around it
            known = (
                name
                for (file, function), name in PLACES.items()
                if code.co_filename.endswith(file) and function in ("", code.co_name)
            )
            kind = next(known, None)
        frame = frame.f_back
    return kind or "numbers", backward


def _traffic(name: str, args: tuple[Any, ...], team: Team) -> Traffic | None:
    """What one collective moves on this process; None for what is none."""
    others = team.size - 1
    if name == "alltoall_base_":
        row = args[1].element_size() * (args[1][0].numel() if len(args[1]) else 0)
        sent = _without_own(args[1].nbytes, args[4], row, team)
        return Traffic(sent, _without_own(args[0].nbytes, args[3], row, team), others)
    if name in ("_allgather_base_", "allgather_", "all_gather_into_tensor"):
        mine = _bytes(args[0] if name == "all_gather_into_tensor" else args[1])
        return Traffic(others * mine, others * mine, others)
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        moved = 2 * others * _bytes(args[0]) // team.size
        return Traffic(moved, moved, 2 * others)
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        moved = others * _bytes(args[1] if name.startswith("_") else args[0]) // team.size
        return Traffic(moved, moved, others)
    if name == "broadcast_":
        size = _bytes(args[0])
        return Traffic(others * size, 0, others) if args[2] == team.rank else Traffic(0, size, 0)
    if name == "send":
        return Traffic(_bytes(args[0]), 0, 1)
    return Traffic(0, _bytes(args[0]), 0) if name == "recv_" else None


def _without_own(total: int, splits: list[int], row: int, team: Team) -> int:
    """The bytes of an all-to-all that go to, or come from, others; without splits all parts are equal."""
    own = splits[team.rank] * row if splits else total // team.size
    return total - own


def _bytes(tensors: Tensor | list[Any]) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_bytes(tensor) for tensor in tensors)
