"""Data parallelism: every process holds the model and runs some of the workers."""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from scalewise.engine.parallel import HeldBytes, Setup, Strategy
from scalewise.engine.parallel.lockstep import Lockstep, check_lockstep
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import (
    Ready,
    StepNumbers,
    WorkerNumbers,
    Workers,
    WorkerStep,
    numbers_tensor,
    pack,
    step_numbers,
)
from scalewise.engine.processes.team import Gathered, Team
from scalewise.engine.sums import reductions
from scalewise.engine.sums.flat import FlatLayout, mean_factor, scaling
from scalewise.engine.sums.replicas import fingerprint
from scalewise.engine.sums.tree import share
from scalewise.engine.update.optimizer import FlatOptimizer, StateEntry, owned_stretches
from scalewise.nn.batch_norm import exchanging
from scalewise.tasks.task import Number


class FlatStrategy(Strategy):
    """A strategy whose processes hold parameters, and what is averaged over workers, in one flat vector."""

    def _hold(self, parameters: Mapping[str, Tensor], averages: Mapping[str, Tensor], team: Team) -> None:
        """Move tensors into the vector, whose sum over workers the processes of `team` take together."""
        recipe = self._setup.recipe
        averages = averages if recipe.workers > 1 else {}  # one worker's are the model's own
        self._averages = [*averages.values()]
        self._layout = FlatLayout(parameters, averages, team.size)
        self._weights = self._layout.adopted()
        self._fold, self._reduction = reductions.build(self._setup.placement, self._layout, team, recipe.workers)
        stretches = owned_stretches(recipe, self._layout, self._weights, self._reduction.owned)
        matrices = self._setup.model.matrices
        self._optimizer = FlatOptimizer(recipe, self._layout, stretches, self._reduction.complete, matrices)
        source = self._weights if self._reduction.spreads else self._reduction.sum
        self._new_averages = self._layout.views(source)[len(parameters) :]

    def squared_norm(self) -> Tensor:
        """Of the mean gradient, from the chunks of its grid."""
        return self._reduction.squared_norm()

    def mean_gradient(self) -> list[Tensor]:
        """The parts that this process owns."""
        last = self._layout.parameters_stop
        return [self._reduction.sum[start : min(stop, last)] for start, stop in self._reduction.owned]

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """Change the weights and the averaged buffers."""
        self._optimizer.step(self._reduction.sum, lr)
        if self._reduction.spreads:
            for start, stop in self._reduction.owned:
                first = max(start, self._layout.parameters_stop)  # the averages; the parameters are updated in place
                self._weights[first:stop] = self._reduction.sum[first:stop]
            self._publish()
        if self._averages:
            torch._foreach_copy_(self._averages, self._new_averages)

    def _publish(self) -> None:
        """Bring every process the weights that others update."""
        if self._reduction.spreads:
            self._reduction.publish(self._weights)

    def held(self) -> HeldBytes:
        """The weights, the sums over workers, and the state of what this process updates."""
        vectors = {buffer.data_ptr(): buffer.nbytes for buffer in (*self._fold.buffers, self._reduction.sum)}
        return HeldBytes(self._weights.nbytes, sum(vectors.values()), self._optimizer.bytes())


class DataParallel(FlatStrategy):
    """Every process holds the model and runs some of the workers."""

    def __init__(self, setup: Setup) -> None:
        recipe, placement, team = setup.recipe, setup.placement, setup.team
        shares = [share(process, team.size, recipe.workers) for process in range(team.size)]
        self._counts = [last - first for first, last in shares]
        self._mine = range(*shares[team.rank])
        super().__init__(setup, self._mine)
        self.workers = Workers(setup, self.model.call, [*self.model.parameters.values()], self.feed)
        self.exact = placement.exact  # whether the sum over workers has one order
        self._compared_every = placement.check_replicas if team.size > 1 else 0
        self._weight_is_samples = setup.task.weight_is_samples
        self._weights_seconds = 0.0  # waited for the weights of the other processes' losses
        self._lockstep: Lockstep | None = None
        if recipe.batch_norm == "sync" and self.model.averages:
            check_lockstep(team.device, len(self._mine))
            self._lockstep = Lockstep(team, self._counts)
        self._hold(self.model.parameters, self.model.averages, team)
        self._taken: list[int] = []  # the fingerprint of the weights before this step, where it is compared
        self._computes = False  # whether workers run, which change the model's buffers
        spans = [(start, start + self._layout.tensors[name].numel()) for name, start in self._layout.starts.items()]
        self._buckets_of = [  # by tensor
            [number for number, one in enumerate(self._reduction.buckets) if start < one.stop and one.start < stop]
            for start, stop in spans
        ]
        if len(self._reduction.buckets) > 1:
            self.workers.listen()

    @property
    def exchange_seconds(self) -> float:
        """How long this process has waited for the other processes so far."""
        return self._weights_seconds + self._reduction.waited_seconds

    def gradients(self, step: int, signal: int, measures: bool) -> StepNumbers:
        """Compute every worker's gradient and reduce them to their mean."""
        found: list[WorkerNumbers] = []
        weights: list[Gathered] = []

        def gather_weights(last_weight: Number) -> None:
            known = [[one.weight] for one in found] + [[last_weight]]
            weights.append(self._team.gather_rows(numbers_tensor(known, self._team.device), self._counts))

        self.model.buffers.remember()
        self._computes = True
        compares = self._compared_every > 0 and step % self._compared_every == 0
        self._taken = fingerprint(self._weights) if compares else []  # before workers change averages
        if self._lockstep is not None:
            return self._gradients_in_lockstep(self._lockstep, step, signal, measures)
        for leaf, worker in enumerate(self._mine):
            if leaf:
                self.model.buffers.restore()
            last = leaf == len(self._mine) - 1
            ready = self._when_ready(leaf) if last and len(self._reduction.buckets) > 1 else None
            forwarded = gather_weights if last and not self._weight_is_samples else None
            gradients, numbers = self.workers.gradient(step, worker, measures, ready, forwarded)
            found.append(numbers)
            if ready is None:
                self._fold.put(leaf, [*gradients, *self._averages])
        if len(self._reduction.buckets) == 1:
            self._reduction.launch(self._reduction.buckets[0])
        return self._reduced(step, signal, measures, found, weights)

    def _gradients_in_lockstep(self, lockstep: Lockstep, step: int, signal: int, measures: bool) -> StepNumbers:
        """The same where layers need numbers of all workers in the middle of a pass."""
        results = self._together(lockstep, step, measures)
        found = [numbers for _, numbers in results]
        weights = []
        if not self._weight_is_samples:
            known = numbers_tensor([[one.weight] for one in found], self._team.device)
            weights.append(self._team.gather_rows(known, self._counts))
        for leaf, (gradients, _) in enumerate(results):
            self._fold.put(leaf, [*gradients, *self._averages])
        for bucket in self._reduction.buckets:
            self._reduction.launch(bucket)
        return self._reduced(step, signal, measures, found, weights)

    def _together(self, lockstep: Lockstep, step: int, measures: bool) -> list[tuple[list[Tensor], WorkerNumbers]]:
        """Every worker's gradients and numbers, computed in lockstep."""
        compute = functools.partial(self.workers.gradient, step, measure=measures, together=True)
        with exchanging(self.model.module, lockstep.exchange):
            return lockstep.run([functools.partial(compute, worker) for worker in self._mine])

    def _reduced(
        self, step: int, signal: int, measures: bool, found: list[WorkerNumbers], weights: list[Gathered]
    ) -> StepNumbers:
        """Wait for the sum over workers and make it a mean; the numbers are on their way."""
        self.model.buffers.check_fixed()
        packed = pack(found, self._team.device, signal, self._taken)
        table = self._team.gather_rows(packed, self._counts) if self._team.size > 1 else packed
        began = time.perf_counter()
        known = weights[0].wait() if weights else None
        self._weights_seconds += time.perf_counter() - began
        recipe = self._setup.recipe
        factor = mean_factor(recipe.worker_batch, self._setup.cuts.samples(step), known)
        self._reduction.finish(scaling(recipe.workers, self._layout, factor))
        if isinstance(table, Gathered):
            table.arrive()  # so that whoever has updated its weights also has the numbers of that step
        return step_numbers(self, self._setup.recipe.clip_norm, measures, table, [*found[0].metrics])

    def worker_steps(self, step: int) -> Iterator[WorkerStep]:
        """Compute this process's workers' gradients again, at the present weights; nothing else changes."""
        if self._lockstep is not None:
            self.model.buffers.remember()
            results = self._together(self._lockstep, step, True)
            yield from (WorkerStep(worker, n, [*g]) for worker, (g, n) in zip(self._mine, results, strict=True))
        else:
            for worker in self.model.buffers.each(self._mine):
                gradients, numbers = self.workers.gradient(step, worker, True)
                yield WorkerStep(worker, numbers, [*gradients])
        self.model.buffers.restore()

    def _when_ready(self, leaf: int) -> Ready:
        """Fold the last worker's gradients during its backward pass.

        Buckets are sent, in one order on every process, as soon as all tensors in them are complete.
        """
        missing = Counter(number for buckets in self._buckets_of for number in buckets)
        waiting = deque(enumerate(self._reduction.buckets))
        averages = [*enumerate(self._averages, len(self.model.parameters))]

        def put(tensor: int, value: Tensor) -> None:
            self._fold.put_one(leaf, tensor, value)
            missing.subtract(self._buckets_of[tensor])
            while waiting and not missing[waiting[0][0]]:
                self._reduction.launch(waiting.popleft()[1])

        def ready(number: int, gradient: Tensor) -> None:
            while averages:  # they were complete after forward
                put(*averages.pop(0))
            put(number, gradient)

        return ready

    def update(self, lr: float) -> None:
        """Change the weights and the averaged buffers."""
        super().update(lr)
        self._computes = False

    @contextmanager
    def whole(self) -> Iterator[PlacedModel]:
        """The model itself."""
        yield self.model

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers."""
        self.model.load(tensors)

    def fingerprint(self) -> list[int] | None:
        """Of the weights and averages, which are in one vector."""
        return fingerprint(self._weights)

    def non_finite(self) -> str | None:
        """The name of a parameter that is not finite."""
        return next((name for name, value in self.model.parameters.items() if not value.isfinite().all()), None)

    def state(self) -> list[StateEntry]:
        """The optimizer's state: what this process has, and need not share."""
        return self._optimizer.state() if self._reduction.spreads or self._team.leads else []

    def emergency_state(self) -> list[StateEntry] | None:
        """Everything, unless each process updates a part; what the workers of an unfinished step changed is undone."""
        if self._reduction.spreads:
            return None
        if self._computes:
            self.model.buffers.restore()
        return self._optimizer.state()
