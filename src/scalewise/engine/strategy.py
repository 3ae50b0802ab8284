"""How one step is computed over processes: the seam behind which kinds of parallelism are interchangeable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scalewise.engine import reductions
from scalewise.engine.feed import Feed
from scalewise.engine.flat import Bucket, FlatLayout
from scalewise.engine.lockstep import Lockstep, check_lockstep
from scalewise.engine.model import PlacedModel
from scalewise.engine.placement import Placement, loader_processes
from scalewise.engine.reductions.protocol import Scale
from scalewise.engine.samples import Samples
from scalewise.engine.team import Gathered, Team
from scalewise.engine.tree import share
from scalewise.engine.update import FlatOptimizer, Reader, StateEntry
from scalewise.engine.workers import Workers, numbers_tensor
from scalewise.nn.sync import exchanging
from scalewise.recipe import Recipe
from scalewise.schedules import Cuts
from scalewise.tasks.task import Number, Task


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

    def __init__(
        self, task: Task, recipe: Recipe, placement: Placement, team: Team, samples: Samples, cuts: Cuts
    ) -> None:
        self.model = PlacedModel(task, recipe, team)
        shares = [share(process, team.size, recipe.workers) for process in range(team.size)]
        self._counts = [last - first for first, last in shares]
        self._mine = range(*shares[team.rank])
        loaders = loader_processes(placement, team.here)
        self.feed = Feed(task, recipe, samples, cuts, team.device, self._mine, loaders)
        self.workers = Workers(task, recipe, self.model, self.feed, cuts, team.device)
        self._recipe, self._cuts, self._team = recipe, cuts, team
        self._wants_norms = placement.noise or recipe.lr_rule == "adascale"
        self._weight_is_samples = task.weight_is_samples
        self._lockstep: Lockstep | None = None
        if recipe.batch_norm == "sync" and self.model.averages:
            check_lockstep(team.device, len(self._mine))
            self._lockstep = Lockstep(team, self._counts)

        self._averages = [*self.model.averages.values()] if recipe.workers > 1 else []
        averages = self.model.averages if recipe.workers > 1 else {}  # one worker's are the model's own
        self._layout = FlatLayout(self.model.parameters, averages, team.size)
        self._weights = self._layout.new()  # the parameters and averages live in it
        self._layout.adopt(self._weights)
        self._fold, self._reduction = reductions.build(placement, self._layout, team, recipe.workers)
        self._overlap = _Overlap(self._layout, self._reduction.buckets, self._reduction.launch)
        if len(self._reduction.buckets) > 1:
            self.workers.listen()
        self._optimizer = FlatOptimizer(recipe, self._layout, self._weights, self._reduction)
        source = self._weights if self._reduction.spreads else self._reduction.sum
        self._new_averages = self._layout.views(source)[len(self.model.parameters) :]

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
        stop = start + self._cuts.parts(step) * self._recipe.worker_batch
        indices, epochs = self.feed.stream.take(start, stop)
        return indices.tolist(), epochs.tolist()

    def close(self) -> None:
        """End the loader processes."""
        self.feed.close()

    def gradients(self, step: int, signal: int) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean; tell all processes of a signal sent here."""
        rows: list[list[Number]] = []
        weights: list[Gathered] = []

        def gather_weights(last_weight: Number) -> None:
            known = [[row[1]] for row in rows] + [[last_weight]]
            weights.append(self._team.gather_rows(numbers_tensor(known, self._team.device), self._counts))

        if self._lockstep is not None:
            return self._gradients_in_lockstep(self._lockstep, step, signal)
        measures = self._measures(step)
        if len(self._mine) > 1:
            self.model.remember_buffers()
        for leaf, worker in enumerate(self._mine):
            if leaf:
                self.model.restore_buffers()
            last = leaf == len(self._mine) - 1
            ready = self._when_ready(leaf) if last and len(self._reduction.buckets) > 1 else None
            forwarded = gather_weights if last and not self._weight_is_samples else None
            gradients, numbers = self.workers.gradient(step, worker, measures, ready, forwarded)
            rows.append([*numbers, signal])
            if ready is None:
                self._fold.put(leaf, [*gradients, *self._averages])
        if len(self._reduction.buckets) == 1:
            self._reduction.launch(self._reduction.buckets[0])
        return self._reduced(step, rows, weights)

    def _gradients_in_lockstep(self, lockstep: Lockstep, step: int, signal: int) -> StepNumbers:
        """The same where layers need numbers of all workers in the middle of a pass."""
        compute = self.workers.gradient
        together = [
            functools.partial(compute, step, worker, self._measures(step), together=True) for worker in self._mine
        ]
        with exchanging(self.model.module, lockstep.exchange):
            results = lockstep.run(together)
        rows = [[*numbers, signal] for _, numbers in results]
        weights = []
        if not self._weight_is_samples:
            known = numbers_tensor([[row[1]] for row in rows], self._team.device)
            weights.append(self._team.gather_rows(known, self._counts))
        for leaf, (gradients, _) in enumerate(results):
            self._fold.put(leaf, [*gradients, *self._averages])
        for bucket in self._reduction.buckets:
            self._reduction.launch(bucket)
        return self._reduced(step, rows, weights)

    def _measures(self, step: int) -> bool:
        groups = self._recipe.workers * self._cuts.parts(step) * self._recipe.micro_batches
        return self._wants_norms and groups > 1

    def _reduced(self, step: int, rows: list[list[Number]], weights: list[Gathered]) -> StepNumbers:
        """Wait for the sum over workers and make it a mean; the numbers are on their way."""
        self.model.check_fixed_buffers()
        gathered = self._team.gather_rows(numbers_tensor(rows, self._team.device), self._counts)
        self._reduction.finish(self._mean(weights, self._cuts.parts(step)))
        measured = self._measures(step) or self._recipe.clip_norm is not None
        return StepNumbers(gathered, self._clipped() if measured else None)

    def _when_ready(self, leaf: int) -> Callable[[int, Tensor], None]:
        """Fold the last worker's gradients while its backward pass goes on, and send full buckets."""
        self._overlap.start()
        first_average = len(self.model.parameters)

        def ready(number: int, gradient: Tensor) -> None:
            if self._overlap.untouched:  # the averages were complete after forward
                for offset, buffer in enumerate(self._averages):
                    self._fold.put_one(leaf, first_average + offset, buffer)
                    self._overlap.done(first_average + offset)
            self._fold.put_one(leaf, number, gradient)
            self._overlap.done(number)

        return ready

    def _mean(self, weights: list[Gathered], parts: int) -> Scale:
        """Gradients divided by the total weight of the global batch, averages by the number of workers."""
        recipe = self._recipe
        total = float(sum(weights[0].wait().flatten().tolist())) if weights else float(parts * recipe.global_batch)
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

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Change the weights and the averaged buffers."""
        self._optimizer.step(self._reduction.sum, lr)
        if self._reduction.spreads:
            for start, stop in self._reduction.owned:
                first = max(start, self._layout.parameters_stop)  # the averages; the parameters are there already
                self._weights[first:stop] = self._reduction.sum[first:stop]
            self._reduction.publish(self._weights)
        if self._averages:
            torch._foreach_copy_(self._averages, self._new_averages)

    def state(self) -> list[StateEntry]:
        """The optimizer's state: what this process has, and need not share."""
        return self._optimizer.state() if self._reduction.spreads or self._team.leads else []

    def load_state(self, names: Iterable[str], read: Reader) -> None:
        """Fill the optimizer's state for what this process updates."""
        self._optimizer.load(names, read)


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
