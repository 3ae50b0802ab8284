"""Fewer bytes on the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Sends floating-point numbers in a narrower type, if one is given; a script may make its own compressor."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What to send, and what `decompress` must know."""
        narrow = self.dtype is not None and tensor.is_floating_point()
        return tensor.to(self.dtype) if narrow else tensor, tensor.dtype

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:  # noqa: ANN401
        """What was compressed."""
        return tensor.to(context)


class Compression:
    """Ways to compress gradients, as `DistributedOptimizer(compression=…)` takes them."""

    none = Compressor()
    fp16 = Compressor(torch.float16)
    bf16 = Compressor(torch.bfloat16)
