"""The training loop: a generator of records. Whoever calls it draws, stores and stops."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from scalewise import schedules
from scalewise.engine import parallel
from scalewise.engine.data.labels import check_labels
from scalewise.engine.data.samples import Samples, check_finite, hold_out, open_samples
from scalewise.engine.evaluate import SAMPLES as STATISTICS_SAMPLES
from scalewise.engine.evaluate import evaluate, means, recomputed, recomputes
from scalewise.engine.numerics import numerics
from scalewise.engine.pace import Pace, Progress
from scalewise.engine.parallel.model import PlacedModel, sha256
from scalewise.engine.parallel.protocol import Setup, StepNumbers, Strategy, first_broken, overflows
from scalewise.engine.parallel.workers import numbers_tensor
from scalewise.engine.placement import Placement, available_cores, check_processes, check_recipe, loader_processes
from scalewise.engine.processes import team as teams
from scalewise.engine.processes.heartbeat import HEARTBEAT, Heartbeat
from scalewise.engine.processes.memory import has_room_to_keep, keep_freed_memory, return_freed_memory
from scalewise.engine.sums import replicas
from scalewise.errors import NonFiniteGradient, NonFiniteLoss, Place, RecipeError, TaskError
from scalewise.recipe import Derived, Pilot, Recipe, resolve
from scalewise.records import Epoch, Record, Result, Step
from scalewise.stats.noise_scale import NoiseScale
from scalewise.tasks.task import Task


@dataclass(frozen=True)
class _Waiting:
    """A step whose numbers are read a step late, so that nothing waits for them."""

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
        recipe: how; by default the task's own. Nothing is derived from it: auto belongs to the command.
        placement: where; by default whatever device there is.
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
        pilot: Pilot | None = None,
        alone: bool = False,
    ) -> None:
        """Nothing happens before `with`.

        Arguments:
            task, recipe, placement: what, how and where.
            derived: reasons for values of the recipe, passed on to the result.
            pause_every: steps after which all numbers are read, so that the caller may take a snapshot.
            hold_out: keep a tenth of the training data out for validation where the task has none, although nothing in
                the recipe asks for it.
            pilot: what was trained before step 0 to derive the recipe, which counts in the result.
            alone: train on this process by itself, whatever job it was started in.
        """
        self.recipe, threads = resolve(recipe, {}, "plain", available_cores())
        self.derived = (derived or []) + threads
        self.task, self.placement, self.pause_every, self.hold_out = task, placement, pause_every, hold_out
        self.pilot, self._alone = pilot, alone
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        self.final: dict[str, Tensor] = {}  # once training has ended: the model to use, with its right statistics
        self.statistics_samples = STATISTICS_SAMPLES  # at most, where batch norm is recomputed for an evaluation
        self.signal = 0  # set it to the number of a signal to stop after the step, on all processes alike
        self.interrupted = 0  # the signal for which training has stopped
        self.ended = False  # whether the last step is taken, recorded and stored
        self._waiting: deque[_Waiting] = deque()
        self._whole = True  # whether the state is that after a whole step
        self._compared_step = 0  # after which all processes were last seen to hold the same weights
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            job = teams.alone if self._alone else teams.joined
            self.team = stack.enter_context(job(self.placement.device))
            check_processes(self.team.size, self.recipe, self.placement)
            check_recipe(self.placement, self.recipe)
            if self.team.device.type == "cpu":
                return_freed_memory()  # until the first step shows how much there is to keep
            stack.enter_context(numerics(self.recipe, self.team.device, self.placement.exact))
            self._build()
            stack.callback(self.strategy.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        gc.collect()  # cycles hold the memory of a training until the collector comes to the old objects, seldom

    def _build(self) -> None:
        task, recipe = self.task, self.recipe
        if recipe.label_smoothing and not task.smooths_labels():
            raise RecipeError(
                f"label_smoothing={recipe.label_smoothing} needs a loss that takes label_smoothing (as "
                f"torch.nn.functional.cross_entropy does); this task's does not: use --label-smoothing 0"
            )
        samples = open_samples(task.train, recipe.seed, "training")
        self.validation: Samples | None = None
        if task.validation is not None:
            self.validation = open_samples(task.validation, recipe.seed, "validation")
        elif recipe.selects or self.hold_out:
            samples, self.validation = hold_out(samples)
        self.samples, self.test = samples, open_samples(task.test, recipe.seed, "test")
        self.cuts = schedules.Cuts(recipe, len(samples))
        self.pace = Pace(recipe, len(samples), self.cuts)
        self.noise = NoiseScale(population=len(samples))
        model = PlacedModel(task, recipe, self.team)
        parts = {"training": samples, "validation": self.validation, "test": self.test}
        known = {what: part for what, part in parts.items() if part is not None}
        check_labels(task, recipe, model, known, self.team.device)
        setup = Setup(task, recipe, self.placement, self.team, samples, self.cuts, model)
        self.strategy: Strategy = parallel.build(setup)

    def restore(self, progress: Progress) -> None:
        """Go on from where a checkpoint was; what was not exact before stays so."""
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
        """Go on to the end of training; without a `Result` when a signal stops it before."""
        began = time.perf_counter() - self.progress.seconds
        first_step = self.progress.step
        waiting = self._waiting
        if self._owes_epoch():
            yield self._end_epoch(began)
        while not (self.finished or self.stopped or self.interrupted):
            started = time.perf_counter()
            step = self.progress.step
            waited = self.strategy.waited_seconds
            numbers = self.strategy.gradients(step, self.signal)
            self._whole = False
            if overflows(numbers):
                while waiting:
                    yield self._step_record(waiting.popleft(), time.perf_counter() - began)
                self._check_gradients(step, numbers)
            lr, gain = self.pace.advance(self.progress, numbers)
            self.strategy.update(lr)
            self.progress.exact = self.progress.exact and self.strategy.exact
            if step == first_step and self.team.device.type == "cpu" and has_room_to_keep(self.team.here):
                keep_freed_memory()
            input_seconds = self.strategy.waited_seconds - waited
            waiting.append(_Waiting(step, lr, self.progress.learned, gain, numbers, input_seconds))
            self._whole = True
            HEARTBEAT.last = Heartbeat(self.progress.step, True)
            ends_epoch = self.ends_epoch()
            pauses = ends_epoch or (self.pause_every is not None and self.progress.step % self.pause_every == 0)
            records: list[Record] = []
            while len(waiting) > (0 if pauses or self.interrupted else 1):
                records.append(self._step_record(waiting.popleft(), time.perf_counter() - began))
            self.progress.training_seconds += time.perf_counter() - started
            self.progress.seconds = time.perf_counter() - began
            yield from records
            if ends_epoch:
                yield self._end_epoch(began)
        if not self.interrupted:
            self.ended, self._whole = True, False
            yield self._result(began)

    def settle(self) -> list[Step] | None:
        """The records still waiting after the last whole step, for a training that broke off; None within an update."""
        if not self._whole:
            return None
        seconds = self.progress.seconds
        return [self._step_record(self._waiting.popleft(), seconds) for _ in range(len(self._waiting))]

    def _owes_epoch(self) -> bool:
        """Whether training broke off between an epoch's last step and its record."""
        return bool(self.progress.step and self.progress.train_rows) and self.ends_epoch()

    def ends_epoch(self) -> bool:
        """Whether the last step ended a pass over the data, or training."""
        samples, before = len(self.samples), self.cuts.start(self.progress.step - 1)
        return self.seen // samples > before // samples or self.finished

    def _step_record(self, waiting: _Waiting, seconds: float) -> Step:
        step, numbers = waiting.step, waiting.numbers
        rows = numbers.rows.wait().tolist()  # (worker, number)
        if numbers.fingerprinted:
            self._compare(replicas.by_process([[row.pop(), row.pop()] for row in rows], self.team.size), step)
        self.interrupted = int(max(row.pop() for row in rows))
        self._check_finite(step, rows)
        pairs = [[*row[:2], *row[3:]] for row in rows]
        self.progress.names = names = ["loss", *self.strategy.metric_names]
        values = means(names, pairs)
        self.progress.train_rows = [[sum(column) for column in zip(*self.progress.train_rows, *pairs, strict=True)]]
        square = None if numbers.squared_norm is None else float(numbers.squared_norm)
        groups = self.recipe.workers * self.recipe.micro_batches * self.cuts.parts(step)
        if square is not None and groups > 1 and self.placement.noise:
            self.noise.observe(sum(row[2] for row in rows) / groups, square, groups, self.recipe.rows)
        seen = self.cuts.start(step + 1)
        return Step(
            step=step + 1,
            epoch=seen / len(self.samples),
            samples=seen,
            lr=waiting.lr,
            loss=values.pop("loss"),
            metrics=values,
            seconds=seconds,
            input_seconds=waiting.input_seconds,
            gradient_norm=None if square is None else math.sqrt(square),
            noise_scale=self.noise.current,
            progress=waiting.learned,
            gain=waiting.gain,
        )

    def _check_finite(self, step: int, rows: list[list[float]]) -> None:
        for worker, row in enumerate(rows):
            if not math.isfinite(row[0]):
                indices, epochs = self.strategy.samples_of(step, worker)
                check_finite(self.samples, indices, epochs, "training")
                raise NonFiniteLoss(
                    f"the loss must stay finite, got {row[0]} at step {step + 1} on worker {worker} (training samples "
                    f"{self._shown(indices)}, whose values are finite); lower --lr, or add --warmup-epochs "
                    f"or --clip-norm",
                    Place(step + 1, worker, None, tuple(indices)),
                )

    def _check_gradients(self, step: int, numbers: StepNumbers) -> None:
        """Refuse a worker's gradient that is not finite, before it reaches the weights."""
        self._check_finite(step, numbers.rows.wait().tolist())
        broken = first_broken(self.strategy, step, self.team)
        if broken is None:  # only its square was too large for a number
            return
        worker, parameter = broken
        indices, epochs = self.strategy.samples_of(step, worker)
        check_finite(self.samples, indices, epochs, "training")
        raise NonFiniteGradient(
            f"gradients must stay finite, that of {parameter} is not at step {step + 1} on worker {worker} (training "
            f"samples {self._shown(indices)}, whose values are finite), although the loss is; lower --lr, or "
            f"look at it with `scalewise replay RUN`",
            Place(step + 1, worker, parameter, tuple(indices)),
        )

    def _shown(self, indices: list[int]) -> str:
        return ", ".join(map(self.samples.describe, indices[:8])) + (", …" if len(indices) > 8 else "")

    def _compare(self, fingerprints: list[list[float]], step: int) -> None:
        """Refuse weights that are not the same on every process, by their fingerprints."""
        replicas.check(fingerprints, self.recipe.workers, step, self._compared_step)
        self._compared_step = step

    def check_weights(self) -> None:
        """Refuse weights that are no longer finite or not the same everywhere, so that no checkpoint holds them."""
        mine = self.strategy.fingerprint() if self.team.size > 1 else None
        if mine is not None:
            rows = self.team.gather_rows(numbers_tensor([mine], self.team.device), [1] * self.team.size)
            self._compare(rows.wait().tolist(), self.progress.step)
        name = self.strategy.broken()
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
            better = self._select(validation)
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

    def validate(self) -> dict[str, float]:
        """Loss and metrics of the present weights on the validation data; training goes on as if not asked."""
        if self.validation is None:
            raise TaskError("validation data are needed, got none; give the task validation=…, or hold some out")
        return self._evaluate(self.validation, "validation")

    def _evaluate(self, samples: Samples, what: str) -> dict[str, float]:
        with self.strategy.whole() as model, self._right_statistics(model):
            return evaluate(self.task, self.recipe, model, samples, self.team, self._loaders, what)

    def _right_statistics(self, model: PlacedModel) -> AbstractContextManager[None]:
        """The context in which batch-norm statistics are those to evaluate with."""
        if not recomputes(self.recipe, model, self.progress.step):
            return nullcontext()
        source = self.samples, self._loaders, self.team.device
        return recomputed(self.task, self.recipe, model, *source, self.statistics_samples)

    @property
    def _loaders(self) -> int:
        return loader_processes(self.placement, self.team.here)

    def _select(self, validation: dict[str, float]) -> bool:
        """Remember the best weights by validation data; says whether this epoch is the best so far."""
        progress = self.progress
        value = self._metric(validation)
        better = math.isfinite(value) and (
            progress.best_value is None or self._sign * value > self._sign * progress.best_value
        )
        if better:
            progress.best_value, progress.best_step, progress.epochs_since_best = value, progress.step, 0
            with self.strategy.whole() as model:
                self.best = {name: tensor.clone() for name, tensor in model.tensors().items()}
        else:
            progress.epochs_since_best += 1
        return better

    @property
    def reached(self) -> bool:
        """Whether the newest validation metric has reached the target."""
        target, validation = self.recipe.target, self.progress.validation
        return target is not None and validation is not None and self._sign * (self._metric(validation) - target) >= 0

    @property
    def stopped(self) -> bool:
        """Whether target or patience end training early."""
        patience = self.recipe.patience
        return self.reached or (patience is not None and self.progress.epochs_since_best >= patience)

    @property
    def _sign(self) -> int:
        return 1 if self.task.higher_is_better else -1

    def _metric(self, values: dict[str, float]) -> float:
        if self.task.metric not in values:
            raise TaskError(
                f"the task's metric {self.task.metric!r} must be among its numbers, got {', '.join(values)}"
            )
        return values[self.task.metric]

    def _result(self, began: float) -> Result:
        progress, recipe = self.progress, self.recipe
        with self.strategy.whole() as model:
            weights_sha256 = sha256(model.tensors())
        best_sha256 = None
        reached = self.reached
        if self.best and recipe.patience is not None:
            self.strategy.load(self.best)
            best_sha256 = sha256(self.best)
            progress.validation = self._evaluate(self.validation, "validation") if self.validation is not None else None
        with self.strategy.whole() as model, self._right_statistics(model):
            self.final = {name: tensor.clone() for name, tensor in model.tensors().items()}
        test = self._evaluate(self.test, "test")
        spent = self.pilot or Pilot(None, 0, 0, 0.0)
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
            steps=progress.step + spent.steps,
            epochs=(self.seen + spent.samples) / len(self.samples),
            samples=self.seen + spent.samples,
            optimizer=recipe.optimizer,
            lr={"base": recipe.lr, "peak": self.pace.peak(progress)},
            train=progress.train,
            validation=progress.validation,
            test=test,
            seconds=time.perf_counter() - began + spent.seconds,
            samples_per_second=self._samples_per_second(),
            exact=progress.exact,
            weights_sha256=weights_sha256,
            noise_scale=self.noise.estimate().to_json() if measured else None,
            derived=[value.to_json() for value in self.derived],
            best_sha256=best_sha256,
            target_reached=reached if recipe.target is not None else None,
        )

    def _samples_per_second(self) -> float:
        return self.seen / max(self.progress.training_seconds, 1e-9)
