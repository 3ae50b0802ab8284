"""What LARS and LAMB have in common: which parameters adapt, and the fastest way to them on each device."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.native import compiled
from scalewise.optim.norms import Vector, kind

BATCH = 1 << 19  # elements that are taken together on a CPU, if there are several layers in them
Tensors = list[Tensor] | tuple[Tensor, ...]
Group = dict[str, Any]  # torch's parameter groups: the parameters and their options


class Member(NamedTuple):
    """A parameter that has a gradient, and what the optimizer keeps for it."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    vector: Vector | None  # the weight's memory, where torch's fused CPU kernels can be used
    adapts: bool
    decay: float


class LayerWise(Optimizer, ABC):
    """An optimizer whose step length is chosen per parameter, from norms.

    On a CPU parameters are updated in C, one after another (native.py). Without a compiler they are updated in small
    batches by torch's fused kernels: few enough that what they need stays in the cache, and enough that the same code
    runs several times in a row, since code is cold after every long vector (docs/log.md). Elsewhere, and for DTensors,
    all parameters of a kind go through torch's foreach kernels, with one exchange of norms.
    """

    def __init__(self, parameters: ParamsT, options: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            if not options[name] >= 0:
                raise RecipeError(f"{name} must be at least 0, got {options[name]}; raise it")
        super().__init__(parameters, options)
        self._vectors: dict[Tensor, Vector] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; views of memory are not part of one."""
        super().__setstate__(state)
        self._vectors = {}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; `closure` computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members = self._members(group)
            plain = [member for member in members if member.vector is not None]
            for same in _by_dtype([member for member in plain if member.adapts]):
                self._update_adapting(group, same)
            for same in _alike([member for member in plain if not member.adapts]):
                self._update_plainly(group, same)
            for same in _alike([member for member in members if member.vector is None]):
                self._update_together(group, same)
        return loss

    def _update_adapting(self, group: Group, members: list[Member]) -> None:
        """Update parameters of one dtype that adapt, in C or, where there is no compiler, with torch's kernels."""
        library = compiled(members[0].weight.dtype)
        if library is not None:
            self._update_natively(library, group, members)
            return
        for batch in _batches(members):
            self._update_batch(group, batch)

    def _members(self, group: Group) -> list[Member]:
        """The parameters that have a gradient; on the path of every step, so it does little for each."""
        members = []
        decay, adapt, adapt_vectors = group["weight_decay"], group["adapt"], group["adapt_vectors"]
        for weight in group["params"]:
            gradient = weight.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise RecipeError(
                    f"{type(self).__name__} needs dense gradients, got a sparse one; build the layer with sparse=False"
                )
            state = self.state[weight]
            if not state:
                state.update(self._new_state(weight))
            vector = self._vectors.get(weight)
            if vector is None or not vector.fits(weight, gradient):
                vector = self._find_vector(weight, [gradient, *state.values()])
            counts = adapt_vectors or weight.ndim >= 2
            members.append(Member(weight, gradient, state, vector, counts and adapt, decay if counts else 0.0))
        return members

    def _find_vector(self, weight: Tensor, others: list[Tensor]) -> Vector | None:
        if not _is_plain(weight, [other for other in others if other.shape == weight.shape]):
            return None
        self._vectors[weight] = Vector(weight)
        return self._vectors[weight]

    @abstractmethod
    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """What is kept for a parameter, before its first step."""

    @abstractmethod
    def _update_natively(self, library: ctypes.CDLL, group: Group, members: list[Member]) -> None:
        """Update parameters of one dtype that adapt, in C."""

    @abstractmethod
    def _update_batch(self, group: Group, members: list[Member]) -> None:
        """Update a few neighbours that adapt, with fused CPU kernels."""

    @abstractmethod
    def _update_plainly(self, group: Group, members: list[Member]) -> None:
        """Update parameters that do not adapt, with fused CPU kernels."""

    @abstractmethod
    def _update_together(self, group: Group, members: list[Member]) -> None:
        """Update parameters of one kind with foreach kernels, on any device."""


def _batches(members: list[Member]) -> Iterator[list[Member]]:
    """Neighbours, up to about BATCH elements; longer ones alone."""
    batch: list[Member] = []
    elements = 0
    for member in members:
        size = member.weight.numel()
        if batch and elements + size > BATCH:
            yield batch
            batch, elements = [], 0
        batch.append(member)
        elements += size
    if batch:
        yield batch


def _by_dtype(members: list[Member]) -> list[list[Member]]:
    found: dict[torch.dtype, list[Member]] = {}
    for member in members:
        found.setdefault(member.weight.dtype, []).append(member)
    return list(found.values())


def _alike(members: list[Member]) -> list[list[Member]]:
    """Those that can go through one call."""
    found: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        found.setdefault((*kind(member.weight), member.adapts, member.decay), []).append(member)
    return list(found.values())


def _is_plain(weight: Tensor, others: list[Tensor]) -> bool:
    """Whether all lie alike and without gaps in this machine's memory, as torch's fused CPU kernels need it."""
    return (
        type(weight) in (Parameter, Tensor)
        and weight.is_cpu
        and weight.dtype in (torch.float32, torch.float64)  # in half precision the fused SGD rounds the rate away
        and all(other.dtype == weight.dtype and other.stride() == weight.stride() for other in others)
        and (weight.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(weight))
    )
