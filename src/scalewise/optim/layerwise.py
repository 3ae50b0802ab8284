"""What LARS and LAMB have in common: which parameters adapt, and the fastest way to them on each device."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.native import Layers, compiled
from scalewise.optim.rules import Vector, kind

BATCH = 1 << 19  # elements that are taken together on a CPU, if there are several layers in them
Tensors = list[Tensor] | tuple[Tensor, ...]
Group = dict[str, Any]  # torch's parameter groups: the parameters and their options


@dataclass(slots=True)
class Member:
    """A parameter that has a gradient, and what the optimizer keeps for it."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    vector: Vector | None  # the weight's memory, where torch's fused CPU kernels can be used
    adapts: bool
    decay: float
    kept: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = list(self.state.values())

    def stays(self, gradient: Tensor, state: dict[str, Tensor] | None) -> bool:
        """Whether this step's gradient and the state lie as they did, so that they can be used in the same way."""
        return (
            state is self.state
            and all(map(is_, state.values(), self.kept))
            and self.vector is not None
            and self.vector.fits(self.weight, gradient)
        )


def roles(members: list[Member], *kept: str) -> list[list[Tensor]]:
    """The weights of some parameters, their gradients, and what is kept for them under these names."""
    states = [[member.state[name] for member in members] for name in kept]
    return [[member.weight for member in members], [member.gradient for member in members], *states]


class Plan:
    """The parameters of a group, sorted by the way in which they are updated; kept as long as they lie as they did.

    Sorting takes as long as the update of a small layer. What is checked in every step is what C relies on: sizes and
    layouts. Addresses are read again.
    """

    def __init__(self, group: Group, members: list[Member | None]) -> None:
        self._options, self._members = _options(group), list(zip(group["params"], members, strict=True))
        known = [member for member in members if member is not None]
        plain = [member for member in known if member.vector is not None]
        adapting = _alike([member for member in plain if member.adapts], lambda member: member.weight.dtype)
        self.adapting = [(same, Layers([m.weight.numel() for m in same], [m.decay for m in same])) for same in adapting]
        self.plain = _alike([member for member in plain if not member.adapts], _kind)
        self.together = _alike([member for member in known if member.vector is None], _kind)

    def renew(self, group: Group, states: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Take this step's gradients; False where something else than their values and addresses has changed."""
        if len(group["params"]) != len(self._members) or _options(group) != self._options:
            return False
        for weight, (known, member) in zip(group["params"], self._members, strict=True):
            gradient = weight.grad
            if weight is not known or (gradient is None) != (member is None):
                return False
            if member is not None:
                if not member.stays(gradient, states.get(weight)):
                    return False
                member.gradient = gradient
        return True

    def release(self) -> None:
        """Let go of the gradients, so that they are freed when the caller sets them to None."""
        for _, member in self._members:
            if member is not None:
                del member.gradient


class LayerWise(Optimizer, ABC):
    """An optimizer whose step length is chosen per parameter, from norms.

    On a CPU parameters are updated in C, one after another (native.py). Without a compiler they are updated in small
    batches by torch's fused kernels: few enough that what they need stays in the cache, and enough that the same code
    runs several times in a row, since code is cold after every long vector (docs/log.md). Elsewhere, and for DTensors,
    all parameters of a kind go through torch's foreach kernels, with one exchange of norms.
    """

    def __init__(self, parameters: ParamsT, options: dict[str, Any]) -> None:
        super().__init__(parameters, options)
        self._plans: dict[int, Plan] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own, or with the optimizer's."""
        for name in ("lr", "weight_decay"):
            value = param_group.get(name, self.defaults[name])
            if not value >= 0:
                raise RecipeError(f"{name} must be at least 0, got {value}; raise it")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; views of memory are not part of one."""
        super().__setstate__(state)
        self._plans = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` computes the loss and the gradients again."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, group in enumerate(self.param_groups):
            plan = self._plans.get(number)
            if plan is None or not plan.renew(group, self.state):
                plan = self._plans[number] = Plan(group, [self._member(group, weight) for weight in group["params"]])
            for same, layers in plan.adapting:
                if (library := compiled(same[0].weight.dtype)) is not None:
                    self._update_natively(library, group, same, layers)
                else:
                    for batch in _batches(same):
                        self._update_batch(group, batch)
            for same in plan.plain:
                self._update_plainly(group, same)
            for same in plan.together:
                self._update_together(group, same)
            plan.release()
        return loss

    def _member(self, group: Group, weight: Tensor) -> Member | None:
        """A parameter with what is kept for it; None where it has no gradient."""
        gradient = weight.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            raise RecipeError(
                f"{type(self).__name__} needs dense gradients, got a sparse one; build the layer with sparse=False"
            )
        state = self.state[weight]
        if not state:
            state.update(self._new_state(weight))
        others = [other for other in (gradient, *state.values()) if other.shape == weight.shape]
        vector = Vector(weight) if _is_plain(weight, others) else None
        decay, adapt, adapt_vectors = _options(group)
        counts = adapt_vectors or weight.ndim >= 2
        return Member(weight, gradient, state, vector, counts and adapt, decay if counts else 0.0)

    @abstractmethod
    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """What is kept for a parameter, before its first step."""

    @abstractmethod
    def _update_natively(self, library: ctypes.CDLL, group: Group, members: list[Member], layers: Layers) -> None:
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


def _options(group: Group) -> tuple[float, bool, bool]:
    """What decides how a parameter is updated."""
    return group["weight_decay"], group["adapt"], group["adapt_vectors"]


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


def _alike(members: list[Member], key: Callable[[Member], object]) -> list[list[Member]]:
    """Those that can go through one call."""
    found: dict[object, list[Member]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return list(found.values())


def _kind(member: Member) -> tuple[object, ...]:
    return *kind(member.weight), member.adapts, member.decay


def _is_plain(weight: Tensor, others: list[Tensor]) -> bool:
    """Whether all lie alike and without gaps in this machine's memory, as torch's fused CPU kernels need it."""
    return (
        type(weight) in (Parameter, Tensor)
        and weight.is_cpu
        and weight.dtype in (torch.float32, torch.float64)  # in half precision the fused SGD rounds the rate away
        and all(other.dtype == weight.dtype and other.stride() == weight.stride() for other in others)
        and (weight.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(weight))
    )
