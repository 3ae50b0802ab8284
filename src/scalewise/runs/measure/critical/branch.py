"""The critical batch along training, by branching off checkpoints (Merrill et al. 2025).

From a checkpoint of the single-worker run, training goes on with k workers, that is at global batch k · B, with the
rate times √k (Adam-like optimizers) or k (the others), over the same samples of the stream for every k. As long as
k · B is below the critical batch nothing is lost by it: k* is the largest k whose loss is within 0.01 of every smaller
k, or within 1 % where losses are below 1. The checkpoints are exact, so the branch at k = 1 is the single-worker run
itself as long as its rate is constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalewise import schedules
from scalewise.errors import TargetMissed, UsageError
from scalewise.recipe import Recipe, fitting_rule
from scalewise.records import finite
from scalewise.runs.measure.critical.sweep import training_samples
from scalewise.runs.measure.critical.trials import Branch, Curve, Laboratory, Trial
from scalewise.runs.request import Notify, check_counts, silent
from scalewise.stats.critical_batch import CriticalBatch
from scalewise.stats.interval import as_json, mean_interval
from scalewise.tasks.task import Task

TOLERANCE = 0.01  # of a loss of 1 or more, as in the paper, where losses are 2 to 4 nats …
TOLERANCE_SHARE = 0.01  # … and this share of a smaller one: a mean squared error may be 0.001 as a whole
STAGES = {"start": 0.1, "middle": 0.4, "end": 0.7}  # share of the single-worker run at which branches begin
LENGTH = 0.25  # of the single-worker run, that a branch goes on for
MOST_WORKERS = 64
FEWEST_STEPS = 8  # of the widest branch
LAST_EVALUATIONS = 3  # after steps of the widest branch, which all others end a step at too; their mean counts
SEEDS = 3


@dataclass(frozen=True)
class Stage:
    """Branches at one point of training: the mean loss after them by number of workers; None where it diverged."""

    name: str
    step: int  # of the single worker
    samples: int
    lr: float  # of k = 1
    losses: dict[int, float | None]
    harmless: int  # k*
    critical: CriticalBatch

    @property
    def tolerance(self) -> float:
        """By how much the loss may rise without being called harm."""
        return tolerance(self.losses)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `stages`."""
        losses = [{"workers": workers, "loss": loss} for workers, loss in self.losses.items()]
        return as_json(self) | {"losses": losses, "tolerance": self.tolerance}


@dataclass(frozen=True)
class BranchReport:
    """How large the global batch may be at some points of training, and over it."""

    worker_batch: int
    branch_samples: int
    seeds: int
    stages: list[Stage]

    @property
    def critical(self) -> CriticalBatch:
        """The median over the points, of value and ends alike."""
        found = [stage.critical for stage in self.stages]
        values = [math.inf if batch.value is None else batch.value for batch in found]
        highs = [math.inf if batch.high is None else batch.high for batch in found]
        lows = [batch.low or 0.0 for batch in found]
        value, low, high = finite([float(np.median(ends)) for ends in (values, lows, highs)])
        return CriticalBatch(value, low, high, "branch")

    def to_json(self) -> dict[str, Any]:
        """As it stands in `branch`."""
        tolerances = {"tolerance": TOLERANCE, "tolerance_share": TOLERANCE_SHARE}
        return as_json(self) | tolerances | {"critical_batch": self.critical.to_json()}


def branch(
    task: Task,
    recipe: Recipe,
    *,
    folder: Path,
    seeds: int | None = None,
    jobs: int | None = None,
    notify: Notify = silent,
) -> BranchReport:
    """Branch off the single-worker run at several points and see how many workers do no harm.

    Arguments:
        folder: stores every run; the same call with the same folder resumes.
        seeds: single-worker runs, each with its branches; losses are their means. By default 3.
        jobs: runs at the same time, by default one per core.
    """
    check_counts(seeds=seeds)
    seeds = seeds or SEEDS
    plan = Plan.of(single(recipe), training_samples(task))
    with Laboratory(task, folder, jobs) as laboratory:
        notify(f"{seeds} single-worker run{'' if seeds == 1 else 's'}, checkpoints at {len(STAGES)} points")
        trunks = laboratory.curves([plan.trunk(seed) for seed in range(seeds)])
        if any(curve.ended == "diverged" for curve in trunks):
            raise TargetMissed(
                f"the single-worker run must not diverge, it did at learning rate {recipe.lr:g}; lower --lr"
            )
        stages = []
        for name, share in STAGES.items():
            stages.append(_stage(laboratory, plan, name, plan.position(share), seeds))
            found = stages[-1]
            notify(
                f"{name}: up to {found.harmless} workers do no harm (the loss within {found.tolerance:.2g}), "
                f"critical batch {found.critical}"
            )
    return BranchReport(recipe.worker_batch, plan.length, seeds, stages)


def single(recipe: Recipe) -> Recipe:
    """The single-worker run, with its own schedule; one thread, as several runs share the machine."""
    schedule = "constant" if recipe.schedule == "growth" else recipe.schedule
    return recipe.replace(workers=1, lr_rule="none", schedule=schedule, patience=None, target=None,
                          threads=recipe.threads or 1)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is trained: the single-worker run, and branches of the same samples for every number of workers."""

    recipe: Recipe  # of the single worker
    samples: int  # in the training data
    counts: tuple[int, ...]  # of workers

    @classmethod
    def of(cls, recipe: Recipe, samples: int) -> Plan:
        """As many workers as a branch has room for."""
        length = LENGTH * recipe.total_steps(samples)
        most = min(MOST_WORKERS, int(length / FEWEST_STEPS))
        if most < 2:
            raise UsageError(
                f"branches need a single-worker run of {math.ceil(2 * FEWEST_STEPS / LENGTH)} steps or more, this one "
                f"has {recipe.total_steps(samples)}; raise --epochs or lower --worker-batch"
            )
        return cls(recipe, samples, tuple(2**power for power in range(most.bit_length()) if 2**power <= most))

    @property
    def unit(self) -> int:
        """Samples of a step of the widest branch: positions and lengths are multiples of it."""
        return self.counts[-1] * self.recipe.worker_batch

    @property
    def total(self) -> int:
        """Samples of the single-worker run."""
        return self.recipe.total_steps(self.samples) * self.recipe.worker_batch

    @property
    def length(self) -> int:
        """Samples of a branch."""
        return max(LAST_EVALUATIONS, int(LENGTH * self.total / self.unit)) * self.unit

    def position(self, share: float) -> int:
        """Samples before a branch."""
        return max(1, round(share * self.total / self.unit)) * self.unit

    def lr(self, position: int) -> float:
        """The single worker's rate there."""
        return schedules.build(self.recipe, self.samples)(position)

    def trunk(self, seed: int) -> Trial:
        """The single-worker run up to its last checkpoint; its schedule is that of the whole run."""
        keep = tuple(self.position(share) // self.recipe.worker_batch for share in STAGES.values())
        recipe = self.recipe.replace(seed=seed)
        return Trial(f"single-seed{seed}", recipe, keep, keep[-1], keep=keep)

    def branch(self, position: int, workers: int, seed: int) -> Trial:
        """One branch."""
        size = workers * self.recipe.worker_batch
        stop = position + self.length
        ends = tuple((stop - back * self.unit) // size for back in reversed(range(LAST_EVALUATIONS)))
        recipe = self.recipe.replace(
            workers=workers, lr=self.lr(position), lr_rule=fitting_rule(self.recipe), schedule="constant",
            warmup_epochs=0.0, steps=stop // size, seed=seed,
        )  # fmt: skip
        begin = Branch(f"single-seed{seed}", position // self.recipe.worker_batch, position)
        return Trial(f"branch-{position}-{workers}w-seed{seed}", recipe, ends, ends[-1], branch=begin)


def _stage(laboratory: Laboratory, plan: Plan, name: str, position: int, seeds: int) -> Stage:
    trials = [plan.branch(position, workers, seed) for workers in reversed(plan.counts) for seed in range(seeds)]
    curves = dict(zip([trial.name for trial in trials], laboratory.curves(trials), strict=True))
    by_seed = {
        workers: _losses([curves[plan.branch(position, workers, seed).name] for seed in range(seeds)])
        for workers in plan.counts
    }
    losses = {workers: None if found is None else float(np.mean(found)) for workers, found in by_seed.items()}
    most, batch = largest_harmless(losses), plan.recipe.worker_batch
    low, high = sure_bounds(by_seed)
    value = float(most * batch) if most < max(plan.counts) else None
    critical = CriticalBatch(value, float(low * batch), None if high is None else float(high * batch), "branch")
    return Stage(name, position // batch, position, plan.lr(position), losses, most, critical)


def _losses(curves: Sequence[Curve]) -> list[float] | None:
    """The mean over the last evaluations, by seed; None where a seed diverged."""
    if any(curve.ended == "diverged" for curve in curves):
        return None
    return [float(np.mean([point.loss for point in curve.points])) for curve in curves]


def tolerance(losses: Mapping[int, float | None]) -> float:
    """By how much a loss may rise without being called harm: 0.01, or 1 % of the smallest loss where that is less.

    >>> tolerance({1: 3.2, 2: 3.1}), tolerance({1: 0.002, 2: 0.001, 4: None})
    (0.01, 1e-05)
    """
    known = [loss for loss in losses.values() if loss is not None]
    return min(TOLERANCE, TOLERANCE_SHARE * abs(min(known))) if known else TOLERANCE


def sure_bounds(by_seed: Mapping[int, Sequence[float] | None]) -> tuple[int, int | None]:
    """The largest number of workers that surely does no harm, and the smallest that surely does, if any.

    A rise is against the best smaller number of workers, seed by seed, as branches of one seed begin at the same
    weights; sure is what its 95 % interval says (Student's t). One seed has none, so that its own rise counts.

    >>> sure_bounds({1: [1.50, 1.51], 2: [1.50, 1.51], 4: [1.58, 1.45], 8: [1.90, 1.92], 16: None})
    (2, 8)
    """
    means = {workers: None if losses is None else float(np.mean(losses)) for workers, losses in by_seed.items()}
    allowed = tolerance(means)
    rises = {workers: _rise(by_seed, means, workers) for workers in sorted(by_seed)[1:]}
    harmless = list(itertools.takewhile(lambda workers: sum(rises[workers]) <= allowed, rises))
    most = largest_harmless(means)
    harmful = [workers for workers, (rise, error) in rises.items() if workers > most and rise - error > allowed]
    return min(max(harmless, default=min(by_seed)), most), next(iter(harmful), None)


def _rise(
    by_seed: Mapping[int, Sequence[float] | None], means: Mapping[int, float | None], workers: int
) -> tuple[float, float]:
    """By how much the loss of so many workers lies above that of the best smaller number, and its uncertainty."""
    mine = by_seed[workers]
    smaller = {other: mean for other, mean in means.items() if other < workers and mean is not None}
    best = by_seed[min(smaller, key=lambda other: smaller[other])] if smaller else None
    if mine is None or best is None:
        return math.inf, 0.0
    rise = mean_interval([own - other for own, other in zip(mine, best, strict=True)])
    return rise.value, rise.high - rise.value


def largest_harmless(losses: Mapping[int, float | None]) -> int:
    """k*: the largest number of workers whose loss is within the tolerance of that of every smaller number.

    >>> largest_harmless({1: 1.50, 2: 1.49, 4: 1.498, 8: 1.55})
    4
    """
    best = math.inf
    found, allowed = min(losses), tolerance(losses)
    for workers in sorted(losses):
        loss = losses[workers]
        if loss is not None:
            if loss <= best + allowed:
                found = workers
            best = min(best, loss)
    return found
