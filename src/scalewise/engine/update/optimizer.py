"""The optimizer on the flat weights: a few long vectors instead of many tensors.

Element-wise updates (SGD, Adam) do not depend on where a vector is cut (tests/test_optim.py), so one update of a long
stretch gives the bytes of one update per parameter, with as many kernels as one parameter needs. They call torch's own
kernels in their plain variant; the optimizer classes around those import torch's compiler, a second of every start.
LARS and LAMB need norms of whole parameters besides (layerwise.py), Muon and SOAP whole matrices. The state is
stored by parameter name all the same, so that a checkpoint can be read on any number of processes.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from scalewise.engine.sums.flat import FlatLayout, Piece, Stretch, in_memory_order
from scalewise.engine.sums.grid import Complete
from scalewise.engine.update.layerwise import LAYER_WISE, LayerWiseRule
from scalewise.optim import OPTIMIZERS
from scalewise.optim.rules import matrix_groups, new_moments, update_adam
from scalewise.optim.schedule_free import direction, mean, move, share_of_newest
from scalewise.optim.soap import SIDES
from scalewise.recipe import OptimizerName, Recipe

Reader = Callable[[str, int, int], Tensor]  # (name, start, stop) -> those elements, one-dimensional
PREFIX = "optimizer"
NUMBERS = ("step", "largest_lr", "weight_sum")  # kinds of state that are one number


@dataclass(frozen=True)
class StateEntry:
    """A part of the training state: elements [start, start + len) of the tensor `name`, which has `shape`."""

    name: str
    tensor: Tensor
    start: int
    shape: tuple[int, ...]


class ElementWiseRule(ABC):
    """An optimizer that treats every weight alike, so that it does not matter where a stretch is cut."""

    def __init__(self, recipe: Recipe, stretches: list[Stretch], matrices: Mapping[str, int]) -> None:
        self._recipe, self._stretches, self._matrices = recipe, stretches, matrices
        self._weights = [stretch.weights for stretch in stretches]
        self.state: dict[Tensor, dict[str, Tensor]] = {weights: {} for weights in self._weights}

    def step(self, gradient: Tensor, lr: float) -> None:
        """Update the stretches by the flat mean gradient."""
        if self._stretches:
            self._update([stretch.place(gradient) for stretch in self._stretches], lr)

    @abstractmethod
    def _update(self, gradients: list[Tensor], lr: float) -> None: ...


class SgdRule(ElementWiseRule):
    """SGD, with momentum or Nesterov's."""

    def _update(self, gradients: list[Tensor], lr: float) -> None:
        buffers = [self.state[weights].get("momentum_buffer") for weights in self._weights]
        sgd(
            self._weights,
            gradients,
            buffers,
            weight_decay=self._recipe.weight_decay,
            momentum=self._recipe.momentum if self._recipe.optimizer != "sgd" else 0.0,
            lr=lr,
            dampening=0.0,
            nesterov=self._recipe.optimizer == "nesterov",
            maximize=False,
        )
        for weights, buffer in zip(self._weights, buffers, strict=True):
            if buffer is not None:
                self.state[weights]["momentum_buffer"] = buffer


class AdamRule(ElementWiseRule):
    """Adam, or AdamW with its decoupled weight decay."""

    def _update(self, gradients: list[Tensor], lr: float) -> None:
        for weights in self._weights:
            if not self.state[weights]:
                self.state[weights].update(new_moments(weights))
        recipe, states = self._recipe, [self.state[weights] for weights in self._weights]
        kernel = adamw if recipe.optimizer == "adamw" else adam
        betas = recipe.beta1, recipe.beta2
        update_adam(kernel, self._weights, gradients, states, betas, recipe.epsilon, lr, recipe.weight_decay)


class ScheduleFreeRule(ElementWiseRule):
    """As `scalewise.optim.ScheduleFree`: the weights are y; x, the model to evaluate, is found when it is needed."""

    def _update(self, gradients: list[Tensor], lr: float) -> None:
        recipe = self._recipe
        for stretch, weights, gradient in zip(self._stretches, self._weights, gradients, strict=True):
            state = self._begun(weights)
            share, *numbers = share_of_newest(lr, float(state["largest_lr"]), float(state["weight_sum"]))
            for kind, number in zip(NUMBERS, (float(state["step"]) + 1, *numbers), strict=True):
                state[kind].fill_(number)
            along = direction(gradient, state["exp_avg_sq"], int(state["step"]), recipe.beta2, recipe.epsilon)
            for name, place in stretch.places() if recipe.weight_decay else ():
                if name in self._matrices:
                    along[place].add_(weights[place], alpha=recipe.weight_decay)
            move(weights, state["z"], along, lr, recipe.beta1, share)

    def _begun(self, weights: Tensor) -> dict[str, Tensor]:
        state = self.state[weights]
        if not state:
            state.update({kind: torch.zeros((), dtype=torch.float64) for kind in NUMBERS})
            state["z"], state["exp_avg_sq"] = weights.detach().clone(), torch.zeros_like(weights)
        return state

    def mean(self, weights: Tensor) -> Tensor:
        """x, where the weights are y."""
        state = self.state[weights]
        return mean(weights, state["z"], self._recipe.beta1) if state else weights


ELEMENT_WISE: dict[OptimizerName, type[ElementWiseRule]] = {
    "sgd": SgdRule,
    "momentum": SgdRule,
    "nesterov": SgdRule,
    "adam": AdamRule,
    "adamw": AdamRule,
    "schedule-free": ScheduleFreeRule,
}


class TorchRule:
    """An optimizer of whole tensors, which are the stretches; without its profiling and hooks."""

    def __init__(self, recipe: Recipe, stretches: list[Stretch], matrices: Mapping[str, int]) -> None:
        self._stretches = stretches
        groups = matrix_groups(((stretch.pieces[0].name, stretch.weights) for stretch in stretches), matrices)
        self._optimizer = OPTIMIZERS[recipe.optimizer](groups, recipe) if stretches else None
        self.state: dict[Tensor, dict[str, Tensor]] = self._optimizer.state if self._optimizer else {}

    def step(self, gradient: Tensor, lr: float) -> None:
        """Hand it the gradient and the rate."""
        if self._optimizer is None:
            return
        for stretch in self._stretches:
            stretch.weights.grad = stretch.place(gradient)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        inspect.unwrap(type(self._optimizer).step)(self._optimizer)


class FlatOptimizer:
    """The recipe's optimizer for the stretches of the weights that this process owns.

    `matrices` are the parameters that Muon and SOAP take, and that Schedule-Free decays; how many each of them stacks.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: FlatLayout,
        stretches: list[Stretch],
        complete: Complete,
        matrices: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._layout, self._stretches = layout, stretches
        self._rule: ElementWiseRule | LayerWiseRule | TorchRule
        if recipe.optimizer in ELEMENT_WISE:
            self._rule = ELEMENT_WISE[recipe.optimizer](recipe, stretches, matrices)
        elif recipe.optimizer in LAYER_WISE:
            self._rule = LAYER_WISE[recipe.optimizer](recipe, layout, stretches, complete)
        else:
            self._rule = TorchRule(recipe, stretches, matrices)
        self.step = self._rule.step  # updates the owned weights by the flat mean gradient; without autograd

    @contextmanager
    @torch.no_grad()
    def evaluated(self) -> Iterator[bool]:
        """The context in which the owned weights are those to evaluate; yields whether training has others."""
        if not isinstance(self._rule, ScheduleFreeRule):
            yield False
            return
        kept = [stretch.weights.clone() for stretch in self._stretches]
        try:
            for stretch in self._stretches:
                stretch.weights.copy_(self._rule.mean(stretch.weights))
            yield True
        finally:
            for stretch, weights in zip(self._stretches, kept, strict=True):
                stretch.weights.copy_(weights)

    def state(self) -> list[StateEntry]:
        """What is held here, by `optimizer.<kind>.<parameter>`."""
        entries = []
        for stretch in self._stretches:
            for kind, value in self._state(stretch).items():
                entries += [self._entry(stretch, piece, kind, value) for piece in _stored(stretch, value)]
        return entries

    def bytes(self) -> int:
        """How much the state of the owned weights takes."""
        values = [value for stretch in self._stretches for value in self._state(stretch).values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim)

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

    def _state(self, stretch: Stretch) -> dict[str, Tensor]:
        return self._rule.state[stretch.weights]

    def _entry(self, stretch: Stretch, piece: Piece, kind: str, value: Tensor) -> StateEntry:
        name = f"{PREFIX}.{kind}.{piece.name}"
        if not value.ndim:
            return StateEntry(name, value.reshape(1), 0, ())
        if kind.removesuffix("_basis") in SIDES:
            return StateEntry(name, value.reshape(-1), 0, tuple(value.shape))
        first = piece.flat_start - stretch.start
        shape = tuple(self._layout.tensors[piece.name].shape)
        stored = in_memory_order(value)[first : first + piece.stop - piece.start]
        return StateEntry(name, stored, piece.start, shape)

    def _restored(self, stretch: Stretch, kind: str, read: Reader) -> Tensor:
        if kind in NUMBERS:
            return read(f"{PREFIX}.{kind}.{stretch.pieces[0].name}", 0, 1).reshape(())
        if (side := SIDES.get(kind.removesuffix("_basis"))) is not None:
            size = stretch.weights.flatten(1).size(side)
            square = read(f"{PREFIX}.{kind}.{stretch.pieces[0].name}", 0, size * size)
            return square.view(size, size).to(stretch.weights.device, copy=True)  # to where torch aligns it
        value = torch.zeros_like(stretch.weights)
        flat = in_memory_order(value)
        for piece in stretch.pieces:
            first = piece.flat_start - stretch.start
            flat[first : first + piece.stop - piece.start] = read(
                f"{PREFIX}.{kind}.{piece.name}", piece.start, piece.stop
            )
        return value.detach()


def owned_stretches(recipe: Recipe, layout: FlatLayout, weights: Tensor, owned: list[tuple[int, int]]) -> list[Stretch]:
    """Ranges of the flat weights as the recipe's optimizer needs them: as long as possible, or whole parameters."""
    ranges = layout.parameter_stretches(owned)
    if recipe.optimizer in ELEMENT_WISE or recipe.optimizer in LAYER_WISE:
        return [
            Stretch(start, weights[start:stop].detach().requires_grad_(), layout.pieces([(start, stop)]))
            for start, stop in ranges
        ]
    views = dict(zip(layout.tensors, layout.views(weights), strict=True))
    pieces = layout.pieces(ranges)
    assert all(piece.stop - piece.start == views[piece.name].numel() for piece in pieces)
    return [Stretch(piece.flat_start, views[piece.name].detach().requires_grad_(), [piece]) for piece in pieces]


def _stored(stretch: Stretch, value: object) -> list[Piece]:
    """The pieces under whose names a part of the state is stored: numbers only with a parameter's first piece."""
    if not isinstance(value, Tensor):
        return []
    return stretch.pieces if value.ndim else [piece for piece in stretch.pieces if piece.start == 0]
