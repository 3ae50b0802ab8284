"""Random changes of training images, for a whole batch at once, each drawn from its sample's own key.

    sw.Task(…, augment=sw.augment.images(sw.augment.flip, sw.augment.crop(4), sw.augment.cutout(8)))

A key is a function of (seed, epoch, sample), so a sample is changed alike in whichever process and batch it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Change = Callable[[Tensor, Tensor], Tensor]  # (images, keys) -> images; images: (sample, channel, row, column)


def images(*changes: Change) -> Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]:
    """A task's `augment`: change the first part of each batch, the images, in turn, each with its own draws."""

    def augment(batch: tuple[Tensor, ...], keys: Tensor) -> tuple[Tensor, ...]:
        first, *others = batch
        for number, change in enumerate(changes):
            first = change(first, _mixed(keys, number))
        return first, *others

    return augment


def flip(images: Tensor, keys: Tensor) -> Tensor:
    """Mirror half of the images, left to right."""
    mirrored = draw(keys, 0, 2).bool().to(images.device)
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)


def crop(padding: int) -> Change:
    """Shift images by up to `padding` pixels in both directions; what comes in is zero."""

    def change(images: Tensor, keys: Tensor) -> Tensor:
        padded = F.pad(images, [padding] * 4)
        windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)  # (sample, channel, top, left, …)
        top, left = (draw(keys, number, 2 * padding + 1).to(images.device) for number in range(2))
        return windows[torch.arange(len(images), device=images.device), :, top, left]

    return change


def cutout(size: int) -> Change:
    """Blacken a square of `size` pixels around a random place, cut off at the edges (DeVries and Taylor 2017)."""

    def change(images: Tensor, keys: Tensor) -> Tensor:
        _, _, height, width = images.shape
        inside = []
        for number, length in enumerate((height, width)):
            first = draw(keys, number, length).to(images.device).view(-1, 1) - size // 2
            places = torch.arange(length, device=images.device)
            inside.append((places >= first) & (places < first + size))  # (sample, place)
        return images.masked_fill((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), 0)

    return change


def draw(keys: Tensor, number: int, bound: int) -> Tensor:
    """A whole number from 0 to `bound` − 1 for every key; another `number` gives independent ones.

    >>> draw(torch.arange(6), 0, 10).tolist()
    [8, 5, 6, 5, 3, 0]
    """
    upper = _mixed(keys, number + 1000).numpy().view(np.uint64) >> np.uint64(32)
    return torch.from_numpy(((upper * np.uint64(bound)) >> np.uint64(32)).astype(np.int64))


def _mixed(keys: Tensor, number: int) -> Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(mix(mix(keys.cpu().numpy().view(np.uint64)) + np.uint64(number)).view(np.int64))


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit changes about half of the output bits.

    >>> mix(np.arange(2, dtype=np.uint64)).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


class Pixels(nn.Module):
    """Bytes 0 … 255 to numbers 0 … 1: data sets stay small in memory and on the way to a device."""

    def forward(self, images: Tensor) -> Tensor:
        """Images of any shape."""
        return images.float().div_(255)
