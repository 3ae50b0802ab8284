"""What fsdp, pipeline and tensor parallelism share: each process holds a part of the model.

`LocalStrategy` holds that part with the sum over workers and its optimizer. The whole model, which evaluation and
checkpoints need, is empty in between (`SplitStrategy.whole`).

Layers alone do not show whether a model can be split: its `forward` or the task's step may do more with them than call
one after another. So a dry run of one micro batch compares the split model with the whole one before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalewise.engine.data import streams
from scalewise.engine.data.feed import Feed
from scalewise.engine.parallel import Setup, Strategy
from scalewise.engine.parallel.data import FlatStrategy
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import WEIGHT, StepNumbers, WorkerNumbers, precision, step_numbers
from scalewise.engine.processes.team import Team
from scalewise.engine.sums.flat import (
    FlatLayout,
    Piece,
    Stretch,
    mean_factor,
    scaling,
    sum_of_squares,
)
from scalewise.engine.sums.grid import RangeNorms, chunk_ranges
from scalewise.engine.update.layerwise import LAYER_WISE
from scalewise.engine.update.optimizer import FlatOptimizer
from scalewise.errors import ScalewiseError, TaskError
from scalewise.tasks.task import Batch


class SplitStrategy(Strategy):
    """A strategy whose processes each hold a part of the model, and none of them a worker's whole gradient."""

    _held: Mapping[str, Tensor]  # this process's parts of the trained parameters

    def __init__(self, setup: Setup, workers: range) -> None:
        super().__init__(setup, workers)
        self._whole_tensors = [*setup.model.module.parameters(), *setup.model.module.buffers()]
        self._strides = [tensor.stride() for tensor in self._whole_tensors]
        self._uses = 0

    def _empty_model(self) -> None:
        """Free the whole model's weights. They become NaN, so that no use of them goes unnoticed."""
        for tensor in self._whole_tensors:
            nothing = float("nan") if tensor.is_floating_point() else 0
            tensor.data = tensor.new_full((), nothing).expand(tensor.shape)  # one number that is everywhere

    @contextmanager
    def whole(self) -> Iterator[PlacedModel]:
        """The model with the weights of all processes."""
        self._uses += 1
        try:
            if self._uses == 1:
                self._fill_model()
            yield self.model
        finally:
            self._uses -= 1
            if not self._uses:
                self._empty_model()

    @torch.no_grad()
    def _fill_model(self) -> None:
        for tensor, stride in zip(self._whole_tensors, self._strides, strict=True):
            tensor.data = tensor.new_empty_strided(tensor.shape, stride)
        places = self.model.tensors()
        for name, tensor in self._tensors():
            places.pop(name).copy_(tensor)
        assert not places, f"no process has {', '.join(places)}"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer of the whole model, one after another; all processes ask together."""
        raise NotImplementedError

    def non_finite(self) -> str | None:
        """The name of a parameter that is not finite, the same on every process."""
        mine = next((name for name, tensor in self._held.items() if not tensor.isfinite().all()), None)
        return next((name for name in self._team.gather_objects(mine) if name is not None), None)


class LocalStrategy(SplitStrategy, FlatStrategy):
    """A split strategy whose processes see every worker's gradient of the parameters that they hold."""

    def _hold_part(
        self, parameters: Mapping[str, Tensor], averages: Mapping[str, Tensor], whole: FlatLayout | None = None
    ) -> None:
        """Move the tensors of this process into one flat vector.

        Where some of the whole model's parameters are here, norms are taken on the grid of its layout, `whole`.
        """
        self._held = parameters
        self._hold(parameters, averages, Team(0, 1, self._team.device))
        if whole is not None:
            self._parts = [self._part(name, whole) for name in parameters]
            self._norms = RangeNorms(whole, chunk_ranges(whole), self._parts, dist.all_reduce)
            if self._setup.recipe.optimizer in LAYER_WISE:
                self._optimizer = FlatOptimizer(self._setup.recipe, whole, self._parts, dist.all_reduce)

    def _part(self, name: str, whole: FlatLayout) -> Stretch:
        """A parameter held here, by its place in the whole model."""
        start, own, size = whole.starts[name], self._layout.starts[name], self._layout.tensors[name].numel()
        weights = self._weights[own : own + size].detach().requires_grad_()
        return Stretch(start, weights, [Piece(name, 0, size, start)], shift=start - own)

    def _reduced(self, step: int, measures: bool, table: Tensor, names: list[str]) -> StepNumbers:
        """Make the sums means; `table` has every worker's numbers."""
        recipe = self._setup.recipe
        weights = None if self._setup.task.weight_is_samples else table[:, WEIGHT]
        factor = mean_factor(recipe.worker_batch, self._setup.cuts.samples(step), weights)
        self._reduction.finish(scaling(recipe.workers, self._layout, factor))
        return step_numbers(self, self._setup.recipe.clip_norm, measures, table, names)

    def squared_norm(self) -> Tensor:
        """Of the whole model's mean gradient, from the chunks of its grid."""
        (norms,) = self._norms([[part.place(self._reduction.sum) for part in self._parts]])
        return sum_of_squares(norms)


CLOSE = 0.05  # far above what another order of sums does, also in bf16, and far below what another model does
TINY = 1e-300


def first_micro_batch(setup: Setup) -> Batch:
    """The first micro batch, from a feed of its own."""
    return Feed(setup.task, setup.recipe, setup.samples, setup.cuts, setup.team.device, range(1), 0).batch(0, 0, 0)


def dry_run(setup: Setup, module: nn.Module, batch: Batch) -> list[Tensor]:
    """What the task's step makes of a micro batch, with layers in evaluation mode.

    Every output of the model on the way and, at last, the loss (its sum over samples).
    """
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
    return [*outputs, torch.tensor(float(WorkerNumbers.of(loss).loss))]


def check_split(setup: Setup, whole: list[Tensor], parts: nn.Module, batch: Batch, needed: str) -> None:
    """Refuse a split model that does not compute what the whole one did; `needed` says what is required."""
    try:
        found = dry_run(setup, parts, batch)
    except ScalewiseError:
        raise
    except Exception as error:  # whatever happens in a forward that was not written for parts
        raise TaskError(f"{needed}; split, it fails with {first_line(error)}: use --parallel data") from error
    distance = _distance(whole, found)
    if distance > CLOSE:
        raise TaskError(f"{needed}; split, it computes something else (off by {distance:.0%}): use --parallel data")


def _distance(whole: list[Tensor], found: list[Tensor]) -> float:
    """The largest relative distance of outputs and losses, as vectors; values that are not finite count as 0."""
    if [tensor.shape for tensor in whole] != [tensor.shape for tensor in found]:
        return 1.0
    pairs = zip(*([tensor.double().nan_to_num() for tensor in one] for one in (whole, found)), strict=True)
    return max(float((first - second).norm() / first.norm().clamp(min=TINY)) for first, second in pairs)


def first_line(error: Exception) -> str:
    """What an error is, to be quoted within a sentence.

    >>> first_line(RuntimeError("no such size!\\nSee the manual."))
    'RuntimeError: no such size'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.!')}" if lines else type(error).__name__
