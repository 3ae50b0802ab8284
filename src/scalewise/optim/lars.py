"""LARS: momentum with a rate per layer (You et al. 2017, https://arxiv.org/abs/1708.03888)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.layerwise import Group, LayerWise, Member, Tensors, roles
from scalewise.optim.native import Layers
from scalewise.optim.rules import local_part, local_rate, local_rates, memory, norm, norms


class LARS(LayerWise):
    """Momentum in which every layer moves in proportion to its weights.

        rate = η·‖w‖ ÷ (‖g‖ + β·‖w‖)        (1 where ‖w‖ or ‖g‖ is 0)
        v ← μ·v + rate·(g + β·w)
        w ← w − lr·v

    with lr outside of the buffer, as in torch.optim.SGD: a change of the LR acts at once.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = LARS(layer.parameters(), lr=0.5, weight_decay=1e-4)

    Arguments:
        parameters: as for any torch optimizer, groups included.
        momentum: μ.
        weight_decay: β; it joins the gradient.
        trust_coefficient: η, the share of its own norm by which a layer moves at lr = 1.
        adapt_vectors: adapt and decay biases and norm weights (fewer than two dimensions) too. By default they get
            plain momentum without decay, as is usual.
        adapt: False in a group gives it plain momentum, with decay.
    """

    def __init__(
        self,
        parameters: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        adapt_vectors: bool = False,
        adapt: bool = True,
    ) -> None:
        if not 0 <= momentum < 1:
            raise RecipeError(f"momentum must be at least 0 and below 1, got {momentum}; 0.9 is usual")
        if not trust_coefficient > 0:
            raise RecipeError(f"trust_coefficient must be above 0, got {trust_coefficient}; 0.001 is usual")
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(parameters, options | {"adapt_vectors": adapt_vectors, "adapt": adapt})

    def _new_state(self, weight: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(weight)}

    def _update_natively(self, library: ctypes.CDLL, group: Group, members: list[Member], layers: Layers) -> None:
        rule = float(group["lr"]), group["momentum"], group["trust_coefficient"]
        layers.call(library.lars, roles(members, "momentum_buffer"), [], *rule)

    def _update_batch(self, group: Group, members: list[Member]) -> None:
        """Each layer in one pass of torch's fused SGD, whose 1 − dampening is a factor of the gradient: the rate."""
        lr, momentum, trust = float(group["lr"]), group["momentum"], group["trust_coefficient"]
        sizes = [norm(member.vector.array) for member in members if member.vector]
        lengths = [norm(memory(member.gradient)) for member in members]
        for member, size, length in zip(members, sizes, lengths, strict=True):
            rate, buffer = local_rate(size, length, trust, member.decay), member.state["momentum_buffer"]
            fused_sgd([member.weight], [member.gradient], [buffer], lr, momentum, member.decay, rate)

    def _update_plainly(self, group: Group, members: list[Member]) -> None:
        weights, gradients, buffers = roles(members, "momentum_buffer")
        fused_sgd(weights, gradients, buffers, float(group["lr"]), group["momentum"], members[0].decay)

    def _update_together(self, group: Group, members: list[Member]) -> None:
        decay, momentum = members[0].decay, group["momentum"]
        weights, gradients, buffers = ([*map(local_part, role)] for role in roles(members, "momentum_buffer"))
        updates = torch._foreach_add(gradients, weights, alpha=decay)
        if members[0].adapts:
            whole = members[0].weight
            rates = local_rates(norms(weights, whole), norms(gradients, whole), group["trust_coefficient"], decay)
            rates = rates.to(updates[0].dtype)
            torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, updates)
        torch._foreach_add_(weights, buffers, alpha=-float(group["lr"]))


def fused_sgd(
    weights: Tensors, gradients: Tensors, buffers: Tensors, lr: float, momentum: float, decay: float, rate: float = 1.0
) -> None:
    """v ← μ·v + rate·(g + decay·w); w ← w − lr·v for many layers, in torch's fused kernel."""
    if not momentum:  # the kernel then takes neither buffers nor a rate
        updates = torch._foreach_add(gradients, weights, alpha=decay)
        torch._foreach_mul_(updates, rate)
        torch._foreach_copy_(buffers, updates)
        torch._foreach_add_(weights, updates, alpha=-lr)
        return
    torch._fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=decay,
        momentum=momentum,
        lr=lr,
        dampening=1.0 - rate,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
