"""The optimizer on the flat weights: a few long vectors instead of many tensors.

Element-wise updates do not depend on where a vector is cut (tests/test_optim.py), so one update of a long stretch gives
the bytes of one update per parameter, with as many kernels as one parameter needs. Its state is known by parameter
name all the same, so that a checkpoint can be read on any number of processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from scalewise.engine.flat import FlatLayout, Piece
from scalewise.optim import OPTIMIZERS
from scalewise.recipe import Recipe

Reader = Callable[[str, int, int], Tensor]  # (name, start, stop) -> those elements, one-dimensional
PREFIX = "optimizer"


@dataclass(frozen=True)
class StateEntry:
    """A part of the training state: elements [start, start + len) of the tensor `name`, which has `shape`."""

    name: str
    tensor: Tensor
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Stretch:
    """A stretch of the flat weights that this process updates, and the parameters in it."""

    start: int
    weights: Tensor
    pieces: list[Piece]


class FlatOptimizer:
    """A torch optimizer for the stretches of the flat weights that this process owns."""

    def __init__(self, recipe: Recipe, layout: FlatLayout, weights: Tensor, owned: list[tuple[int, int]]) -> None:
        self._layout = layout
        self._stretches = [
            _Stretch(start, weights[start:stop].detach().requires_grad_(), layout.pieces([(start, stop)]))
            for start, stop in layout.parameter_stretches(owned)
        ]
        leaves = [stretch.weights for stretch in self._stretches]
        self._optimizer = OPTIMIZERS[recipe.optimizer](leaves, recipe) if leaves else None
        self._step = inspect.unwrap(type(self._optimizer).step) if self._optimizer else None

    def step(self, gradient: Tensor, lr: float) -> None:
        """Update the owned weights by the flat mean gradient; without the optimizer's profiling and hooks."""
        if self._optimizer is None or self._step is None:
            return
        for stretch in self._stretches:
            stretch.weights.grad = gradient[stretch.start : stretch.start + len(stretch.weights)]
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            self._step(self._optimizer)

    def state(self) -> list[StateEntry]:
        """What is held here, by `optimizer.<kind>.<parameter>`."""
        entries = []
        for stretch in self._stretches:
            for kind, value in self._state(stretch).items():
                entries += [self._entry(stretch, piece, kind, value) for piece in _stored(stretch, value)]
        return entries

    def load(self, names: Iterable[str], read: Reader) -> None:
        """Take over a stored state."""
        stored: dict[str, set[str]] = {}
        for name in names:
            if name.startswith(f"{PREFIX}."):
                _, kind, parameter = name.split(".", 2)
                stored.setdefault(parameter, set()).add(kind)
        restored = [
            {kind: self._restored(stretch, kind, read) for kind in sorted(stored.get(stretch.pieces[0].name, ()))}
            for stretch in self._stretches
        ]
        for stretch, state in zip(self._stretches, restored, strict=True):
            self._state(stretch).update(state)

    def _state(self, stretch: _Stretch) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: dict[str, Tensor] = self._optimizer.state[stretch.weights]
        return state

    def _entry(self, stretch: _Stretch, piece: Piece, kind: str, value: Tensor) -> StateEntry:
        name = f"{PREFIX}.{kind}.{piece.name}"
        if not value.ndim:
            return StateEntry(name, value.reshape(1), 0, ())
        first = piece.flat_start - stretch.start
        shape = tuple(self._layout.tensors[piece.name].shape)
        return StateEntry(name, value[first : first + piece.stop - piece.start], piece.start, shape)

    def _restored(self, stretch: _Stretch, kind: str, read: Reader) -> Tensor:
        if kind == "step":
            return read(f"{PREFIX}.{kind}.{stretch.pieces[0].name}", 0, 1).reshape(())
        value = torch.zeros_like(stretch.weights)
        for piece in stretch.pieces:
            first = piece.flat_start - stretch.start
            value[first : first + piece.stop - piece.start] = read(
                f"{PREFIX}.{kind}.{piece.name}", piece.start, piece.stop
            )
        return value.detach()


def _stored(stretch: _Stretch, value: object) -> list[Piece]:
    """The pieces under whose names a part of the state is stored: numbers only with a parameter's first piece."""
    if not isinstance(value, Tensor):
        return []
    return stretch.pieces if value.ndim else [piece for piece in stretch.pieces if piece.start == 0]
