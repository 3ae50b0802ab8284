"""The critical batch, measured directly: steps to one validation loss over a ladder of global batches.

At every global batch the learning rate is tuned with the same budget of rates on seeds of their own, then several other
seeds are trained at the chosen rate, and the law S = S_min · (1 + B_crit ÷ B) is fitted to their medians.

- Seeds are added until the median is known well enough. On digits steps scatter by 20 % from seed to seed, and of six
  global batches left out of the law one or more were 15 % off in five sweeps of six with five seeds, in one with 40.
- The rate is constant. Under a schedule that decays, the steps to a loss depend on the length the schedule was planned
  for, which would have to be tuned for each global batch too (Shallue et al. 2019). At a constant rate every prefix of
  a run is a run in its own right, so one run tells where it first reaches the loss.
- The target is where nine tenths of what a single worker learns are learned. Later the loss hardly falls, so that where
  it first reaches a value is a matter of luck: on digits, at the loss after half the epochs, seeds differed threefold.
- Batch-norm statistics stay those of a worker: a larger global batch is more workers of the task's own worker batch.
  Only models without batch norm are tried below it, with one worker of fewer samples.
- Rungs are climbed from below. A larger global batch never needs more steps, so the steps of the rung below bound the
  budget of the next, and its rate is where the next search begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import chdtri

from scalewise.engine.data.samples import hold_out, open_samples
from scalewise.errors import TargetMissed, UsageError
from scalewise.recipe import Recipe, fitting_rule
from scalewise.runs.measure.critical import rates
from scalewise.runs.measure.critical.rates import Tried
from scalewise.runs.measure.critical.trials import Curve, Laboratory, Trial, evaluation_steps, smoothed
from scalewise.runs.measure.memory.steps import has_batch_norm
from scalewise.runs.request import Notify, check_counts, silent
from scalewise.stats.critical_batch import CriticalBatch
from scalewise.stats.interval import as_json
from scalewise.stats.steps_law import HeldOut, Law, fit_law, held_out_one_by_one
from scalewise.tasks.task import Task

SEEDS = 5  # at least
MOST_SEEDS = 64
MEDIAN_ERROR = 0.03  # of the steps: a median that is known so well gets no more seeds
POOR_ERROR = 0.05  # which is worth a word
TUNING_SEEDS = 5  # the measured ones follow; one alone may be lucky with a rate at the edge of what is stable
LEARNED_SHARE = 0.9  # of the fall of a single worker's validation loss: there is the target
BELOW, ABOVE = 2, 5  # doublings of the worker batch, down and up
LARGEST_SHARE = 0.125  # of the training data: beyond, samples repeat too often for a law that takes them as new
MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)  # their standard errors, of a normal distribution
FEWEST_RUNGS = 3  # that a law with two parameters needs
SLACK = 2.0  # times the steps of the rung below, or of the best rate so far: a run that takes longer is stopped


@dataclass(frozen=True)
class Rung:
    """What was found at one global batch."""

    global_batch: int
    workers: int
    worker_batch: int
    lr: float
    tried: dict[float, Tried]  # by rate
    steps: list[float | None]  # by seed; None where the target was not reached in the budget

    @property
    def median_steps(self) -> float:
        """The median over seeds; a run that did not get there counts as longer than all others."""
        return float(np.median([np.inf if steps is None else steps for steps in self.steps]))

    @property
    def median_error(self) -> float:
        """Standard error of the median, as a share of it."""
        return median_error(self.steps)

    @property
    def at_end(self) -> bool:
        """Whether a rate beyond those tried may be better."""
        return self.lr in (min(self.tried), max(self.tried))

    def to_json(self) -> dict[str, Any]:
        """As it stands in `rungs`."""
        tried = [{"lr": rate, **asdict(result)} for rate, result in sorted(self.tried.items())]
        samples = self.median_steps * self.global_batch
        return asdict(self) | {
            "tried": tried,
            "median_steps": self.median_steps,
            "median_error": self.median_error if math.isfinite(self.median_error) else None,
            "median_samples": samples,
            "at_end": self.at_end,
        }


@dataclass(frozen=True)
class SweepReport:
    """Steps to a validation loss by global batch, the law through them, and how it predicts what it has not seen."""

    target_loss: float
    seeds: int  # at least, at each global batch
    rungs: list[Rung]
    law: Law
    held_out: list[HeldOut]
    notes: list[str]

    @property
    def critical(self) -> CriticalBatch:
        """The critical batch."""
        return self.law.critical

    def to_json(self) -> dict[str, Any]:
        """As it stands in `sweep`."""
        return as_json(self)


def sweep(
    task: Task,
    recipe: Recipe,
    *,
    folder: Path,
    target: float | None = None,
    seeds: int | None = None,
    most_seeds: int | None = None,
    tuning_seeds: int = TUNING_SEEDS,
    global_batches: Sequence[int] | None = None,
    jobs: int | None = None,
    notify: Notify = silent,
) -> SweepReport:
    """Measure steps to a validation loss over global batches and fit the law to them.

    Arguments:
        recipe: the single-worker recipe: worker batch, optimizer, rate to start from, epochs.
        folder: stores every trial; the same call with the same folder resumes.
        target, seeds, most_seeds: the flags of `scalewise measure`.
        tuning_seeds: runs at each of the rates it is chosen from.
        global_batches: which, by default doublings around the worker batch.
        jobs: trials at the same time, by default one per core.
    """
    check_counts(seeds=seeds, tuning_seeds=tuning_seeds)
    most = most_seeds or max(MOST_SEEDS, seeds or 0)
    least = seeds or min(SEEDS, most)
    ladder = sorted(set(global_batches or default_ladder(task, recipe)))
    check_ladder(ladder, recipe)
    with Laboratory(task, folder, jobs) as laboratory:
        climb = _Climb(laboratory, constant_rate(recipe), range(tuning_seeds), least, most, notify)
        climb.begin(target, training_samples(task))
        for global_batch in ladder:
            if not climb.step_up(global_batch):
                break
    return climb.report(len(ladder))


def constant_rate(recipe: Recipe) -> Recipe:
    """A single worker's recipe without schedule, warm-up or rule; one thread, as several trials share the machine."""
    return recipe.replace(workers=1, lr_rule="none", schedule="constant", warmup_epochs=0.0, steps=None, patience=None,
                          target=None, threads=recipe.threads or 1)  # fmt: skip


def default_ladder(task: Task, recipe: Recipe) -> list[int]:
    """Doublings of the worker batch, up to an eighth of the training data; below it only without batch norm."""
    worker_batch = recipe.worker_batch
    down = 0 if has_batch_norm(task) else BELOW
    smaller = [worker_batch // 2**power for power in range(down, 0, -1) if worker_batch % 2**power == 0]
    larger = [worker_batch * 2**power for power in range(ABOVE + 1)]
    most = LARGEST_SHARE * training_samples(task)
    return [batch for batch in smaller + larger if batch <= most]


def training_samples(task: Task) -> int:
    """Samples that are trained on once validation data are held out."""
    samples = open_samples(task.train, 0, "training")
    return len(samples if task.validation is not None else hold_out(samples)[0])


def at_global_batch(recipe: Recipe, global_batch: int) -> Recipe:
    """As many workers of the task's own worker batch as make the global batch, or one smaller worker.

    >>> wide = at_global_batch(Recipe(worker_batch=32), 128)
    >>> wide.workers, wide.worker_batch, at_global_batch(Recipe(worker_batch=32), 8).worker_batch
    (4, 32, 8)
    """
    if global_batch < recipe.worker_batch:
        return recipe.replace(worker_batch=global_batch, micro_batch=None, batch_norm="worker")
    return recipe.replace(workers=global_batch // recipe.worker_batch)


def check_ladder(ladder: Sequence[int], recipe: Recipe) -> None:
    """Refuse global batches that cannot be trained, or too few of them."""
    uneven = [batch for batch in ladder if batch < 1 or (batch > recipe.worker_batch and batch % recipe.worker_batch)]
    if uneven:
        raise UsageError(
            f"a global batch above the worker batch must be a multiple of it ({recipe.worker_batch}), got {uneven[0]}"
        )
    if len(ladder) < FEWEST_RUNGS:
        raise UsageError(
            f"a sweep needs at least {FEWEST_RUNGS} global batches, got {', '.join(map(str, ladder))}; lower "
            f"--worker-batch (with batch norm none is tried below it, and none above an eighth of the training data)"
        )


@dataclass
class _Climb:
    """A ladder being climbed: the rungs so far, and what they say of the next one."""

    _laboratory: Laboratory
    _recipe: Recipe
    _tuning: range
    _seeds: int
    _most_seeds: int
    _notify: Notify
    _rungs: list[Rung] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def begin(self, target: float | None, samples: int) -> None:
        """Train one worker at its own rate, to choose the target or to see how long it takes to a given one."""
        budget = max(2, round(self._recipe.epochs * (samples / self._recipe.worker_batch)))
        name = "reference" if target is None else f"reference-{target:.6g}"
        recipe = self._recipe.replace(steps=budget, seed=0)
        trial = Trial(name, recipe, evaluation_steps(budget, budget), budget, target)
        (curve,) = self._laboratory.curves([trial])
        if curve.ended == "diverged":
            raise TargetMissed(
                f"the single worker must learn at its own learning rate, it diverged at {self._recipe.lr:g}; lower --lr"
            )
        first = curve.points[0].loss
        if target is not None and first <= target:
            raise UsageError(f"the target must be below the validation loss at the start ({first:.4g}), got {target:g}")
        self._target = fitting_target(curve) if target is None else target
        if self._target >= first:
            raise TargetMissed(
                f"the single worker must learn something at its own learning rate, its validation loss began at "
                f"{first:.6g} and was {curve.least:.6g} at best; raise --lr or --epochs, or give --target"
            )
        self._reference = curve.steps_to(self._target) or float(budget)
        self._least = curve.least
        self._notify(f"one worker at its own rate: {self._reference:,.0f} steps to validation loss {self._target:.4g}")

    def step_up(self, global_batch: int) -> bool:
        """Measure one more rung; says whether it was reached."""
        base = at_global_batch(self._recipe, global_batch)
        tried = self._tune(base)
        lr = rates.chosen(tried)
        if lr is None:
            self._notes.append(f"global batch {global_batch} did not reach the target at any of {len(tried)} rates")
            return False
        fewest = min(result.steps for result in tried.values() if result.works)
        steps = self._measure(base, lr, fewest)
        rung = Rung(global_batch, base.workers, base.worker_batch, lr, tried, steps)
        if not np.isfinite(rung.median_steps):
            arrived = sum(value is not None for value in steps)
            self._notes.append(f"global batch {global_batch} reached the target with {arrived} of {len(steps)} seeds")
            return False
        self._rungs.append(rung)
        self._notify(
            f"global batch {global_batch:,}: {rung.median_steps:,.0f} steps at learning rate {lr:g} "
            f"({len(steps)} seed{'' if len(steps) == 1 else 's'})"
        )
        return True

    def _measure(self, base: Recipe, lr: float, fewest: float) -> list[float | None]:
        """Steps to the target by seed, of as many seeds as their scatter asks for."""
        budget = round(SLACK * fewest) + 1
        steps: list[float | None] = []
        wanted = self._seeds
        while len(steps) < wanted:
            first = self._tuning.stop
            trials = [self._trial(base, lr, seed, fewest, budget) for seed in range(first + len(steps), first + wanted)]
            steps += [curve.steps_to(self._target) for curve in self._laboratory.curves(trials)]
            wanted = min(fitting_seeds(steps), self._most_seeds)
        return steps

    def _tune(self, base: Recipe) -> dict[float, Tried]:
        """What the same number of learning rates give at every global batch."""
        expected, suggested = self._expected(base)
        budget = round(SLACK * expected) + 1
        tried = self._try(base, rates.first_rates(suggested), expected, budget)
        fewest = min((result.steps for result in tried.values() if result.works), default=expected)
        return tried | self._try(base, rates.next_rates(tried), fewest, min(budget, round(SLACK * fewest) + 1))

    def _expected(self, base: Recipe) -> tuple[float, float]:
        """At most so many steps, and the rate to begin with: from the rung below, or from the single worker."""
        if self._rungs:
            below = self._rungs[-1]
            return below.median_steps, below.lr
        ratio = base.global_batch / self._recipe.worker_batch
        factor = math.sqrt(ratio) if fitting_rule(base) == "sqrt" else ratio
        return self._reference * max(1.0, 1 / ratio), self._recipe.lr * factor

    def _try(self, base: Recipe, some: Sequence[float], expected: float, budget: int) -> dict[float, Tried]:
        trials = [self._trial(base, lr, seed, expected, budget) for lr in some for seed in self._tuning]
        curves = self._laboratory.curves(trials)
        self._least = min(self._least, *(curve.least for curve in curves))
        steps = [curve.steps_to(self._target) for curve in curves]
        by_rate = [steps[first : first + len(self._tuning)] for first in range(0, len(steps), len(self._tuning))]
        return {lr: rates.judged(found, budget) for lr, found in zip(some, by_rate, strict=True)}

    def _trial(self, base: Recipe, lr: float, seed: int, expected: float, budget: int) -> Trial:
        recipe = base.replace(lr=lr, seed=seed, steps=budget)
        name = f"batch{base.global_batch}-lr{lr:g}-seed{seed}"
        return Trial(name, recipe, evaluation_steps(expected, budget), budget, self._target)

    def report(self, wanted: int) -> SweepReport:
        """The law through the rungs; too few of them are an error."""
        if len(self._rungs) < FEWEST_RUNGS:
            why = f"; {self._notes[-1]}, so larger ones were not tried" if self._notes else ""
            raise TargetMissed(
                f"validation loss {self._target:.4g} must be reached at {FEWEST_RUNGS} global batches or more, it was "
                f"at {len(self._rungs)} of {wanted} (the best loss of any trial was {self._least:.4g}){why}; give a "
                f"higher target, more --epochs or more --seeds"
            )
        notes = self._notes + [_uncertain(rung) for rung in self._rungs if rung.median_error > POOR_ERROR]
        notes += [
            f"at global batch {rung.global_batch} the best rate was the last one tried, {rung.lr:g}; the steps there "
            f"may be too many"
            for rung in self._rungs
            if rung.at_end
        ]
        runs = [(rung.global_batch, rung.median_steps) for rung in self._rungs]
        return SweepReport(self._target, self._seeds, self._rungs, fit_law(runs), held_out_one_by_one(runs), notes)


def _uncertain(rung: Rung) -> str:
    """A note on a median that is not known well."""
    if math.isfinite(rung.median_error):
        what = f"of {len(rung.steps)} seeds is known to {rung.median_error:.0%} only"
    elif len(rung.steps) == 1:
        what = "is that of one seed, which says nothing of its error"
    else:
        what = f"of {len(rung.steps)} seeds has no upper end, as some did not arrive"
    return f"at global batch {rung.global_batch} the median {what}; raise --most-seeds"


def median_error(steps: Sequence[float | None]) -> float:
    """Standard error of the median of log steps: 1.25 times the mean's, or what its neighbours say if runs are missing.

    The median of all runs lies about √n ÷ 2 ranks from that of n, whatever their distribution; a run that did not
    arrive ranks last.

    >>> round(median_error([90.0, 100.0, 110.0, 95.0, 105.0]), 3), median_error([90.0, 100.0, 110.0, None, None])
    (0.044, inf)
    """
    logs = sorted(math.inf if value is None else math.log(value) for value in steps)
    arrived = [value for value in logs if value < math.inf]
    if len(arrived) < 2:
        return math.inf
    error = MEDIAN_TO_MEAN * float(np.std(arrived, ddof=1)) / math.sqrt(len(arrived))
    if len(arrived) == len(logs):
        return error
    middle, reach = (len(logs) - 1) / 2, math.sqrt(len(logs)) / 2
    below, above = logs[max(0, math.floor(middle - reach))], logs[min(len(logs) - 1, math.ceil(middle + reach))]
    return max(error, (above - below) / 2)


def fitting_seeds(steps: Sequence[float | None]) -> int:
    """How many seeds bring the error of the median down; at least five, at most twice as many as there are.

    Few seeds may lie close together by luck, so their scatter counts with its upper end of nine in ten.

    >>> fitting_seeds([100.0, 100.5, 101.0, 99.5, 99.0]), fitting_seeds([90.0, 100.0, 110.0, 95.0, 105.0])
    (5, 10)
    >>> fitting_seeds([50.0]), fitting_seeds([None] * 5)  # where none arrives none will
    (5, 5)
    """
    if len(steps) < SEEDS:
        return SEEDS
    arrived = sum(value is not None for value in steps)
    if not arrived:
        return len(steps)
    luck = math.sqrt((arrived - 1) / chdtri(arrived - 1, 0.9)) if arrived > 1 else 1.0
    error = luck * median_error(steps)
    return len(steps) if error <= MEDIAN_ERROR else math.ceil(len(steps) * min(2.0, (error / MEDIAN_ERROR) ** 2))


def fitting_target(curve: Curve) -> float:
    """The loss at which nine tenths of what is learned are learned, rounded up a little."""
    losses = [loss for _, loss in smoothed(curve.points)]
    fall = losses[0] - min(losses)
    return rounded_up(losses[0] - LEARNED_SHARE * fall, fall)


def rounded_up(loss: float, fall: float) -> float:
    """The next number of three digits, of the loss or of its fall, so that the target can be read, and given again.

    >>> rounded_up(0.123401, fall=2.0), rounded_up(2.21463, fall=0.0216), rounded_up(20_004.2, fall=158.0)
    (0.124, 2.2147, 20005.0)
    """
    sizes = [size for size in (abs(loss), fall) if size > 0]
    unit = 10.0 ** (math.floor(math.log10(min(sizes))) - 2) if sizes else 1.0
    return float(f"{math.ceil(loss / unit) * unit:.12g}")
