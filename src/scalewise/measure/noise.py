"""The noise scale over a training: at its start, in the middle, at its end, and on average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scalewise.engine import streams
from scalewise.engine.loop import Training
from scalewise.engine.placement import DeviceName, Placement
from scalewise.errors import TaskError
from scalewise.measure.frozen import BLOCKS, GroupGradients, PooledNoise, Table, preconditioners
from scalewise.noise.estimate import NoiseEstimate, rounded_up, weighted_mean
from scalewise.noise.interval import Interval
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

STAGES = ("start", "quarter", "middle", "three quarters", "end")
LEAST_GROUPS = 4
MOST_GROUP_SAMPLES = 16  # smaller groups tell more of the noise, larger ones are faster
FIRST_SAMPLES, MOST_SAMPLES = 2048, 32768  # looked at in a stage
MOST_PASSES = 4  # over data so few that more of them are needed
TIGHT_RATIO = 1.5  # between the ends of the interval: then a stage is done

Notify = Callable[[str], None]


@dataclass(frozen=True)
class StageNoise:
    """The noise scale at one point of the training, from so many samples that were drawn there."""

    name: str
    step: int
    samples: int
    estimate: NoiseEstimate
    preconditioned: NoiseEstimate | None

    def to_json(self) -> dict[str, Any]:
        """As part of the report."""
        return {
            "name": self.name,
            "step": self.step,
            "samples": self.samples,
            "noise_scale": self.estimate.to_json(),
            "preconditioned": _json(self.preconditioned),
        }


@dataclass(frozen=True)
class LayerNoise:
    """The noise scale of one parameter's gradient, on average over the training."""

    name: str
    estimate: NoiseEstimate

    def to_json(self) -> dict[str, Any]:
        """As part of the report."""
        return {"name": self.name, "noise_scale": self.estimate.to_json()}


@dataclass(frozen=True)
class NoiseReport:
    """The noise scale of a task: on average over its training, and at points of it."""

    estimate: NoiseEstimate
    preconditioned: NoiseEstimate | None
    stages: tuple[StageNoise, ...]
    layers: tuple[LayerNoise, ...]
    steps: int
    group_samples: int

    @property
    def used(self) -> NoiseEstimate:
        """The one that says how large a global batch is worth it: in the coordinates of the optimizer."""
        return self.estimate if self.preconditioned is None else self.preconditioned

    @property
    def verdict(self) -> str:
        """Of the one that is used."""
        return self.used.verdict

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "noise_scale": self.used.to_json(),
            "verdict": self.verdict,
            "plain": self.estimate.to_json(),
            "preconditioned": _json(self.preconditioned),
            "stages": [stage.to_json() for stage in self.stages],
            "layers": [layer.to_json() for layer in self.layers],
            "steps": self.steps,
            "group_samples": self.group_samples,
        }


def _json(estimate: NoiseEstimate | None) -> dict[str, float | bool | None] | None:
    return None if estimate is None else estimate.to_json()


def measure_noise(
    task: Task,
    recipe: Recipe,
    *,
    steps: int | None = None,
    layers: bool = False,
    device: DeviceName = "auto",
    notify: Notify = lambda line: None,
) -> NoiseReport:
    """Train the recipe with one worker and look at the gradients of fresh samples at five points of it.

    The average is that over steps, by which the noise scale enters the number of steps of a training at global batch
    B: S = S_min·(1 + B_noise ÷ B), summed along the way. Looking leaves no trace in the training.

    Arguments:
        task, recipe: what is trained, and how; of several workers one is enough to measure.
        steps: of the training, if not the recipe's own.
        layers: also every parameter's own noise scale.
        device: where.
        notify: told of each stage.
    """
    trained = recipe.replace(workers=1, lr_rule="none", patience=None, target=None)
    trained = trained if steps is None else trained.replace(steps=steps)
    with Training(
        dataclasses.replace(task, validation=None), trained, Placement(device=device), alone=True
    ) as training:
        looks = [*_looks(training, notify)]
        names = [*training.strategy.model.parameters]
    moved = [look for look in looks if look.preconditioned is not None]
    return NoiseReport(
        estimate=_average([(look, look.plain.estimate()) for look in looks]),
        preconditioned=_average([(look, look.preconditioned.estimate()) for look in moved if look.preconditioned])
        if moved
        else None,
        stages=tuple(look.stage() for look in looks),
        layers=tuple(_layer(name, number, looks) for number, name in enumerate(names)) if layers else (),
        steps=looks[-1].step,
        group_samples=looks[-1].plain.group_samples,
    )


@dataclass(frozen=True)
class _Look:
    """What was seen at one point of the training."""

    name: str
    step: int
    global_batch: int
    plain: Table
    preconditioned: Table | None

    def stage(self) -> StageNoise:
        preconditioned = None if self.preconditioned is None else self._in_steps(self.preconditioned.estimate())
        estimate = self._in_steps(self.plain.estimate())
        return StageNoise(self.name, self.step, self.plain.samples, estimate, preconditioned)

    def _in_steps(self, found: NoiseEstimate) -> NoiseEstimate:
        """What is missing, counted in steps of the training instead of blocks of groups."""
        if found.more_steps is None:
            return found
        block_steps = self.plain.samples / len(self.plain.counts) / self.global_batch
        return dataclasses.replace(found, more_steps=rounded_up(found.more_steps * block_steps))

    @property
    def is_tight(self) -> bool:
        tables = [self.plain] if self.preconditioned is None else [self.plain, self.preconditioned]
        found = [table.estimate() for table in tables]
        return all(Interval(one.low, one.high).within(TIGHT_RATIO) for one in found)


def _looks(training: Training, notify: Notify) -> Iterator[_Look]:
    """Train from stage to stage, and look at each."""
    total = training.cuts.total_steps
    records = training.records()
    for name, step in _stages(total).items():
        while training.progress.step < step:
            next(records)
        look = _look(training, name)
        notify(f"{name} (step {training.progress.step:,} of {total:,}): {_words(look.stage())}")
        yield look


def _stages(total: int) -> dict[str, int]:
    """Names and steps; only start and end where steps are too few for more.

    >>> _stages(100)
    {'start': 0, 'quarter': 25, 'middle': 50, 'three quarters': 75, 'end': 100}
    """
    parts = len(STAGES) - 1
    chosen = STAGES if total >= parts else (STAGES[0], STAGES[-1])
    return {name: round(total * STAGES.index(name) / parts) for name in chosen}


def _words(stage: StageNoise) -> str:
    shown = stage.estimate if stage.preconditioned is None else stage.preconditioned
    kind = "noise scale" if stage.preconditioned is None else "preconditioned noise scale"
    if shown.value is None:
        return f"{kind}: {shown.verdict}"
    high = "∞" if shown.high is None else f"{shown.high:,.0f}"
    return f"{kind} {shown.value:,.0f} ({shown.low or 0.0:,.0f} to {high})"


def _look(training: Training, name: str) -> _Look:
    """Look at more and more groups until the interval is tight, or enough has been seen."""
    recipe, population = training.recipe, len(training.samples)
    group_samples = _group_samples(training)
    gradients = GroupGradients(training, group_samples, streams.key("noise", recipe.seed, name))
    factors = preconditioners(training)
    pooled = PooledNoise(group_samples, population, factors, finite=training.task.augment is None)
    *_, last = targets = _targets(gradients.groups_per_pass, group_samples)
    for target in targets:
        for gradient in gradients.take(pooled.groups, target - pooled.groups):
            pooled.add(gradient)
        look = _Look(name, training.progress.step, recipe.global_batch, pooled.table(), pooled.preconditioned_table())
        if look.is_tight or target == last:
            break
    return look


def _targets(groups_per_pass: int, group_samples: int) -> list[int]:
    """Groups after which to see whether it is enough: a part of the data, or whole passes.

    >>> _targets(groups_per_pass=3750, group_samples=16), _targets(groups_per_pass=89, group_samples=16)
    ([128, 256, 512, 1024, 2048], [89, 178, 356])
    """
    first, most = (max(BLOCKS, samples // group_samples) for samples in (FIRST_SAMPLES, MOST_SAMPLES))
    doublings = [first * 2**power for power in range(most.bit_length())]
    parts = [count for count in doublings if count < groups_per_pass]
    passes = [groups_per_pass * count for count in (1, 2, MOST_PASSES)]
    return [count for count in (*parts, *passes) if count <= most]


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
            f"training samples in groups of {size}; lower --worker-batch, or use more data"
        )
    return size


def _average(found: list[tuple[_Look, NoiseEstimate]]) -> NoiseEstimate:
    """The mean over steps, straight lines between the stages."""
    average = weighted_mean([one for _, one in found], _trapezoid([look.step for look, _ in found]))
    if average.enough or average.problem is not None:
        return average
    missing = [look._in_steps(one).more_steps for look, one in found if not one.enough]
    known = [steps for steps in missing if steps is not None]
    return dataclasses.replace(average, more_steps=max(known) if known else None)


def _trapezoid(steps: list[int]) -> list[float]:
    """Weights of the trapezoid rule.

    >>> _trapezoid([0, 1, 2])
    [0.25, 0.5, 0.25]
    """
    total = steps[-1] - steps[0]
    if not total:
        return [1 / len(steps)] * len(steps)
    before = [steps[0], *steps[:-1]]
    after = [*steps[1:], steps[-1]]
    return [(end - start) / (2 * total) for start, end in zip(before, after, strict=True)]


def _layer(name: str, number: int, looks: list[_Look]) -> LayerNoise:
    return LayerNoise(name, _average([(look, look.plain.estimate([number])) for look in looks]))
