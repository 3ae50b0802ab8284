"""Fingerprints of samples: the same sample has the same number on every process and in every pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from scalewise.watch.gradients import is_sharded, square_of

# A fingerprint is made of eight runs of four elements, spread over the sample: enough to tell images and texts apart.
# Samples are mostly not in the cache, where one element costs as much as its neighbours together.
RUNS = 8
RUN = 4
SAMPLES = 64  # of a micro batch that are looked at
TENSORS = 3  # of a batch: inputs, masks, labels
LARGEST = 2**32

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(arguments: tuple[object, ...], named: dict[str, object]) -> list[Tensor]:
    """The tensors that hold samples: those as long as the first one."""
    found = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor) and value.ndim]
    if not found:  # somewhere deeper
        found = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor) and leaf.ndim]
    return [tensor for tensor in found if len(tensor) == len(found[0])][:TENSORS]


def some_elements(tensors: list[Tensor], samples: int) -> list[Tensor]:
    """Copies of a few elements of the first samples of every tensor: one operation each, as little as a step can do."""
    return [_elements(tensor.detach(), samples) for tensor in tensors]


def _elements(tensor: Tensor, samples: int) -> Tensor:
    if len(tensor) > samples:
        tensor = tensor[:samples]
    flat, places = _places(tensor.shape[1:], tensor.device)
    if tensor.is_contiguous():
        return tensor.view(len(tensor), -1).index_select(1, flat)
    where: tuple[slice | Tensor, ...] = (slice(None), *places)
    return tensor[where].reshape(len(tensor), -1)


@torch.no_grad()
def fingerprints(batches: list[list[Tensor]]) -> list[Tensor]:
    """One number below 2³² a sample, from `some_elements` of several micro batches; alike ones are done together.

    >>> a, b, c = fingerprints([[torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])]])[0].tolist()
    >>> a == b, a == c
    (False, True)
    """
    kinds = {tuple((part.shape[1], part.dtype, part.device) for part in batch) for batch in batches}
    if len(kinds) > 1:
        return [found for batch in batches for found in fingerprints([batch])]
    together = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    return [*_mixed(together).split([len(batch[0]) for batch in batches])] if batches else []


def _mixed(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        bits = _bits(tensor)
        total += (bits * _factors(bits.shape[1], number, tensor.device)).sum(dim=1)  # wraps around
    return ((total >> 32) ^ total) & (LARGEST - 1)


def _bits(values: Tensor) -> Tensor:
    """The values' bytes as whole numbers."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if values.is_floating_point():
        values = values.contiguous().view(_WHOLE[values.element_size()])
    return values.to(torch.int64)


@lru_cache(maxsize=64)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Which elements of a sample are looked at: as places in the whole sample, and per dimension."""
    elements = shape.numel()
    chosen = torch.arange(elements)
    if elements > RUNS * RUN:
        generator = torch.Generator().manual_seed(0)  # no random state is touched
        starts = ((torch.arange(RUNS) + torch.rand(RUNS, generator=generator)) / RUNS * (elements - RUN)).long()
        chosen = (starts[:, None] + torch.arange(RUN)).flatten()
    places = torch.unravel_index(chosen, shape) if shape else ()
    return chosen.to(device), tuple(place.to(device) for place in places)


@lru_cache(maxsize=64)
def _factors(count: int, number: int, device: torch.device) -> Tensor:
    """Odd factors that mix elements, others for every tensor of a batch."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randint(2**62, (count,), generator=generator) * 2 + 1).to(device)


PLACES = 256


class WeightSample:
    """Up to 256 weights spread over all parameters, and the norm of all."""

    def __init__(self, model: nn.Module) -> None:
        numbers = (parameter for parameter in model.parameters() if parameter.is_floating_point())
        self._whole = [parameter for parameter in numbers if not is_sharded(parameter) and parameter.numel()]
        per_tensor = max(1, PLACES // max(1, len(self._whole)))
        stride = max(1, len(self._whole) // PLACES)
        self._places = [
            (parameter, index)
            for parameter in self._whole[::stride]
            for index in _spread(parameter, min(per_tensor, parameter.numel()))
        ]

    @property
    def possible(self) -> bool:
        """Whether there is a parameter that every process holds whole."""
        return bool(self._places)

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor]:
        """The weights looked at, and the norm of all."""
        device = self._whole[0].device
        values = torch.stack([parameter.detach()[index].float().to(device) for parameter, index in self._places])
        return values, square_of(self._whole).sqrt()


def _spread(parameter: Tensor, count: int) -> list[tuple[int, ...]]:
    """Places spread evenly over a parameter, as indices that do not depend on how it lies in memory."""
    flat = torch.linspace(0, parameter.numel() - 1, count, dtype=torch.float64).round().long()
    if not parameter.ndim:
        return [()]
    columns = torch.unravel_index(flat, parameter.shape)
    return [tuple(row) for row in torch.stack(columns, 1).tolist()]
