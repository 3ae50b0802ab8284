"""The training loop: a generator of records. Whoever calls it draws, stores and stops.

    indices ─▶ worker gradients (+ norms) ─▶ ordered sum ─▶ noise ─▶ learning rate ─▶ update ─▶ record

`Training.records` is the loop and `Training.take_step` the step. The strategy computes gradients and updates weights
(parallel/), the pace chooses the learning rate (pace.py). A step's numbers are read a step late, so that nothing waits
for them.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from scalewise import schedules
from scalewise.engine import parallel
from scalewise.engine.checks import check_gradients, check_label_smoothing, check_labels, check_losses
from scalewise.engine.data.samples import Samples, hold_out, open_samples, some
from scalewise.engine.evaluate import SAMPLES as STATISTICS_SAMPLES
from scalewise.engine.evaluate import evaluate, right_statistics
from scalewise.engine.pace import Pace, Progress, Selection
from scalewise.engine.parallel import Setup, Strategy
from scalewise.engine.parallel.model import PlacedModel, numerics, sha256
from scalewise.engine.parallel.workers import StepNumbers, WorkerNumbers, means, numbers_tensor
from scalewise.engine.placement import Placement, available_cores, check_processes, check_recipe, loader_processes
from scalewise.engine.processes import team as teams
from scalewise.engine.processes.heartbeat import HEARTBEAT
from scalewise.engine.processes.memory import has_room_to_keep, keep_freed_memory, return_freed_memory
from scalewise.engine.sums import replicas
from scalewise.engine.sums.tree import share
from scalewise.errors import NonFiniteLoss, Place, TaskError
from scalewise.recipe import Derived, Recipe, Search, resolve
from scalewise.records import Epoch, Record, Result, Step
from scalewise.stats.noise_scale import NoiseScale
from scalewise.tasks.task import Task


@dataclass(frozen=True)
class _Taken:
    """A step that was taken, and whose numbers are not read yet."""

    step: int
    lr: float
    learned: float
    gain: float | None
    numbers: StepNumbers
    input_seconds: float


def train(task: Task, recipe: Recipe | None = None, placement: Placement | None = None) -> Iterator[Record]:
    """Train and yield a `Step` per update, an `Epoch` per pass over the data, and at last the `Result`.

    >>> for record in train(task, Recipe(workers=8, worker_batch=64)):  # doctest: +SKIP
    ...     print(record)

    Takes part in the surrounding job when started by torchrun; else it is one process, which runs all workers.

    Arguments:
        task: what is learned.
        recipe: how; by default the task's own. Nothing is derived from it and nothing stored: `fit` does both.
        placement: where; by default on whatever device is available.
    """
    with Training(task, recipe or task.recipe, placement or Placement()) as training:
        yield from training.records()


class Training:
    """A run in progress on this process: the parts, and where it stands."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        placement: Placement,
        derived: list[Derived] | None = None,
        pause_every: int | None = None,
        hold_out: bool = False,
        search: Search | None = None,
        alone: bool = False,
        most_samples: int | None = None,
    ) -> None:
        """Nothing happens before `with`.

        Arguments:
            derived: reasons for values of the recipe, passed on to the result.
            pause_every: steps after which all numbers are read, so that the caller may take a snapshot.
            hold_out: keep a tenth of the training data out for validation where the task has none, although nothing in
                the recipe asks for it.
            search: what was trained before step 0 to derive the recipe, passed on to the result.
            alone: train on this process by itself, also inside a job of several.
            most_samples: train on no more than so many of the training samples.
        """
        self.recipe, threads = resolve(recipe, {}, "plain", available_cores())
        self.derived = (derived or []) + threads
        self.task, self.placement, self.pause_every, self.hold_out = task, placement, pause_every, hold_out
        self.search, self._alone, self._most_samples = search, alone, most_samples
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.final: dict[str, Tensor] = {}  # once training has ended: the model to use, with its right statistics
        self.statistics_samples = STATISTICS_SAMPLES  # at most, where batch norm is recomputed for an evaluation
        self.signal = 0  # set it to the number of a signal to stop all processes after the step
        self.interrupted = 0  # the signal for which training has stopped
        self.ended = False  # whether the last step is taken, recorded and stored
        self._waiting: deque[_Taken] = deque()
        self._whole = True  # whether the state is that after a whole step
        self._compared_step = 0  # after which all processes last held the same weights
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            job = teams.alone if self._alone else teams.joined
            self.team = stack.enter_context(job(self.placement.device))
            check_processes(self.team.size, self.recipe, self.placement)
            check_recipe(self.placement, self.recipe)
            if self.team.device.type == "cpu":
                return_freed_memory()  # until the first step shows how much is worth keeping
            stack.enter_context(numerics(self.recipe, self.team.device, self.placement.exact))
            self._build()
            stack.callback(self.strategy.feed.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        gc.collect()  # cycles would hold the memory of a training until the next full collection, which is rare

    def _build(self) -> None:
        task, recipe = self.task, self.recipe
        check_label_smoothing(task, recipe)
        samples = open_samples(task.train, recipe.seed, "training")
        self.validation: Samples | None = None
        if task.validation is not None:
            self.validation = open_samples(task.validation, recipe.seed, "validation")
        elif recipe.selects or self.hold_out:
            samples, self.validation = hold_out(samples)
        if self._most_samples is not None:
            samples = some(samples, self._most_samples)
        self.samples, self.test = samples, open_samples(task.test, recipe.seed, "test")
        self.cuts = schedules.Cuts(recipe, len(samples))
        self.pace = Pace(recipe, len(samples), self.cuts)
        self.noise = NoiseScale(population=len(samples))
        self._selection = Selection(task, recipe)
        model = PlacedModel(task, recipe, self.team)
        parts = {"training": samples, "validation": self.validation, "test": self.test}
        check_labels(task, recipe, model, parts, self.team.device)
        setup = Setup(task, recipe, self.placement, self.team, samples, self.cuts, model)
        self.strategy: Strategy = parallel.build(setup)
        self._view: Callable[[], AbstractContextManager[PlacedModel]] = self.strategy.evaluated

    def restore(self, progress: Progress) -> None:
        """Continue from where a checkpoint was; what was not exact before stays so."""
        self.progress = dataclasses.replace(progress, exact=progress.exact and self.strategy.exact)
        self._compared_step = progress.step

    @property
    def seen(self) -> int:
        """Samples seen so far."""
        return self.cuts.start(self.progress.step)

    @property
    def planned_steps(self) -> int | None:
        """How many steps there will be, if that is known beforehand."""
        adapts = self.recipe.lr_rule == "adascale" and self.recipe.workers > 1
        return None if adapts else self.cuts.total_steps

    @property
    def finished(self) -> bool:
        """Whether the last step is taken."""
        return self.progress.step >= self.cuts.total_steps or self.progress.learned >= self.pace.total

    def records(self) -> Iterator[Record]:
        """Train to the end; without a `Result` when a signal stops it before."""
        began = time.perf_counter() - self.progress.seconds
        first_step = self.progress.step
        if first_step and self.progress.train_rows and self.ends_epoch():  # it broke off before the epoch's record
            yield self._end_epoch(began)
        while not (self.finished or self._selection.stopped(self.progress) or self.interrupted):
            started, waited = time.perf_counter(), self.strategy.feed.waited_seconds
            numbers = self.gradients()
            self._whole = False
            if numbers.overflows:
                yield from self._read(0, began)
                check_losses(self.strategy, self.samples, self.progress.step, numbers.read())
                check_gradients(self.strategy, self.samples, self.progress.step, self.team)
            taken = self._update(numbers)
            self._waiting.append(dataclasses.replace(taken, input_seconds=self.strategy.feed.waited_seconds - waited))
            self._whole = True
            if taken.step == first_step and self.team.device.type == "cpu" and has_room_to_keep(self.team.here):
                keep_freed_memory()
            HEARTBEAT.memory.step, HEARTBEAT.memory.trains = self.progress.step, True
            ends_epoch = self.ends_epoch()
            pauses = ends_epoch or (self.pause_every is not None and self.progress.step % self.pause_every == 0)
            records = [*self._read(0 if pauses else 1, began)]
            self.progress.training_seconds += time.perf_counter() - started
            self.progress.seconds = time.perf_counter() - began
            yield from records
            if ends_epoch:
                yield self._end_epoch(began)
        if not self.interrupted:
            self.ended, self._whole = True, False
            yield self._result(began)

    def take_step(self) -> StepNumbers:
        """One step by itself, without a record: gradients, learning rate, update."""
        numbers = self.gradients()
        self._update(numbers)
        return numbers

    def gradients(self) -> StepNumbers:
        """Every worker's gradient, reduced to their mean: the first half of a step."""
        step = self.progress.step
        wanted = self.placement.noise or self.recipe.lr_rule == "adascale"
        return self.strategy.gradients(step, self.signal, wanted and self.cuts.gradients(step) > 1)

    def _update(self, numbers: StepNumbers) -> _Taken:
        """The second half of a step: the learning rate, and the update of the weights."""
        step = self.progress.step
        lr, gain = self.pace.advance(self.progress, numbers)
        self.strategy.update(lr)
        self.progress.exact = self.progress.exact and self.strategy.exact
        return _Taken(step, lr, self.progress.learned, gain, numbers, 0.0)

    def _read(self, left: int, began: float) -> Iterator[Step]:
        """The records of steps whose numbers are still to be read, up to the last `left`; all of them on a signal."""
        while len(self._waiting) > (0 if self.interrupted else left):
            yield self._step_record(self._waiting.popleft(), time.perf_counter() - began)

    def settle(self) -> list[Step] | None:
        """The records still waiting after the last whole step, of a training that broke off; None within an update."""
        if not self._whole:
            return None
        seconds = self.progress.seconds
        return [self._step_record(self._waiting.popleft(), seconds) for _ in range(len(self._waiting))]

    def ends_epoch(self) -> bool:
        """Whether the last step ended a pass over the data, or training."""
        samples, before = len(self.samples), self.cuts.start(self.progress.step - 1)
        return self.seen // samples > before // samples or self.finished

    def _step_record(self, taken: _Taken, seconds: float) -> Step:
        step, numbers = taken.step, taken.numbers
        workers = numbers.read()
        self._check_replicas(step, workers)
        self.interrupted = max(worker.signal for worker in workers)
        if not all(math.isfinite(worker.loss) for worker in workers):
            check_losses(self.strategy, self.samples, step, workers)
        sums = [[*map(float, worker.sums())] for worker in workers]
        self.progress.names = names = ["loss", *numbers.metric_names]
        values = means(names, sums)
        self.progress.train_rows = [[sum(column) for column in zip(*self.progress.train_rows, *sums, strict=True)]]
        square = None if numbers.squared_norm is None else float(numbers.squared_norm)
        groups = self.cuts.gradients(step)
        if square is not None and groups > 1 and self.placement.noise:
            mean_square = sum(float(worker.squared_norms) for worker in workers) / groups
            self.noise.observe(mean_square, square, groups, self.cuts.micro_batch)
        seen = self.cuts.start(step + 1)
        return Step(
            step=step + 1,
            epoch=seen / len(self.samples),
            samples=seen,
            lr=taken.lr,
            loss=values.pop("loss"),
            metrics=values,
            seconds=seconds,
            input_seconds=taken.input_seconds,
            gradient_norm=None if square is None else math.sqrt(square),
            noise_scale=self.noise.current,
            progress=taken.learned,
            gain=taken.gain,
        )

    def _check_replicas(self, step: int, workers: list[WorkerNumbers]) -> None:
        """Refuse weights that were not the same on every process before a step, where that was compared."""
        if workers[0].fingerprint:
            firsts = [share(process, self.team.size, len(workers))[0] for process in range(self.team.size)]
            found = [workers[first].fingerprint for first in firsts]
            replicas.check(found, self.recipe.workers, step, self._compared_step)
            self._compared_step = step

    def check_weights(self) -> None:
        """Refuse weights that are no longer finite or not the same everywhere, so that no checkpoint holds them."""
        mine = self.strategy.fingerprint() if self.team.size > 1 else None
        if mine is not None:
            rows = self.team.gather_rows(numbers_tensor([mine], self.team.device), [1] * self.team.size)
            replicas.check(rows.wait().tolist(), self.recipe.workers, self.progress.step, self._compared_step)
            self._compared_step = self.progress.step
        name = self.strategy.non_finite()
        if name is not None:
            raise NonFiniteLoss(
                f"the weights must stay finite, {name} is not after step {self.progress.step}; lower --lr, or add "
                f"--warmup-epochs or --clip-norm",
                Place(self.progress.step, None, name),
            )

    def _end_epoch(self, began: float) -> Epoch:
        progress = self.progress
        validation = None  # first: if contact with another process is lost meanwhile, nothing has changed yet
        if self.validation is not None:
            validation = self._evaluate(self.validation, "validation")
        progress.train = means(progress.names, progress.train_rows)
        progress.train_rows = []
        better = False
        if validation is not None:
            progress.validation = validation
            better = self._selection.observe(progress, validation)
        if better:  # keep the best weights by validation data
            with self.strategy.evaluated() as model:
                self.best = {name: tensor.clone() for name, tensor in model.tensors().items()}
        return Epoch(
            step=progress.step,
            epoch=self.seen / len(self.samples),
            samples=self.seen,
            lr=progress.lr,
            train=progress.train,
            validation=progress.validation,
            best=better,
            seconds=time.perf_counter() - began,
            samples_per_second=self._samples_per_second(),
        )

    def validate(self, samples: Samples | None = None) -> dict[str, float]:
        """Loss and metrics of the present weights, by default on validation data; training continues unchanged."""
        if samples is not None:
            return self._evaluate(samples, "training")
        if self.validation is None:
            raise TaskError("validation data are needed, got none; give the task validation=…, or hold some out")
        return self._evaluate(self.validation, "validation")

    def _evaluate(self, samples: Samples, what: str) -> dict[str, float]:
        with self._view() as model, self._right_statistics(model):
            return evaluate(self.task, self.recipe, model, samples, self.team, self._loaders, what)

    def _right_statistics(self, model: PlacedModel) -> AbstractContextManager[None]:
        source = self.samples, self._loaders, self.team.device, self.statistics_samples
        return right_statistics(self.task, self.recipe, model, self.progress.step, *source)

    @property
    def _loaders(self) -> int:
        return loader_processes(self.placement, self.team.here)

    def _result(self, began: float) -> Result:
        progress, recipe = self.progress, self.recipe
        with self.strategy.whole() as model:
            weights_sha256 = sha256(model.tensors())
        best_sha256 = None
        reached = self._selection.reached(progress)
        if self.best and recipe.patience is not None:
            self.strategy.load(self.best)
            self._view = self.strategy.whole  # the best weights were those to evaluate already
            best_sha256 = sha256(self.best)
            progress.validation = self._evaluate(self.validation, "validation") if self.validation is not None else None
        with self._view() as model, self._right_statistics(model):
            self.final = {name: tensor.clone() for name, tensor in model.tensors().items()}
        test = self._evaluate(self.test, "test")
        measured = self.placement.noise and recipe.workers * recipe.micro_batches * self.cuts.most_parts > 1
        assert recipe.threads is not None
        return Result(
            run=None,
            task=self.task.name,
            workers=recipe.workers,
            processes=self.team.size,
            threads=recipe.threads,
            worker_batch=recipe.worker_batch,
            global_batch=recipe.global_batch,
            steps=progress.step,
            epochs=self.seen / len(self.samples),
            samples=self.seen,
            optimizer=recipe.optimizer,
            lr={"base": recipe.lr, "peak": self.pace.peak(progress)},
            train=progress.train,
            validation=progress.validation,
            test=test,
            seconds=time.perf_counter() - began,
            samples_per_second=self._samples_per_second(),
            exact=progress.exact,
            weights_sha256=weights_sha256,
            noise_scale=self.noise.estimate().to_json() if measured else None,
            derived=[value.to_json() for value in self.derived],
            search=None if self.search is None else self.search.to_json(),
            best_sha256=best_sha256,
            target_reached=reached if recipe.target is not None else None,
        )

    def _samples_per_second(self) -> float:
        return self.seen / max(self.progress.training_seconds, 1e-9)
