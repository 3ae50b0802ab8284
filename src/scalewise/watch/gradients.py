"""Numbers about gradients: their norm over a model's parameters, and what the loss does to the model's output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOST_LABELS = 1000
# A softmax's cross-entropy has output gradients (probabilities − label) that add up to 0 in every sample, to rounding;
# in bfloat16 that is a percent.
BALANCED = 0.02


def norm(tensor: Tensor) -> Tensor:
    """‖tensor‖, at least in float32, and as wide a number as the device has."""
    result = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return result.to(wide(result))


def wide(tensor: Tensor) -> torch.dtype:
    """The type to add many numbers in."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64


def one_number(value: object) -> Tensor | None:
    """A real number as a tensor without dimensions, not read yet; None of anything else.

    >>> one_number(0.5), one_number(torch.ones(3))
    (tensor(0.5000, dtype=torch.float64), None)
    """
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 and not value.is_complex() else None
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, Real) else None


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return isinstance(tensor, DTensor) and any(not place.is_replicate() for place in tensor.placements)


@torch.no_grad()
def square_of(gradients: Iterable[Tensor], processes: int, sharded: bool) -> Tensor:
    """‖gradient‖²; of a sharded model this process's part, such that the parts of all processes add up to it.

    A shard that n of P processes hold counts 1 ÷ n on each of them; with s shards that is s ÷ P.
    """
    locals_, shares = [], []
    for gradient in gradients:
        locals_.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        shares.append(_shards(gradient) / processes if sharded else 1.0)
    if not locals_:
        return torch.zeros(())
    norms = torch.stack([norm(local).to(locals_[0].device) for local in locals_])
    if sharded:
        norms = norms * torch.tensor(shares, dtype=norms.dtype, device=norms.device).sqrt()
    return norms @ norms


def _shards(tensor: Tensor) -> int:
    """How many different parts of a tensor there are."""
    count = 1
    if isinstance(tensor, DTensor):
        for size, place in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            count *= 1 if place.is_replicate() else size
    return count


@dataclass(frozen=True)
class OutputGradient:
    """What a loss did to one output: see `WatchedStep.averaging`; labels counted where it is a cross-entropy."""

    positions: Tensor
    size: Tensor
    labels: Tensor | None


@torch.no_grad()
def output_gradient(gradient: Tensor) -> OutputGradient:
    """Positions with a gradient, the sum of its absolute values, and how many samples have each label.

    The last dimension holds the outputs of one position (a sample, or a token); positions that a mask leaves out have
    no gradient. In a cross-entropy's gradient only the label's entry is negative.

    >>> found = output_gradient(torch.tensor([[-0.5, 0.5], [0.25, -0.25], [0.0, 0.0]]))
    >>> found.positions.item(), found.size.item(), found.labels.tolist()
    (2, 1.5, [1, 1])
    """
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    rows = local.unsqueeze(-1) if local.ndim == 1 else local
    sizes = torch.linalg.vector_norm(rows, 1, dim=-1)
    return OutputGradient(sizes.count_nonzero(), sizes.sum(dtype=wide(sizes)), _labels(rows, sizes))


def _labels(rows: Tensor, sizes: Tensor) -> Tensor | None:
    if rows.ndim != 2 or not 2 <= rows.shape[1] <= MOST_LABELS:
        return None
    is_label = (rows.sum(-1).abs() <= BALANCED * sizes) & (sizes > 0) & ((rows < 0).sum(-1) == 1)
    return torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device).index_add_(
        0, rows.argmin(-1), is_label.to(torch.int64)
    )
