"""Norms of whole parameters, wherever their elements are."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST_SUM = 1 << 18  # elements: a float32 sum of so many squares is right to about 1e-6, of ten million to 1e-4
HALF = (torch.bfloat16, torch.float16)


def flat(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a tensor that fills its memory without gaps, in whatever order of dimensions."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def norm(vector: Tensor) -> float:
    """The 2-norm of a float32 or float64 vector on the CPU."""
    if vector.numel() <= LONGEST_SUM:
        return math.sqrt(torch.dot(vector, vector).item())
    return math.sqrt(sum(torch.dot(part, part).item() for part in vector.split(LONGEST_SUM)))


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
