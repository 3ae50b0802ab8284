"""LAMB: Adam whose layers move in proportion to their weights (You et al. 2020, https://arxiv.org/abs/1904.00962)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.layerwise import Group, LayerWise, Member, roles
from scalewise.optim.native import Layers, doubles
from scalewise.optim.rules import (
    Vector,
    local_part,
    new_moments,
    norm,
    norms,
    refuse_half,
    trust_ratio,
    trust_ratios,
    update_adam,
)


class Memory:
    """Scratch memory for one batch of layers at a time, which stays in the cache; views of it are kept."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._views: dict[tuple[int, ...], list[Vector]] = {}

    def like(self, vectors: list[Vector]) -> list[Vector]:
        """Vectors of the same lengths, with anything in them."""
        lengths = tuple([len(vector.array) for vector in vectors])
        dtype = vectors[0].dtype
        if dtype != self._memory.dtype or sum(lengths) > self._memory.numel():
            self._memory = torch.empty(sum(lengths), dtype=dtype)
            self._views.clear()
        if lengths not in self._views:
            self._views[lengths] = [Vector(part) for part in self._memory[: sum(lengths)].split(list(lengths))]
        return self._views[lengths]


class LAMB(LayerWise):
    """Adam's direction, with a step per layer that is lr times the layer's own norm.

        r = m̂ ÷ (√v̂ + ε),  u = r + λ·w       (m̂ and v̂: Adam's moments without their start-up bias)
        w ← w − lr · ‖w‖ ÷ ‖u‖ · u           (the ratio is 1 where ‖w‖ or ‖u‖ is 0)

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LAMB(layer.parameters(), lr=1e-3, weight_decay=0.01)

    Arguments:
        parameters: as for any torch optimizer, groups included.
        betas: decay of the two moments.
        eps: ε.
        weight_decay: λ.
        adapt_vectors: adapt and decay biases and norm weights (fewer than two dimensions) too. By default they get
            Adam's step without decay, as is usual.
        adapt: False in a group gives it AdamW's step.
        largest_ratio: the trust ratio is never above this; None leaves it as it is.
    """

    def __init__(
        self,
        parameters: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt_vectors: bool = False,
        adapt: bool = True,
        largest_ratio: float | None = None,
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise RecipeError(f"betas must be two numbers, at least 0 and below 1, got {betas}; (0.9, 0.999) is usual")
        if not eps > 0:
            raise RecipeError(f"eps must be above 0, got {eps}; 1e-6 is usual")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        choices = {"adapt_vectors": adapt_vectors, "adapt": adapt, "largest_ratio": largest_ratio}
        super().__init__(parameters, options | choices)
        self._memory = Memory()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; the scratch memory is not part of one."""
        super().__setstate__(state)
        self._memory = Memory()

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        refuse_half("LAMB", weight)
        return new_moments(weight)

    def _update_natively(self, library: ctypes.CDLL, group: Group, members: list[Member], layers: Layers) -> None:
        count_step(members)
        beta1, beta2 = group["betas"]
        steps = [member.state["step"].item() for member in members]
        biases = [
            doubles(values) for values in ([1 - beta1**t for t in steps], [math.sqrt(1 - beta2**t) for t in steps])
        ]
        largest = math.inf if group["largest_ratio"] is None else group["largest_ratio"]
        rule = float(group["lr"]), beta1, beta2, group["eps"], largest
        layers.call(library.lamb, roles(members, "exp_avg", "exp_avg_sq"), biases, *rule)

    @np.errstate(over="ignore", invalid="ignore")
    def _update_batch(self, group: Group, members: list[Member]) -> None:
        lr, largest = float(group["lr"]), group["largest_ratio"]
        vectors = [member.vector for member in members if member.vector]
        directions = self._memory.like(vectors)
        count_step(members)
        for member, vector, direction in zip(members, vectors, directions, strict=True):
            if member.decay:
                np.multiply(vector.array, member.decay, out=direction.array)
            else:
                direction.tensor.zero_()
        self._adam(group, members, [direction.tensor for direction in directions], lr=-1.0)  # r comes on top of λ·w
        sizes = [norm(vector.array) for vector in vectors]
        lengths = [norm(direction.array) for direction in directions]
        for vector, direction, size, length in zip(vectors, directions, sizes, lengths, strict=True):
            vector.tensor.add_(direction.tensor, alpha=-lr * trust_ratio(size, length, largest))

    def _update_plainly(self, group: Group, members: list[Member]) -> None:
        count_step(members)
        self._adam(group, members, [member.weight for member in members], float(group["lr"]), members[0].decay)

    def _adam(self, group: Group, members: list[Member], weights: list[Tensor], lr: float, decay: float = 0.0) -> None:
        gradients, states = [member.gradient for member in members], [member.state for member in members]
        update_adam(torch._fused_adamw_, weights, gradients, states, group["betas"], group["eps"], lr, decay)

    def _update_together(self, group: Group, members: list[Member]) -> None:
        count_step(members)
        weights = [local_part(member.weight) for member in members]
        directions = _directions(group, members)
        torch._foreach_add_(directions, weights, alpha=members[0].decay)
        if members[0].adapts:
            whole = members[0].weight
            ratios = trust_ratios(norms(weights, whole), norms(directions, whole), group["largest_ratio"])
            torch._foreach_mul_(directions, list(ratios.to(directions[0].dtype).unbind()))
        torch._foreach_add_(weights, directions, alpha=-float(group["lr"]))


def _directions(group: Group, members: list[Member]) -> list[Tensor]:
    """r of many layers, in new memory."""
    beta1, beta2 = group["betas"]
    _, gradients, first, second = ([*map(local_part, role)] for role in roles(members, "exp_avg", "exp_avg_sq"))
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
    steps = [float(member.state["step"]) for member in members]
    deviations = torch._foreach_div(second, [1 - beta2**step for step in steps])
    torch._foreach_sqrt_(deviations)
    torch._foreach_add_(deviations, group["eps"])
    directions = torch._foreach_div(first, [1 - beta1**step for step in steps])
    torch._foreach_div_(directions, deviations)
    return list(directions)


def count_step(members: list[Member]) -> None:
    """One more; adding a number to a tensor without dimensions takes three times as long."""
    for member in members:
        member.state["step"].fill_(member.state["step"].item() + 1)
