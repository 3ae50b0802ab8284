"""The layer-wise rules by themselves: how far a layer moves, from the norms of its weights and of its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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


def update_adam(
    kernel: Callable[..., None],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    betas: tuple[float, float],
    eps: float,
    lr: float,
    decay: float = 0.0,
) -> None:
    """Adam's step for many layers, moments included, by a kernel of torch: `adam`, `adamw` or `_fused_adamw_`.

    The last two: w ← (1 − lr·decay)·w − lr·r.
    """
    kernel(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def new_moments(weight: Tensor) -> dict[str, Tensor]:
    """Adam's state before its first step."""
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def refuse_half(optimizer: str, weight: Tensor) -> None:
    """Refuse float16 where squared gradients are kept: those below 6e-8 are 0 in it, and Adam's ε is too."""
    if weight.dtype == torch.float16:
        raise RecipeError(
            f"{optimizer} needs weights in float32, bfloat16 or float64, got float16, in which squared gradients "
            f"vanish; keep the weights in float32 and compute under torch.autocast"
        )


LONGEST_SUM = 1 << 18  # elements: a float32 sum of this many squares is right to about 1e-6, of ten million to 1e-4
Array = np.ndarray[tuple[int], np.dtype[np.floating[Any]]]
HALF = (torch.bfloat16, torch.float16)


class Vector:
    """A tensor's memory in one dimension; the tensor must fill it without gaps, in whatever order of dimensions.

    Views are kept from step to step: for a tensor of some thousand elements making them takes longer than using them.
    """

    __slots__ = ("address", "array", "dtype", "stride", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.address, self.stride, self.dtype = tensor.data_ptr(), tensor.stride(), tensor.dtype
        self.tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
        self.array: Array = self.tensor.numpy()

    def fits(self, tensor: Tensor, gradient: Tensor) -> bool:
        """Whether the tensor is where it was, and its gradient lies as it does."""
        return (
            tensor.data_ptr() == self.address
            and tensor.numel() == len(self.array)
            and gradient.stride() == self.stride
            and gradient.dtype == self.dtype
        )


def norm(array: Array) -> float:
    """The 2-norm of a vector; numpy's dot took half of the time of torch.dot, a third of that of vector_norm."""
    if array.size <= LONGEST_SUM:
        return math.sqrt(array.dot(array))
    parts = [array[start : start + LONGEST_SUM] for start in range(0, array.size, LONGEST_SUM)]
    return math.sqrt(sum(float(part.dot(part)) for part in parts))


def memory(tensor: Tensor) -> Array:
    """A tensor's memory in one dimension."""
    return tensor.numpy().ravel() if tensor.is_contiguous() else Vector(tensor).array


def norms(parts: list[Tensor], whole: Tensor) -> Tensor:
    """The 2-norms of tensors, (tensor,), of which this process holds `parts` as it holds `whole`'s, on their device."""
    wide = torch.float32 if parts[0].dtype in HALF else parts[0].dtype
    found = torch.stack(torch._foreach_norm(parts, 2, dtype=wide))
    groups = _sharing(whole)
    if not groups:
        return found
    squares = found.double().square()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().to(wide)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor (FSDP2's parameters are such), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def kind(tensor: Tensor) -> tuple[object, ...]:
    """Tensors of the same kind can go through one call, and their norms through one exchange."""
    return (tensor.device, tensor.dtype, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))


def _sharing(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The process groups over which a DTensor is split; its copies on other processes do not count."""
    placements = getattr(tensor, "placements", ())
    mesh = getattr(tensor, "device_mesh", None)
    return [mesh.get_group(number) for number, place in enumerate(placements) if mesh and place.is_shard()]
