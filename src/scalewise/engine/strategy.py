"""How one step is computed over processes: the seam behind which kinds of parallelism are interchangeable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scalewise.engine import reductions
from scalewise.engine.feed import Feed
from scalewise.engine.flat import Bucket, FlatLayout, Piece, in_memory_order
from scalewise.engine.model import PlacedModel
from scalewise.engine.placement import Placement, loader_processes
from scalewise.engine.reductions.protocol import Scale
from scalewise.engine.samples import Samples
from scalewise.engine.team import Gathered, Team
from scalewise.engine.tree import share
from scalewise.engine.workers import Workers
from scalewise.optim import OPTIMIZERS
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task


@dataclass(frozen=True)
class StateEntry:
    """A part of the training state: elements [start, start + len) of the tensor `name`, which has `shape`."""

    name: str
    tensor: Tensor
    start: int
    shape: tuple[int, ...]


Reader = Callable[[str, int, int], Tensor]  # (name, start, stop) -> those elements, one-dimensional


@dataclass(frozen=True)
class StepNumbers:
    """A step's numbers on their way: read them a step late, so that nothing waits."""

    rows: Gathered  # (worker, number); the last number is the signal that the worker's process was sent, or 0
    squared_norm: Tensor | None


class Strategy(Protocol):
    """Place the model, compute and reduce the workers' gradients, update, and give the state by name."""

    model: PlacedModel

    @property
    def metric_names(self) -> list[str]:
        """The metrics in each worker's numbers, in order; known after the first step."""

    @property
    def waited_seconds(self) -> float:
        """How long this process has waited for its samples so far."""

    def samples_of(self, step: int, worker: int) -> tuple[list[int], list[int]]:
        """The training samples of one worker in one step, and their epochs."""

    def gradients(self, step: int, signal: int) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean; tell all processes of a signal sent here."""

    def update(self, lr: float) -> None:
        """Change the weights."""

    def state(self) -> list[StateEntry]:
        """What this process holds of the optimizer's state."""

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Take over a stored optimizer state."""

    def close(self) -> None:
        """End what runs beside the training."""


class DataParallel:
    """Every process holds the model and runs some of the workers."""

    def __init__(self, task: Task, recipe: Recipe, placement: Placement, team: Team, samples: Samples) -> None:
        self.model = PlacedModel(task, recipe, team)
        shares = [share(process, team.size, recipe.workers) for process in range(team.size)]
        self._counts = [last - first for first, last in shares]
        self._mine = range(*shares[team.rank])
        loaders = loader_processes(placement, team.here)
        self.feed = Feed(task, recipe, samples, team.device, self._mine, loaders)
        self.workers = Workers(task, recipe, self.model, self.feed, team.device)
        self._recipe, self._team = recipe, team
        self._groups = recipe.workers * recipe.micro_batches
        self._measures = placement.noise and self._groups > 1
        self._weight_is_samples = task.weight_is_samples

        self._layout = FlatLayout(self.model.parameters, self.model.averages, team.size)
        self._fold, self._reduction = reductions.build(placement, self._layout, team, recipe.workers)
        self._overlap = _Overlap(self._layout, self._reduction.buckets, self._reduction.launch)
        if len(self._reduction.buckets) > 1:
            self.workers.listen()
        self._sums = self._layout.views(self._reduction.sum)
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        parameters = self.model.parameters
        if self._reduction.spreads:
            pieces = self._layout.pieces(self._reduction.owned)
            self._pieces = [piece for piece in pieces if piece.name in parameters]
            self._updated = [_leaf(parameters[piece.name], piece) for piece in self._pieces]
            self._state_flat = self._layout.new()
            self._state_views = self._layout.views(self._state_flat)
        else:
            self._pieces = [
                Piece(name, 0, parameter.numel(), self._layout.starts[name]) for name, parameter in parameters.items()
            ]
            self._updated = [*parameters.values()]
        build = OPTIMIZERS[self._recipe.optimizer]
        self.optimizer = build(self._updated, self._recipe) if self._updated else None

    @property
    def metric_names(self) -> list[str]:
        """The metrics in each worker's numbers, in order; known after the first step."""
        return self.workers.metric_names

    @property
    def waited_seconds(self) -> float:
        """How long this process has waited for its samples so far."""
        return self.feed.waited_seconds

    def samples_of(self, step: int, worker: int) -> tuple[list[int], list[int]]:
        """The training samples of one worker in one step, and their epochs."""
        start = self.feed.position(step, worker)
        indices, epochs = self.feed.stream.take(start, start + self._recipe.worker_batch)
        return indices.tolist(), epochs.tolist()

    def close(self) -> None:
        """End the loader processes."""
        self.feed.close()

    def gradients(self, step: int, signal: int) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean; tell all processes of a signal sent here."""
        rows: list[Tensor] = []
        weights: list[Gathered] = []

        def gather_weights(last_weight: Tensor) -> None:
            known = torch.stack([*(row[1] for row in rows), last_weight])
            weights.append(self._team.gather_rows(known.unsqueeze(1), self._counts))

        self.model.remember_buffers()
        for leaf, worker in enumerate(self._mine):
            if leaf:
                self.model.restore_buffers()
            last = leaf == len(self._mine) - 1
            ready = self._when_ready(leaf) if last and len(self._reduction.buckets) > 1 else None
            forwarded = gather_weights if last and not self._weight_is_samples else None
            gradients, numbers = self.workers.gradient(step, worker, self._measures, ready, forwarded)
            rows.append(numbers)
            if ready is None:
                self._fold.put(leaf, [*gradients, *self.model.averages.values()])
        self.model.check_fixed_buffers()
        if len(self._reduction.buckets) == 1:
            self._reduction.launch(self._reduction.buckets[0])
        signals = rows[0].new_full((len(rows), 1), signal)
        gathered = self._team.gather_rows(torch.cat([torch.stack(rows), signals], 1), self._counts)
        self._reduction.finish(self._mean(weights))
        measured = self._measures or self._recipe.clip_norm is not None
        return StepNumbers(gathered, self._clipped() if measured else None)

    def _when_ready(self, leaf: int) -> Callable[[int, Tensor], None]:
        """Fold the last worker's gradients while its backward pass goes on, and send full buckets."""
        self._overlap.start()
        first_average = len(self.model.parameters)

        def ready(number: int, gradient: Tensor) -> None:
            if self._overlap.untouched:  # the averages were complete after forward
                for offset, buffer in enumerate(self.model.averages.values()):
                    self._fold.put_one(leaf, first_average + offset, buffer)
                    self._overlap.done(first_average + offset)
            self._fold.put_one(leaf, number, gradient)
            self._overlap.done(number)

        return ready

    def _mean(self, weights: list[Gathered]) -> Scale:
        """Gradients divided by the total weight of the global batch, averages by the number of workers."""
        recipe = self._recipe
        total = float(sum(weights[0].wait().flatten().tolist())) if weights else float(recipe.global_batch)
        factor = recipe.worker_batch / total if total else 1.0

        def scale(stretch: Tensor, start: int) -> None:
            cut = min(max(self._layout.parameters_stop - start, 0), len(stretch))
            if factor != 1.0:
                stretch[:cut].mul_(factor)
            if recipe.workers > 1:
                stretch[cut:].div_(recipe.workers)

        return scale

    def _clipped(self) -> Tensor:
        """The squared norm of the mean gradient before clipping; then it is clipped."""
        square = self._reduction.squared_norm()
        if self._recipe.clip_norm is not None:
            # as torch.nn.utils.clip_grad_norm_ has it
            coefficient = (self._recipe.clip_norm / (square.sqrt() + 1e-6)).clamp(max=1.0).to(self._layout.dtype)
            for start, stop in self._reduction.owned:
                self._reduction.sum[start : min(stop, self._layout.parameters_stop)].mul_(coefficient)
        return square

    def update(self, lr: float) -> None:
        """Change the weights and the averaged buffers."""
        if self._reduction.spreads:
            self._update_and_publish(lr)
            return
        for parameter, gradient in zip(self._updated, self._sums, strict=False):
            parameter.grad = gradient
        self._optimize(lr)
        averages = [*self.model.averages.values()]
        if averages:
            torch._foreach_copy_(averages, self._sums[len(self._updated) :])

    def _optimize(self, lr: float) -> None:
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    @torch.no_grad()
    def _update_and_publish(self, lr: float) -> None:
        total = self._reduction.sum
        for updated, piece in zip(self._updated, self._pieces, strict=True):
            updated.grad = total[piece.flat_start : piece.flat_start + len(updated)]
        self._optimize(lr)
        for start, stop in self._reduction.owned:
            self._state_flat[start:stop] = total[start:stop]  # the averaged buffers; parameters follow
        for updated, piece in zip(self._updated, self._pieces, strict=True):
            self._state_flat[piece.flat_start : piece.flat_start + len(updated)] = updated
        self._reduction.publish(self._state_flat)
        torch._foreach_copy_([*self._layout.tensors.values()], self._state_views)

    def state(self) -> list[StateEntry]:
        """Optimizer state by `optimizer.<kind>.<parameter>`: what this process has, and need not share."""
        if self.optimizer is None or not (self._reduction.spreads or self._team.leads):
            return []
        entries = []
        for tensor, piece in zip(self._updated, self._pieces, strict=True):
            shape = tuple(self.model.parameters[piece.name].shape)
            for kind, value in self.optimizer.state[tensor].items():
                name = f"optimizer.{kind}.{piece.name}"
                if isinstance(value, Tensor) and value.shape == tensor.shape:
                    entries.append(StateEntry(name, in_memory_order(value), piece.start, shape))
                elif isinstance(value, Tensor) and piece.start == 0:
                    entries.append(StateEntry(name, value.flatten(), 0, tuple(value.shape)))
        return entries

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Fill the optimizer's state for what this process updates."""
        stored: dict[str, list[str]] = {}
        for name in names:
            if name.startswith("optimizer."):
                _, kind, parameter = name.split(".", 2)
                stored.setdefault(parameter, []).append(kind)
        states = [
            {
                kind: self._restored(f"optimizer.{kind}.{piece.name}", tensor, piece, kind, read)
                for kind in stored.get(piece.name, [])
            }
            for tensor, piece in zip(self._updated, self._pieces, strict=True)
        ]
        for tensor, state in zip(self._updated, states, strict=True):
            assert self.optimizer is not None
            self.optimizer.state[tensor].update(state)

    def _restored(self, name: str, tensor: Tensor, piece: Piece, kind: str, read: Reader) -> Tensor:
        if kind == "step":
            return read(name, 0, 1).reshape(())
        value = torch.empty_like(tensor)
        in_memory_order(value).copy_(read(name, piece.start, piece.stop))
        return value


def _leaf(parameter: Tensor, piece: Piece) -> Tensor:
    """A piece of a parameter as a tensor of its own that shares its memory."""
    return in_memory_order(parameter.detach())[piece.start : piece.stop].requires_grad_()


class _Overlap:
    """Launches buckets, in one order on every process, as soon as all that lies in them is there."""

    def __init__(self, layout: FlatLayout, buckets: list[Bucket], launch: Callable[[Bucket], None]) -> None:
        self._buckets, self._launch = buckets, launch
        spans = [(start, start + layout.tensors[name].numel()) for name, start in layout.starts.items()]
        self._buckets_of = [
            [number for number, bucket in enumerate(buckets) if start < bucket.stop and bucket.start < stop]
            for start, stop in spans
        ]
        self._sizes = [sum(number in touched for touched in self._buckets_of) for number in range(len(buckets))]

    def start(self) -> None:
        """Begin a step."""
        self._missing = list(self._sizes)
        self._next = 0
        self.untouched = True

    def done(self, tensor: int) -> None:
        """Tensor number `tensor` is complete."""
        self.untouched = False
        for bucket in self._buckets_of[tensor]:
            self._missing[bucket] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._launch(self._buckets[self._next])
            self._next += 1
