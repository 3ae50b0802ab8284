"""Where samples and random numbers come from: functions of the seed and of positions, never of processes."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalewise.tasks.augment import mix


def key(*parts: int | str) -> int:
    """A 63-bit seed that is different for every tuple of parts.

    >>> key("dropout", 0, 1, 2) == key("dropout", 0, 1, 2) != key("dropout", 0, 2, 1)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the generators that a model or a data set may draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


RandomState = tuple[Tensor, Any, Any]


def random_state() -> RandomState:
    """The state of the CPU's generators: torch's, Python's and numpy's."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def set_random_state(state: RandomState) -> None:
    """Restore the state of the generators."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put the generators back afterwards, so that loading data does not change what a model draws."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


class SampleStream:
    """The epochs' permutations, one after another; any stretch of it can be taken.

    >>> stream = SampleStream(samples=4, seed=0)
    >>> indices, epochs = stream.take(2, 6)
    >>> epochs.tolist()
    [0, 0, 1, 1]
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self._permutation = functools.lru_cache(maxsize=2)(self._permuted)

    def take(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Sample numbers and epoch numbers of stream positions [start, stop)."""
        parts = []
        while start < stop:
            epoch, place = divmod(start, self.samples)
            count = min(stop - start, self.samples - place)
            parts.append((self._permutation(epoch)[place : place + count], torch.full((count,), epoch)))
            start += count
        if len(parts) == 1:
            return parts[0]
        indices, epochs = zip(*parts, strict=True)
        return torch.cat(indices), torch.cat(epochs)

    def _permuted(self, epoch: int) -> Tensor:
        generator = np.random.Generator(np.random.PCG64(key("order", self.seed, epoch)))
        return torch.from_numpy(generator.permutation(self.samples))


def sample_keys(seed: int, epochs: Tensor, indices: Tensor) -> Tensor:
    """One 64-bit key per sample from (seed, epoch, sample), the same in whichever process it is computed."""
    with np.errstate(over="ignore"):
        mixed = mix(np.uint64(key("augment", seed)) + epochs.numpy().astype(np.uint64))
        mixed = mix(mixed + indices.numpy().astype(np.uint64))
    return torch.from_numpy(mixed.view(np.int64))
