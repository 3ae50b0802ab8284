"""Norms of whole parameters, wherever their elements are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_SUM = 1 << 18  # elements: a float32 sum of so many squares is right to about 1e-6, of ten million to 1e-4
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
