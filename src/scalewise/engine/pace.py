"""Where a run is, and how fast it goes: the learning rate of each step, the progress it makes, the best epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scalewise import schedules
from scalewise.engine.parallel.workers import StepNumbers
from scalewise.errors import TaskError
from scalewise.recipe import ADAPTIVE, Recipe
from scalewise.stats.gain import GainAverage, decay, gain
from scalewise.stats.noise_scale import signal_and_noise
from scalewise.tasks.task import Task


@dataclass
class Progress:
    """Where a run is: everything that a resumed run continues from, besides tensors."""

    step: int = 0
    train_rows: list[list[float]] = field(default_factory=list)  # (total, weight) sums since the last epoch record
    names: list[str] = field(default_factory=list)  # what they are of
    train: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] | None = None
    best_value: float | None = None
    best_step: int | None = None
    epochs_since_best: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    exact: bool = True
    learned: float = 0.0  # in single-worker samples: what schedules are functions of
    lr: float = 0.0  # of the last step
    peak_lr: float = 0.0
    gain_noise: float = 0.0  # AdaScale's averages
    gain_signal: float = 0.0
    gain_steps: int = 0


class Pace:
    """Schedules as functions of progress; under AdaScale, a step counts as many steps as its gain."""

    def __init__(self, recipe: Recipe, samples: int, cuts: schedules.Cuts) -> None:
        self._recipe, self._samples, self._cuts = recipe, samples, cuts
        self._schedule = schedules.build(recipe, samples)
        self._adapts = recipe.lr_rule == "adascale"
        self._decay = decay(recipe.workers, recipe.total_steps(samples))
        single = recipe.total_steps(samples) * recipe.worker_batch
        self.total = float(single if self._adapts else cuts.start(cuts.total_steps))

    def advance(self, progress: Progress, numbers: StepNumbers) -> tuple[float, float | None]:
        """Count a step whose gradients are known; returns its learning rate and, under AdaScale, its gain.

        The rate is the schedule's in the middle of the step's progress.
        """
        step_gain = self._gain(progress, numbers) if self._adapts else None
        if step_gain is None:
            step_progress = float(self._cuts.samples(progress.step))
        else:
            step_progress = step_gain * self._recipe.worker_batch
        lr = self._schedule(progress.learned + step_progress / 2)
        if step_gain is not None:
            lr *= math.sqrt(step_gain) if self._recipe.optimizer in ADAPTIVE else step_gain
        progress.step += 1
        progress.learned += step_progress
        progress.lr = lr
        progress.peak_lr = max(progress.peak_lr, lr)
        return lr, step_gain

    def peak(self, progress: Progress) -> float:
        """The largest learning rate: by plan, or under AdaScale the largest so far."""
        return progress.peak_lr if self._adapts else self._recipe.lr * self._recipe.lr_factor

    def _gain(self, progress: Progress, numbers: StepNumbers) -> float:
        """AdaScale's gain, which waits for the step's norms; 1 for a single worker."""
        recipe = self._recipe
        if recipe.workers == 1:
            return 1.0
        assert numbers.squared_norm is not None
        groups = self._cuts.gradients(progress.step)
        mean_square = sum(float(worker.squared_norms) for worker in numbers.read()) / groups
        signal, noise = signal_and_noise(
            mean_square, float(numbers.squared_norm), groups, self._cuts.micro_batch, population=self._samples
        )
        average = GainAverage(progress.gain_noise, progress.gain_signal, progress.gain_steps)
        average.observe(signal, noise, self._decay)
        progress.gain_noise, progress.gain_signal, progress.gain_steps = average.noise, average.signal, average.steps
        return gain(average.noise, average.signal, recipe.workers, recipe.worker_batch)


class Selection:
    """Which epoch is the best by validation data, and whether that ends training early."""

    def __init__(self, task: Task, recipe: Recipe) -> None:
        self._name, self._recipe = task.metric, recipe
        self._sign = 1 if task.higher_is_better else -1

    def observe(self, progress: Progress, validation: dict[str, float]) -> bool:
        """Note an epoch's metric; returns whether it is the best so far."""
        value = self._metric(validation)
        better = math.isfinite(value) and (
            progress.best_value is None or self._sign * value > self._sign * progress.best_value
        )
        if better:
            progress.best_value, progress.best_step, progress.epochs_since_best = value, progress.step, 0
        else:
            progress.epochs_since_best += 1
        return better

    def reached(self, progress: Progress) -> bool:
        """Whether the newest validation metric has reached the target."""
        target, validation = self._recipe.target, progress.validation
        return target is not None and validation is not None and self._sign * (self._metric(validation) - target) >= 0

    def stopped(self, progress: Progress) -> bool:
        """Whether target or patience end training early."""
        patience = self._recipe.patience
        return self.reached(progress) or (patience is not None and progress.epochs_since_best >= patience)

    def _metric(self, values: dict[str, float]) -> float:
        if self._name is None or self._name not in values:
            raise TaskError(f"the task's metric {self._name!r} must be among its numbers, got {', '.join(values)}")
        return values[self._name]
