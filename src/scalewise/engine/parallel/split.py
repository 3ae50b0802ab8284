"""What one process holds of a model that is split: its flat weights, the sum over all workers, and its optimizer.

A model in parts, tried on one micro batch before training: it must do what the whole one does.

Whether a model can be split cannot be seen from its layers alone: what its `forward` or the task's step does with them,
beside calling one after another, decides. So both are tried, with the same random numbers, and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalewise.engine.data import streams
from scalewise.engine.data.feed import Feed
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.protocol import HeldBytes, Setup, clip_coefficient, scaling
from scalewise.engine.parallel.workers import numbers_of, precision
from scalewise.engine.processes.team import Team
from scalewise.engine.sums.flat import FlatLayout, Fold, Piece, Stretch, sum_of_squares
from scalewise.engine.sums.grid import RangeNorms, chunk_ranges
from scalewise.engine.sums.reductions.protocol import Alone
from scalewise.engine.sums.tree import fold_plan
from scalewise.engine.update.layerwise import LAYER_WISE
from scalewise.engine.update.optimizer import FlatOptimizer, owned_stretches
from scalewise.errors import ScalewiseError, TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch


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


CLOSE = 0.05  # far above what another order of sums does, also in bf16, and far below what another model does
TINY = 1e-300


@dataclass(frozen=True)
class Tried:
    """The loss of a micro batch (its sum over samples), and every output of the model on the way."""

    loss: float
    outputs: list[Tensor]


def example(setup: Setup) -> Batch:
    """The first micro batch, from a feed of its own."""
    return Feed(setup.task, setup.recipe, setup.samples, setup.cuts, setup.team.device, range(1), 0).batch(0, 0, 0)


def tried(setup: Setup, module: nn.Module, batch: Batch) -> Tried:
    """What the task's step makes of a micro batch, with layers as they are in evaluation."""
    outputs: list[Tensor] = []
    trains = module.training

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        outputs.extend([output.detach()] if isinstance(output, Tensor) else [])

    module.eval()
    handle = module.register_forward_hook(keep)
    try:
        with precision(setup.recipe, setup.team.device), streams.undisturbed():
            streams.seed_everything(streams.key("trial", setup.recipe.seed), setup.team.device)
            loss = setup.task.evaluate(module, batch, setup.recipe.label_smoothing)
    finally:
        handle.remove()
        module.train(trains)
    return Tried(float(numbers_of(loss)[1][0]), outputs)


def check_parts(setup: Setup, whole: Tried, parts: nn.Module, batch: Batch, needed: str) -> None:
    """Refuse parts that do not do what the whole did; `needed` says what would."""
    try:
        found = tried(setup, parts, batch)
    except ScalewiseError:
        raise
    except Exception as error:  # whatever happens in a forward that was not written for parts
        raise TaskError(f"{needed}; split, it fails with {first_line(error)}: use --parallel data") from error
    distance = _distance(whole, found)
    if distance > CLOSE:
        raise TaskError(f"{needed}; split, it computes something else (off by {distance:.0%}): use --parallel data")


def _distance(whole: Tried, found: Tried) -> float:
    """The largest relative distance of outputs and losses, as vectors; what is not finite in both says nothing."""
    pairs = [*zip(whole.outputs, found.outputs, strict=False), (torch.tensor(whole.loss), torch.tensor(found.loss))]
    if len(whole.outputs) != len(found.outputs) or any(first.shape != second.shape for first, second in pairs):
        return 1.0
    wide = [(first.double().nan_to_num(), second.double().nan_to_num()) for first, second in pairs]
    return max(float((first - second).norm() / first.norm().clamp(min=TINY)) for first, second in wide)


def first_line(error: Exception) -> str:
    """What an error is, to be quoted within a sentence.

    >>> first_line(RuntimeError("no such size!\\nSee the manual."))
    'RuntimeError: no such size'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.!')}" if lines else type(error).__name__
