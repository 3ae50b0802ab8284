"""What one process holds of a model that is split: its flat weights, the sum over all workers, and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.flat import FlatLayout, Fold, Piece, Stretch, sum_of_squares
from scalewise.engine.grid import RangeNorms, chunk_ranges
from scalewise.engine.layerwise import LAYER_WISE
from scalewise.engine.reductions.alone import Alone
from scalewise.engine.strategies.means import clip_coefficient, scaling
from scalewise.engine.strategies.protocol import HeldBytes
from scalewise.engine.tree import fold_plan
from scalewise.engine.update import FlatOptimizer, owned_stretches
from scalewise.recipe import Recipe


class Holding:
    """Parameters and averaged buffers of this process, of which it sees every worker's gradient."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        whole: FlatLayout | None = None,
    ) -> None:
        """Move the tensors into one flat vector.

        Arguments:
            recipe: how they are trained.
            parameters: what is trained.
            averages: buffers that are averaged over workers.
            whole: the layout of the whole model, where some of its parameters are here; norms are taken on its grid.
        """
        self._recipe, self._count = recipe, len(parameters)
        self._averages = [*averages.values()] if recipe.workers > 1 else []  # one worker's are the model's own
        self._layout = FlatLayout(parameters, averages if recipe.workers > 1 else {}, 1)
        self._weights = self._layout.new()
        self._layout.adopt(self._weights)
        leaves = [(worker, worker + 1) for worker in range(recipe.workers)]
        self._fold = Fold(self._layout, fold_plan(leaves, recipe.workers))
        self._reduction = Alone(self._layout, self._fold)
        stretches = owned_stretches(recipe, self._layout, self._weights, self._reduction.owned)
        self.optimizer = FlatOptimizer(recipe, self._layout, stretches, self._reduction.complete)
        if whole is not None:
            self._parts = [self._part(name, whole) for name in parameters]
            self._norms = RangeNorms(whole, chunk_ranges(whole), self._parts, dist.all_reduce)
            if recipe.optimizer in LAYER_WISE:
                self.optimizer = FlatOptimizer(recipe, whole, self._parts, dist.all_reduce)

    def _part(self, name: str, whole: FlatLayout) -> Stretch:
        """A parameter held here, by its place in the whole model."""
        start, own, size = whole.starts[name], self._layout.starts[name], self._layout.tensors[name].numel()
        weights = self._weights[own : own + size].detach().requires_grad_()
        return Stretch(start, weights, [Piece(name, 0, size, start)], shift=start - own)

    def put(self, worker: int, gradients: Sequence[Tensor]) -> None:
        """Take one worker's gradients, and what it has made of the averages."""
        self._fold.put(worker, [*gradients, *self._averages])

    def finish(self, factor: float) -> None:
        """Make the sums means."""
        self._reduction.finish(scaling(self._recipe, self._layout, factor))

    def gradients(self) -> list[Tensor]:
        """The mean gradient of each parameter."""
        return self._layout.views(self._reduction.sum)[: self._count]

    def clipped(self, square: Tensor) -> Tensor:
        """Clip the mean gradient, whose squared norm is `square`."""
        if self._recipe.clip_norm is not None:
            gradient = self._reduction.sum[: self._layout.parameters_stop]
            gradient.mul_(clip_coefficient(self._recipe.clip_norm, square).to(gradient.dtype))
        return square

    def squared_norm(self) -> Tensor:
        """Of the whole model's mean gradient, from the chunks of its grid."""
        (norms,) = self._norms([[part.place(self._reduction.sum) for part in self._parts]])
        return sum_of_squares(norms)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Change the weights and the averaged buffers."""
        self.optimizer.step(self._reduction.sum, lr)
        if self._averages:
            torch._foreach_copy_(self._averages, self._layout.views(self._reduction.sum)[self._count :])

    def held(self) -> HeldBytes:
        """The weights, their sums over workers, and their state."""
        gradients = sum(buffer.nbytes for buffer in self._fold.buffers)
        return HeldBytes(self._weights.nbytes, gradients, self.optimizer.bytes())
