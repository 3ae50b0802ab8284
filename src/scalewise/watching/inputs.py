"""Fingerprints of samples: the same sample has the same number on every process and in every pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ELEMENTS = 32  # of a sample that its fingerprint is made of: enough to tell images and texts apart
TENSORS = 3  # of a batch: inputs, masks, labels
LARGEST = 2**32

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(arguments: object) -> list[Tensor]:
    """The tensors that hold samples: those as long as the first one."""
    found = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]
    return [tensor for tensor in found if len(tensor) == len(found[0])][:TENSORS]


@torch.no_grad()
def fingerprints(tensors: list[Tensor]) -> Tensor:
    """One number below 2³² a sample, from some elements of every tensor.

    >>> a, b, c = fingerprints([torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])]).tolist()
    >>> a == b, a == c
    (False, True)
    """
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        places, factors = _places(tuple(tensor.shape[1:]), number, tensor.device)
        where: tuple[slice | Tensor, ...] = (slice(None), *places)
        bits = _bits(tensor.detach()[where].reshape(len(tensor), -1))
        total += (bits * factors).sum(dim=1)  # wraps around
    return ((total >> 32) ^ total) & (LARGEST - 1)


def _bits(values: Tensor) -> Tensor:
    """The values' bytes as whole numbers."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if values.is_floating_point():
        values = values.contiguous().view(_WHOLE[values.element_size()])
    return values.to(torch.int64)


@lru_cache(maxsize=64)
def _places(shape: tuple[int, ...], number: int, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Which elements of a sample are looked at, and odd factors that mix them; no random state is touched."""
    generator = torch.Generator().manual_seed(number)
    elements = int(torch.Size(shape).numel())
    chosen = torch.arange(elements)
    if elements > ELEMENTS:
        chosen = torch.randperm(elements, generator=generator)[:ELEMENTS].sort().values
    factors = torch.randint(2**62, (max(len(chosen), 1),), generator=generator) * 2 + 1
    places = torch.unravel_index(chosen, shape) if shape else ()
    return tuple(place.to(device) for place in places), factors.to(device)
