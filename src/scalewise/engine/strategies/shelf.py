"""The whole model where a strategy has taken it apart: its structure always, its weights only while they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.model import PlacedModel
from scalewise.engine.team import Team

Pairs = Iterable[tuple[str, Tensor]]


class Shelf:
    """A placed model whose weights take no memory, except within `filled`; else they are NaN, lest any be used."""

    def __init__(self, model: PlacedModel) -> None:
        self._model = model
        self._tensors = [*model.module.parameters(), *model.module.buffers()]
        self._strides = [tensor.stride() for tensor in self._tensors]
        self._uses = 0
        self._empty()

    def _empty(self) -> None:
        for tensor in self._tensors:
            nothing = float("nan") if tensor.is_floating_point() else 0
            tensor.data = tensor.new_full((), nothing).expand(tensor.shape)  # one number that is everywhere

    def _make_room(self) -> None:
        for tensor, stride in zip(self._tensors, self._strides, strict=True):
            tensor.data = tensor.new_empty_strided(tensor.shape, stride)

    @contextmanager
    def filled(self, parts: Pairs) -> Iterator[PlacedModel]:
        """The model with these weights, which are asked for one after another unless they are there already."""
        self._uses += 1
        try:
            if self._uses == 1:
                self._make_room()
                self._fill(parts)
            yield self._model
        finally:
            self._uses -= 1
            if not self._uses:
                self._empty()

    @torch.no_grad()
    def _fill(self, parts: Pairs) -> None:
        places = self._model.tensors()
        for name, tensor in parts:
            places.pop(name).copy_(tensor)
        assert not places, f"nobody has {', '.join(places)}"


def broken_anywhere(parts: Pairs, team: Team) -> str | None:
    """The name of the first tensor on any process that is not finite; all processes ask together."""
    mine = next((name for name, tensor in parts if not tensor.isfinite().all()), None)
    names: list[str | None] = [None] * team.size
    dist.all_gather_object(names, mine)
    return next((name for name in names if name is not None), None)
