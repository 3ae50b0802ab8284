"""Start values, optimizer state and Python objects, from one process to all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from scalewise.horovod import wire
from scalewise.horovod.negotiation import Description, describe
from scalewise.horovod.processes import ProcessSet, global_process_set, rank
from scalewise.horovod.torch.collectives import in_place, synchronize

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
TOGETHER_BYTES = 64 * 2**20  # that are broadcast in one message

T = TypeVar("T")
Held = TypeVar("Held", bound=Tensor)


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite a `state_dict()`, `named_parameters()` or `parameters()` with one process's."""
    if isinstance(params, Mapping):
        params = sorted(params.items())
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"params must be a state_dict() or named_parameters(), got a {type(params).__name__}")
    pairs = [("", one) if isinstance(one, Tensor) else one for one in params]
    if any(not (isinstance(pair, tuple) and len(pair) == 2) for pair in pairs):
        raise ValueError("params must be tensors, or pairs of a name and a tensor; pass model.named_parameters()")
    overwrite([tensor for _, tensor in pairs if isinstance(tensor, Tensor)], root_rank, process_set)


def overwrite(tensors: Iterable[Tensor], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrite tensors with one process's, many in one message."""
    handles = []
    for part in portions(tensors, attrgetter("device"), TOGETHER_BYTES, TOGETHER_BYTES):
        perform = in_place(part, wire.broadcast_together, root_rank)
        handles.append(process_set.ask(None, describe("broadcast", part, f"from {root_rank}"), perform))
    for handle in handles:
        synchronize(handle)


def portions(
    tensors: Iterable[Held], kind: Callable[[Tensor], object], first_bytes: int, most_bytes: int
) -> list[list[Held]]:
    """Neighbours of one kind, up to `most_bytes` together; the first portion up to `first_bytes`."""
    found: list[list[Held]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        room -= size
        if not found or room < 0 or kind(found[-1][0]) != kind(tensor):
            room = (most_bytes if found else first_bytes) - size
            found.append([])
        found[-1].append(tensor)
    return found


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """One process's Python object, on every process."""
    mine = rank() == root_rank
    data = pickle.dumps(obj) if mine else b""
    description = Description("broadcast_object", details=(f"from {root_rank}",))
    received = synchronize(process_set.ask(name, description, partial(wire.send_bytes, data, root_rank)))
    result: T = obj if mine else pickle.loads(received)
    return result


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every process's Python object, in process order."""
    gather = partial(wire.gather_bytes, pickle.dumps(obj))
    received = synchronize(process_set.ask(name, Description("allgather_object"), gather))
    return [pickle.loads(data) for data in received]


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Give every process one process's optimizer state: its options, and its tensors if it has any.

    As with Horovod, parameters without a gradient have one of zeros afterwards; parameters do not change.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast; use another optimizer")
    if rank() == root_rank:
        state = optimizer.state_dict()
        broadcast_object(tree_map_only(Tensor, _Place, state), root_rank, process_set=process_set)
    else:
        places = broadcast_object(None, root_rank, process_set=process_set)
        state = tree_map_only(_Place, _Place.tensor, places)
    overwrite([leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)], root_rank, process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class _Place:
    """Where a tensor was."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device.type

    def tensor(self) -> Tensor:
        """One like it, with anything in it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)
