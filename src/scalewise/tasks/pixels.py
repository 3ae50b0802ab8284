"""Images as bytes, until the model needs numbers."""

from __future__ import annotations

from torch import Tensor, nn


class Pixels(nn.Module):
    """Bytes 0 … 255 to numbers 0 … 1: data sets stay small in memory and on the way to a device."""

    def forward(self, images: Tensor) -> Tensor:
        """Images of any shape."""
        return images.float().div_(255)
