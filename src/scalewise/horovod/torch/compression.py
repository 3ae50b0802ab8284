"""Fewer bytes on the wire."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """What is done to a tensor before it is sent and after it is received."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """What to send, and what `decompress` must know."""
        ...

    def decompress(self, tensor: Tensor, context: object) -> Tensor:
        """What was compressed."""
        ...


class Uncompressed:
    """Send tensors as they are."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """The tensor itself."""
        return tensor, None

    def decompress(self, tensor: Tensor, context: object) -> Tensor:
        """The tensor itself."""
        return tensor


class Narrowed:
    """Send floating-point numbers in a narrower type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """The tensor in the narrower type, and its own type."""
        return (tensor.to(self.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: Tensor, context: object) -> Tensor:
        """The tensor in its own type."""
        assert isinstance(context, torch.dtype)
        return tensor.to(context)


class Compression:
    """Ways to compress gradients, as `DistributedOptimizer(compression=…)` takes them."""

    none = Uncompressed()
    fp16 = Narrowed(torch.float16)
    bf16 = Narrowed(torch.bfloat16)
