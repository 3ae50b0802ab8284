"""The noise scale over a training: at its start, in the middle, at its end, and on average."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scalewise.engine.data import streams
from scalewise.engine.loop import Training
from scalewise.engine.placement import DeviceName, Placement
from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.runs.measure.frozen import BLOCKS, GroupGradients, PooledNoise, Table, estimate, preconditioners
from scalewise.runs.request import Notify, silent
from scalewise.stats.interval import as_json
from scalewise.stats.noise_scale import ENOUGH_RATIO, NoiseEstimate, rounded_up, trapezoid_weights, weighted_mean
from scalewise.tasks.task import Task

LEAST_STEPS = 20  # of a training, to look at it in between
POINTS, WINDOW = 4, 0.1  # of a stage: so many steps to look at, in that share of the training
LEAST_GROUPS = 4
MOST_GROUP_SAMPLES = 16  # smaller groups tell more of the noise, larger ones are faster
FIRST_SAMPLES, MOST_SAMPLES = 1024, 8192  # looked at in a step
LAST_SAMPLES = 32768  # where those are not enough
MOST_PASSES = 2  # over data so few that one is not enough, if a sample is always the same
TIGHT_RATIO = 1.5  # between the ends of the interval: then a step is done


@dataclass(frozen=True)
class StageNoise:
    """The noise scale at one point of the training, from the samples that were drawn there."""

    name: str
    step: int
    samples: int
    estimate: NoiseEstimate
    preconditioned: NoiseEstimate | None

    @property
    def used(self) -> NoiseEstimate:
        """In the coordinates of the optimizer, where they are known."""
        return self.preconditioned or self.estimate

    def to_json(self) -> dict[str, Any]:
        """As part of the report."""
        content = as_json(self)
        return {"noise_scale": content.pop("estimate"), "verdict": self.used.verdict, **content}


@dataclass(frozen=True)
class LayerNoise:
    """The noise scale of one parameter's plain gradient, on average over the training, whatever the optimizer."""

    name: str
    estimate: NoiseEstimate

    def to_json(self) -> dict[str, Any]:
        """As part of the report."""
        return {"name": self.name, "gradients": "plain", "noise_scale": self.estimate.to_json()}


@dataclass(frozen=True)
class NoiseReport:
    """The noise scale of a task: on average over its training, and at points of it.

    With an Adam-like optimizer all averages leave out the start, where there is nothing to precondition with, so that
    the plain and the preconditioned one are of the same stages.
    """

    estimate: NoiseEstimate
    preconditioned: NoiseEstimate | None
    stages: tuple[StageNoise, ...]
    layers: tuple[LayerNoise, ...]
    steps: int
    group_samples: int

    @property
    def averaged(self) -> tuple[str, ...]:
        """Names of the stages that the averages are over: those that have a noise scale."""
        return tuple(stage.name for stage in self._comparable if stage.estimate.low is not None)

    @property
    def along(self) -> list[tuple[int, NoiseEstimate]]:
        """(step, noise scale) of the stages, in the coordinates of the optimizer, where there are any."""
        return [(stage.step, stage.used) for stage in self._comparable]

    @property
    def _comparable(self) -> list[StageNoise]:
        """Stages in the same coordinates as the average."""
        return [stage for stage in self.stages if self.preconditioned is None or stage.preconditioned is not None]

    @property
    def used(self) -> NoiseEstimate:
        """The one that says how large a global batch is worth it: in the coordinates of the optimizer."""
        return self.preconditioned or self.estimate

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        content = as_json(self)
        used = {"noise_scale": self.used.to_json(), "verdict": self.used.verdict, "plain": content.pop("estimate")}
        content["stages"] = [stage | {"averaged": stage["name"] in self.averaged} for stage in content["stages"]]
        return used | content


def measure_noise(
    task: Task,
    recipe: Recipe,
    *,
    layers: bool = False,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> NoiseReport:
    """Train the recipe with one worker and look at the gradients of fresh samples in five stages of it.

    The average is that over steps, by which the noise scale enters the number of steps of a training at global batch
    B: S = S_min·(1 + B_noise ÷ B), summed along the way. Stages without a gradient or without noise are left out of it.
    Looking leaves no trace in the training. With `layers` every parameter's own noise scale is measured too.
    """
    with _single(task, recipe, device) as training:
        looks = [*_looks(training, notify)]
        names = [*training.strategy.model.parameters]
    moved = [look for look in looks if look.preconditioned]
    averaged = moved or looks
    return NoiseReport(
        estimate=_average([(look, estimate(look.plain)) for look in averaged]),
        preconditioned=_average([(look, estimate(look.preconditioned)) for look in moved]) if moved else None,
        stages=tuple(look.stage() for look in looks),
        layers=tuple(
            LayerNoise(name, _average([(look, estimate(look.plain, [number])) for look in averaged]))
            for number, name in enumerate(names if layers else ())
        ),
        steps=training.progress.step,
        group_samples=looks[-1].plain[0].group_samples,
    )


@dataclass(frozen=True)
class _Look:
    """What was seen at some neighbouring steps of the training."""

    name: str
    steps: tuple[int, ...]
    plain: tuple[Table, ...]
    preconditioned: tuple[Table, ...]

    @property
    def step(self) -> int:
        return round(sum(self.steps) / len(self.steps))

    @property
    def samples(self) -> int:
        return sum(table.samples for table in self.plain)

    def stage(self) -> StageNoise:
        plain, preconditioned = (estimate(tables) if tables else None for tables in (self.plain, self.preconditioned))
        assert plain is not None
        found = [None if one is None else _in_samples(one, self.missing(one)) for one in (plain, preconditioned)]
        return StageNoise(self.name, self.step, self.samples, found[0] or plain, found[1])

    def missing(self, found: NoiseEstimate) -> int | None:
        """What is missing, counted in samples at each point instead of blocks of groups."""
        if found.more_steps is None:
            return None
        blocks = sum(len(table.counts) for table in self.plain)
        return rounded_up(found.more_steps * self.samples / blocks / len(self.plain))


def _in_samples(found: NoiseEstimate, missing: int | None) -> NoiseEstimate:
    """An estimate that says what helps if it is not enough: more steps of the training are not more samples seen."""
    if found.enough or found.problem is not None:
        return found
    wanted = "far" if missing is None else f"about {missing:,}"
    problem = (
        f"not enough: it would take {wanted} more samples at each point; go by the lower end, or train to see "
        f"(--verify sweep)"
    )
    return dataclasses.replace(found, more_steps=None, problem=problem)


def _looks(training: Training, notify: Notify) -> Iterator[_Look]:
    """Train from stage to stage, and look at each."""
    total = training.cuts.total_steps
    records = training.records()
    for name, steps in _stages(total).items():
        seen: list[int] = []
        pooled: list[PooledNoise] = []
        for step in steps:
            while training.progress.step < step:
                next(records)
            seen.append(training.progress.step)
            pooled.append(looked_at(training, len(steps)))
        preconditioned = [table for one in pooled if (table := one.preconditioned_table()) is not None]
        plain = tuple(one.table() for one in pooled)
        look = _Look(name, tuple(seen), plain, tuple(preconditioned))
        notify(f"{name} (step {seen[-1]:,} of {total:,}): {_words(look.stage())}")
        yield look


def _stages(total: int) -> dict[str, list[int]]:
    """Steps at which to look: a single one at the start, then some in a tenth of the training each.

    A gradient's size changes a good deal from one step to the next, so that no single step stands for a stage.

    >>> _stages(100)["middle"], _stages(1)
    ([45, 48, 52, 55], {'start': [0], 'end': [1]})
    """
    windows = {"quarter": 0.2, "middle": 0.45, "three quarters": 0.7, "end": 0.9}
    chosen = windows if total >= LEAST_STEPS else {"end": windows["end"]}
    points = [number / (POINTS - 1) * WINDOW for number in range(POINTS)]
    stages = {
        name: sorted({max(1, round(total * (start + point))) for point in points}) for name, start in chosen.items()
    }
    return {"start": [0], **stages}


def _words(stage: StageNoise) -> str:
    shown = stage.used
    kind = "noise scale" if stage.preconditioned is None else "preconditioned noise scale"
    if shown.value is None:
        return f"{kind}: {shown.verdict}"
    high = "∞" if shown.high is None else f"{shown.high:,.0f}"
    return f"{kind} {shown.value:,.0f} ({shown.low or 0.0:,.0f} to {high})"


def looked_at(training: Training, points: int) -> PooledNoise:
    """Look at more and more groups until the interval is tight, or enough has been seen.

    The estimates of all `points` of a stage are put together: each may be as much less exact.
    """
    recipe, population = training.recipe, len(training.samples)
    group_samples = _group_samples(training)
    gradients = GroupGradients(training, group_samples, streams.key("noise", recipe.seed, training.progress.step))
    pooled = PooledNoise(group_samples, population, preconditioners(training))
    for first, second, groups in gradients.pairs():
        pooled.add_pair(first, second, groups)
    most = max(BLOCKS, MOST_SAMPLES // group_samples)
    for target in _targets(gradients.groups_per_pass, group_samples, anew=pooled.pairs > 0):
        wanted = TIGHT_RATIO if target <= most else ENOUGH_RATIO ** math.sqrt(points)
        tables = [pooled.table(), pooled.preconditioned_table()] if pooled.groups else []
        if tables and all(estimate([table]).within(wanted) for table in tables if table is not None):
            break
        for gradient in gradients.take(pooled.groups, target - pooled.groups):
            pooled.add(gradient)
    return pooled


def _targets(groups_per_pass: int, group_samples: int, anew: bool = False) -> list[int]:
    """Groups after which to see whether it is enough: a part of the data, or whole passes.

    More than two passes tell more only where something is drawn anew in each.

    >>> _targets(groups_per_pass=3750, group_samples=16), _targets(groups_per_pass=89, group_samples=16)
    ([64, 128, 256, 512, 1024, 2048], [64, 89, 178])
    >>> _targets(groups_per_pass=89, group_samples=16, anew=True)
    [64, 89, 178, 356, 712, 1424]
    """
    first, last = (max(BLOCKS, samples // group_samples) for samples in (FIRST_SAMPLES, LAST_SAMPLES))
    parts = [count for count in _doublings(first, last) if count < groups_per_pass]
    passes = [count for count in _doublings(groups_per_pass, last) if anew or count <= MOST_PASSES * groups_per_pass]
    return [*parts, *passes]


def _doublings(first: int, last: int) -> list[int]:
    return [first * 2**power for power in range(last.bit_length()) if first * 2**power <= last]


def _group_samples(training: Training) -> int:
    """Samples that go through the model at once: with batch norm those of the recipe, on which its gradients depend."""
    recipe, population = training.recipe, len(training.samples)
    if training.strategy.model.averages:
        size = recipe.rows
    else:
        size = max(1, min(recipe.rows, MOST_GROUP_SAMPLES, population // BLOCKS))
    if population // size < LEAST_GROUPS:
        raise TaskError(
            f"the noise scale needs the gradients of at least {LEAST_GROUPS} groups of samples, got {population} "
            f"training samples in groups of {size}; lower --worker-batch, use more data, or leave it out with "
            f"--skip noise"
        )
    return size


def check_groups(task: Task, recipe: Recipe, device: DeviceName = "auto") -> None:
    """Refuse data that are too few for the noise scale, before anything else is measured."""
    with _single(task, recipe, device) as training:
        _group_samples(training)


def _single(task: Task, recipe: Recipe, device: DeviceName) -> Training:
    """The training of one worker, without validation."""
    trained = recipe.replace(workers=1, lr_rule="none", patience=None, target=None)
    return Training(dataclasses.replace(task, validation=None), trained, Placement(device=device), alone=True)


def _average(found: list[tuple[_Look, NoiseEstimate]]) -> NoiseEstimate:
    """The mean over steps, straight lines between the stages that have a noise scale."""
    found = [(look, one) for look, one in found if one.problem is None] or found
    average = weighted_mean([one for _, one in found], trapezoid_weights([look.step for look, _ in found]))
    missing = [look.missing(one) for look, one in found if not one.enough]
    return _in_samples(average, max((samples for samples in missing if samples is not None), default=None))
