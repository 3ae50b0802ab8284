"""The layer-wise rules by themselves: how far a layer moves, from the norms of its weights and of its update."""

from __future__ import annotations

import torch
from torch import Tensor

from scalewise.errors import RecipeError


def trust_ratio(weight_norm: float, update_norm: float, largest: float | None = None) -> float:
    """‖w‖ ÷ ‖update‖, or 1 where either is 0 (LAMB, You et al. 2020); never above `largest`.

    >>> trust_ratio(6.0, 2.0), trust_ratio(0.0, 2.0), trust_ratio(6.0, 2.0, largest=2.5)
    (3.0, 1.0, 2.5)
    """
    ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
    return ratio if largest is None else min(ratio, largest)


def trust_ratios(weight_norms: Tensor, update_norms: Tensor, largest: float | None = None) -> Tensor:
    """`trust_ratio` of many layers at once, without waiting for their device."""
    known = (weight_norms != 0) & (update_norms != 0)
    ratios = torch.where(known, weight_norms / update_norms, 1.0)
    return ratios if largest is None else ratios.clamp(max=largest)


def local_rate(weight_norm: float, gradient_norm: float, trust: float, decay: float) -> float:
    """η‖w‖ ÷ (‖g‖ + β‖w‖), or 1 where either norm is 0 (LARS, You et al. 2017), with trust η and weight decay β.

    >>> local_rate(2.0, 3.0, trust=0.01, decay=0.5)
    0.005
    """
    if not weight_norm or not gradient_norm:
        return 1.0
    return trust * weight_norm / (gradient_norm + decay * weight_norm)


def local_rates(weight_norms: Tensor, gradient_norms: Tensor, trust: float, decay: float) -> Tensor:
    """`local_rate` of many layers at once, without waiting for their device."""
    known = (weight_norms != 0) & (gradient_norms != 0)
    return torch.where(known, trust * weight_norms / (gradient_norms + decay * weight_norms), 1.0)


def refuse_half(optimizer: str, weight: Tensor) -> None:
    """Refuse float16 where squared gradients are kept: those below 6e-8 are 0 in it, and Adam's ε is too."""
    if weight.dtype == torch.float16:
        raise RecipeError(
            f"{optimizer} needs weights in float32, bfloat16 or float64, got float16, in which squared gradients "
            f"vanish; keep the weights in float32 and compute under torch.autocast"
        )
