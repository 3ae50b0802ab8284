"""LARS and LAMB on the flat weights, with the same bytes however these are spread over processes.

The norm of a parameter is summed, in order, from the norms of its pieces: what of it lies in each chunk of the flat
vector's grid. Every process takes the norms of the pieces that it owns; where they are spread, one small exchange
completes them (grid.py). All other kernels are element-wise and do not depend on where a vector is cut: torch's fused
Adam is called on whole chunks only, because it has other code, with other rounding, for the odd end of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from scalewise.engine.sums.flat import CHUNK, FlatLayout, Stretch, wide
from scalewise.engine.sums.grid import Complete, Range, RangeNorms
from scalewise.optim.rules import local_rate, new_moments, trust_ratio, update_adam
from scalewise.recipe import OptimizerName, Recipe

BLOCK = 32 * CHUNK  # elements whose direction is computed at once: they stay in the cache


def _pieces(layout: FlatLayout, name: str) -> list[Range]:
    """A parameter's place in the flat vector, cut where chunks end."""
    start = layout.starts[name]
    stop = start + layout.tensors[name].numel()
    first_end = start // CHUNK * CHUNK + CHUNK
    return [*pairwise([start, *range(first_end, stop, CHUNK), stop])] if start < stop else []


class LayerWiseRule(ABC):
    """An optimizer whose step length is chosen per parameter."""

    def __init__(self, recipe: Recipe, layout: FlatLayout, stretches: list[Stretch], complete: Complete) -> None:
        self._recipe, self._stretches = recipe, stretches
        matrices = [name for name in layout.starts if layout.tensors[name].ndim >= 2 or recipe.adapt_vectors]
        self._adapted = [name for name in matrices if layout.starts[name] < layout.parameters_stop]
        pieces = [(owner, piece) for owner, name in enumerate(self._adapted) for piece in _pieces(layout, name)]
        self._owners = torch.tensor([owner for owner, _ in pieces], dtype=torch.long, device=layout.device)
        self._piece_norms = RangeNorms(layout, [piece for _, piece in pieces], stretches, complete)
        self._weights = [stretch.weights.detach() for stretch in stretches]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            stretch.weights: self._new_state(vector) for stretch, vector in zip(stretches, self._weights, strict=True)
        }

    def _norms(self, *vectors: list[Tensor]) -> Iterator[dict[str, float]]:
        """For each list of vectors, one per stretch: the norms of the parameters in them, by name."""
        for norms in self._piece_norms(vectors):
            squares = wide(norms).square()
            sums = squares.new_zeros(len(self._adapted)).index_add_(0, self._owners, squares)
            yield dict(zip(self._adapted, sums.sqrt().tolist(), strict=True))

    @abstractmethod
    def _new_state(self, weights: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def step(self, gradient: Tensor, lr: float) -> None:
        """Update the stretches' weights by the flat mean gradient; all processes call it together."""


class LarsRule(LayerWiseRule):
    """As `scalewise.optim.LARS`."""

    def _new_state(self, weights: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(weights)}

    def step(self, gradient: Tensor, lr: float) -> None:
        """v ← μ·v + rate·(g + β·w); w ← w − lr·v."""
        gradients = [stretch.place(gradient) for stretch in self._stretches]
        trust, decay = self._recipe.trust_coefficient, self._recipe.weight_decay
        sizes, slopes = self._norms(self._weights, gradients)
        rates = {name: local_rate(sizes[name], slopes[name], trust, decay) for name in sizes}
        for stretch, weights, mine in zip(self._stretches, self._weights, gradients, strict=True):
            buffer = self.state[stretch.weights]["momentum_buffer"].mul_(self._recipe.momentum)
            for name, place in stretch.places():
                rate = rates.get(name, 1.0)
                buffer[place].add_(mine[place], alpha=rate)
                if decay and name in rates:
                    buffer[place].add_(weights[place], alpha=rate * decay)
            weights.add_(buffer, alpha=-lr)


class LambRule(LayerWiseRule):
    """As `scalewise.optim.LAMB`."""

    def __init__(self, recipe: Recipe, layout: FlatLayout, stretches: list[Stretch], complete: Complete) -> None:
        super().__init__(recipe, layout, stretches, complete)
        self._directions = [torch.zeros_like(weights) for weights in self._weights]

    def _new_state(self, weights: Tensor) -> dict[str, Tensor]:
        return new_moments(weights) | {"step": torch.zeros((), dtype=torch.float32, device=weights.device)}

    def step(self, gradient: Tensor, lr: float) -> None:
        """u = r + λ·w; w ← w − lr·ratio·u."""
        for stretch, weights, direction in zip(self._stretches, self._weights, self._directions, strict=True):
            self._find_direction(self.state[stretch.weights], stretch.place(gradient), direction)
            for name, place in stretch.places():
                if self._recipe.weight_decay and name in self._adapted:
                    direction[place].add_(weights[place], alpha=self._recipe.weight_decay)
        sizes, lengths = self._norms(self._weights, self._directions)
        for stretch, weights, direction in zip(self._stretches, self._weights, self._directions, strict=True):
            for name, place in stretch.places():
                ratio = trust_ratio(sizes[name], lengths[name]) if name in sizes else 1.0
                weights[place].add_(direction[place], alpha=-lr * ratio)

    def _find_direction(self, state: Mapping[str, Tensor], gradient: Tensor, direction: Tensor) -> None:
        """r, block by block: Adam with lr = −1 on "weights" that are 0."""
        betas, epsilon = (self._recipe.beta1, self._recipe.beta2), self._recipe.epsilon
        state["step"].add_(1)
        direction.zero_()
        for start in range(0, len(direction), BLOCK):
            places = [vector[start : start + BLOCK] for vector in (direction, state["exp_avg"], state["exp_avg_sq"])]
            vectors = [*places, gradient[start : start + BLOCK]]
            if missing := -len(vectors[0]) % CHUNK:  # copies with zeros at the end
                vectors = [nn.functional.pad(vector, (0, missing)) for vector in vectors]
            found, *moments, slope = vectors
            part = {"step": state["step"], "exp_avg": moments[0], "exp_avg_sq": moments[1]}
            update_adam(torch._fused_adamw_, [found], [slope], [part], betas, epsilon, lr=-1.0)
            if found is not places[0]:
                for place, padded in zip(places, (found, *moments), strict=True):
                    place.copy_(padded[: len(place)])


LAYER_WISE: dict[OptimizerName, type[LayerWiseRule]] = {"lars": LarsRule, "lamb": LambRule}
