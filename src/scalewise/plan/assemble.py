"""From records to the inputs of the planning model, each with where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from scalewise.engine.candidates import UNKNOWN, intensity
from scalewise.errors import UsageError
from scalewise.plan.hardware import Hardware
from scalewise.plan.model import Inputs, raced
from scalewise.plan.records import Known, Measured, SeenRun, TaskFacts
from scalewise.recipe import ADAPTIVE, Recipe
from scalewise.stats.critical_batch import CriticalBatch
from scalewise.stats.interval import Interval, mean_interval
from scalewise.stats.steps_law import Law, fit_law, to_go_by

NEAR = 8.0  # worker batches within this factor of the recipe's show how compute grows there
LEAST_COMPUTE_SPREAD = 0.1  # a machine is never as fast twice
Gap = Literal["noise", "throughput", "memory", "single"]
LEVEL = 0.8  # of the plan's ranges
ASSUMED_OVERLAP = (2.0, 1.0, 10.0)  # Assumption: part of the sum hides behind backward, between none and nearly all


@dataclass(frozen=True)
class Metric(Interval[float | None]):
    """A metric of some runs, with the 80 % interval of one more; one run alone has none."""

    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Metric:
        """Of runs that had these values."""
        if len(values) < 2:
            return cls(values[0], None, None, 1, level=LEVEL)
        found = mean_interval(values, LEVEL, new=True)
        return cls(found.value, found.low, found.high, len(values), level=LEVEL)


@dataclass(frozen=True)
class Assembled:
    """The model's inputs, where they come from, and why the target cannot be reached, if it cannot."""

    inputs: Inputs
    critical: CriticalBatch  # with its 95 % interval, as `measure` gives it
    notes: tuple[str, ...]
    unreachable: str | None
    curve: tuple[tuple[int, float], ...] = ()  # one worker's validation metric by step, of the newest run
    seen: Mapping[int, Metric] = field(default_factory=dict)  # what several workers really came to, by their number


def missing(
    facts: TaskFacts, recipe: Recipe, known: Known, target: float | None, memory_bytes: int | None = None
) -> list[Gap]:
    """What must still be measured; with the memory of a device given, records must say how memory grows."""
    found = [one for one in known.measured if one.optimizer == recipe.optimizer]
    gaps: list[Gap] = []
    by_runs = _law_of_runs(facts, recipe, known, target)
    if not any(one.noise for one in found) and (by_runs is None or not by_runs.freedom):
        gaps.append("noise")
    if not any(one.rates for one in known.measured):
        gaps.append("throughput")
    if not any(one.largest_worker_batch if memory_bytes is None else one.memory for one in known.measured):
        gaps.append("memory")
    if not [run for run in _singles(known, recipe) if target is None or run.curve]:
        gaps.append("single")
    return gaps


def assemble(
    facts: TaskFacts,
    recipe: Recipe,
    known: Known,
    hardware: Hardware,
    target: float | None = None,
    race_steps: int | None = 0,
) -> Assembled:
    """The inputs of the model from everything that is known.

    Arguments:
        facts, recipe: the task and how one worker learns it.
        known: the records; those of another worker batch, optimizer or rate are left out of what they do not fit.
        hardware: what is planned for.
        target: the validation metric that training ends at; without it training takes one worker's budget.
        race_steps: of auto's race before several workers train; 0 where they follow the noise, None where the recipe
            has a rule of its own, and several workers take one worker's samples.
    """
    steps, unreachable = _single_steps(facts, recipe, known, target)
    aim = None if unreachable else target
    noise, direct, place = _evidence(facts, recipe, known, aim)
    critical, ranges = to_go_by(noise, direct), to_go_by(noise, direct, LEVEL)
    rated = _rated(known)
    step_seconds, sample_seconds, compute_spread = _compute(
        [rate for one in rated for rate in one.rates], recipe.worker_batch
    )
    after_race = [run for run in known.runs if run.raced and run.recipe.worker_batch == recipe.worker_batch]
    alike = [*_singles(known, recipe), *after_race] if race_steps else _alike(known, recipe)
    seen = _tested(alike) if aim is None else {1: Metric(aim, aim, aim, 0, level=LEVEL)}
    accuracy = seen.pop(1, Metric(None, None, None, 0, level=LEVEL))
    largest = _largest(facts, known, hardware.memory_bytes)
    reading = [run.input_samples_per_second for run in known.runs if run.input_samples_per_second]
    overlap = ASSUMED_OVERLAP if hardware.overlap is None else (hardware.overlap,) * 3
    trained = [run.recipe for run in alike]
    swept = [one.trained_global_batch for one in known.measured]
    inputs = Inputs(
        worker_batch=recipe.worker_batch,
        single_steps=steps[0],
        single_low=steps[1],
        single_high=steps[2],
        critical_batch=critical.value,
        critical_low=ranges.low,
        critical_high=ranges.high,
        lr=recipe.lr,
        lr_power=0.5 if recipe.optimizer in ADAPTIVE else 1.0,
        step_seconds=step_seconds,
        sample_seconds=sample_seconds,
        compute_spread=compute_spread,
        parameter_bytes=facts.parameter_bytes,
        latency_seconds=hardware.link.latency_seconds,
        bytes_per_second=hardware.link.bytes_per_second,
        device_speed=hardware.device_speed,
        node_devices=hardware.node_devices,
        node_latency_seconds=hardware.node_link.latency_seconds,
        node_bytes_per_second=hardware.node_link.bytes_per_second,
        overlap=overlap[0],
        overlap_low=overlap[1],
        overlap_high=overlap[2],
        input_samples_per_second=hardware.input_samples_per_second or min(reading, default=None),
        largest_worker_batch=largest,
        price_per_hour=hardware.price_per_hour,
        accuracy=accuracy.value,
        accuracy_low=accuracy.low,
        accuracy_high=accuracy.high,
        measured_global_batch=max([recipe.worker_batch, *(one.global_batch for one in trained), *swept]),
    )
    if race_steps is None:
        inputs = replace(inputs, race_samples=1.0)
    if race_steps:
        inputs = replace(raced(inputs, intensity(UNKNOWN)), race_steps=race_steps)
    curve = next((run.curve for run in reversed(_singles(known, recipe)) if run.curve), ())
    source = _source(critical, direct, place, sorted({run.recipe.workers for run in _alike(known, recipe)}))
    notes = (f"critical batch {_shown(critical)} by {source}", *_notes(known, hardware, largest))
    return Assembled(inputs, critical, notes, unreachable, curve, seen)


def _alike(known: Known, recipe: Recipe) -> list[SeenRun]:
    """Runs of this recipe: of one worker first, then those of several that took their steps as auto does."""
    same = ("worker_batch", "optimizer", "lr", "epochs")
    found = [run for run in known.runs if all(getattr(recipe, name) == getattr(run.recipe, name) for name in same)]
    shared = [run for run in found if run.recipe.workers > 1 and run.recipe.lr_rule == "adascale"]
    return [*(run for run in found if run.recipe.workers == 1), *shared]


def _singles(known: Known, recipe: Recipe) -> list[SeenRun]:
    return [run for run in _alike(known, recipe) if run.recipe.workers == 1]


def steps_to(curve: Sequence[tuple[float, float]], target: float, higher_is_better: bool) -> float | None:
    """Steps at which a validation metric first reaches a target, on straight lines between evaluations.

    >>> steps_to([(100, 0.5), (200, 1.0), (300, 1.5)], 0.75, higher_is_better=True)
    150.0
    """
    sign = 1.0 if higher_is_better else -1.0
    before: tuple[float, float] | None = None
    for step, value in curve:
        if sign * value >= sign * target:
            if before is None:
                return float(step)
            return before[0] + (target - before[1]) / (value - before[1]) * (step - before[0])
        before = step, value
    return None


def _single_steps(
    facts: TaskFacts, recipe: Recipe, known: Known, target: float | None
) -> tuple[tuple[float, float, float], str | None]:
    """S₁ with its interval: of the budget, or to the target; and why that cannot be reached, if it cannot."""
    budget = float(recipe.replace(workers=1, lr_rule="none").total_steps(facts.samples))
    whole = budget, budget, budget
    if target is None:
        return whole, None
    curves = [run.curve for run in _singles(known, recipe) if run.curve]
    reached = [steps_to(curve, target, facts.higher_is_better) for curve in curves]
    found = [steps for steps in reached if steps is not None]
    if 2 * len(found) <= len(reached):
        best = (max if facts.higher_is_better else min)(value for curve in curves for _, value in curve)
        return whole, (
            f"--target {target:g} is out of reach: the closest possible is {facts.metric} {best:.4g}, the best on "
            f"validation data of {len(curves)} single-worker run{'s' * (len(curves) != 1)} of {budget:,.0f} steps; "
            f"lower --target, or raise --epochs"
        )
    logs = mean_interval([math.log(steps) for steps in found], LEVEL, new=True)
    gap = budget * recipe.worker_batch / facts.samples  # epochs; evaluations are one apart
    width = 0.5 * budget / max(gap, 1.0)
    middle, low, high = (math.exp(end) for end in (logs.value, logs.low, logs.high))
    return (middle, max(1.0, min(low, middle - width)), max(high, middle + width)), None


def _law_of_runs(facts: TaskFacts, recipe: Recipe, known: Known, target: float | None) -> Law | None:
    """The critical-batch law through what auto's runs took, where there are any."""
    points = [
        (run.recipe.global_batch, steps)
        for run in _alike(known, recipe)
        if (steps := run.steps if target is None else steps_to(run.curve, target, facts.higher_is_better)) is not None
        and (target is not None or not run.recipe.selects)
    ]
    return fit_law(points, "runs") if len({batch for batch, _ in points}) > 1 else None


def _source(critical: CriticalBatch, direct: Law | CriticalBatch | None, place: str, workers: Sequence[int]) -> str:
    """Where a critical batch comes from: the measurement at a place, or runs of these workers."""
    if critical.method == "noise scale":
        return f"noise scale along one training ({place})"
    if not critical.method.startswith("runs"):
        return f"{critical.method} ({place})"
    assert isinstance(direct, Law)
    runs = f"steps of {len(direct.steps)} runs with {', '.join(map(str, workers))} workers"
    return runs + critical.method.removeprefix("runs").replace("noise", "the noise")


def _evidence(
    facts: TaskFacts, recipe: Recipe, known: Known, target: float | None
) -> tuple[CriticalBatch | None, Law | CriticalBatch | None, str]:
    """Of this optimizer the newest noise scale, what trainings took, and where the measurement is.

    Of trainings the first that bounds the critical batch counts: auto's runs, then sweep or branches.
    """
    measured = [one for one in known.measured if one.optimizer == recipe.optimizer and (one.noise or one.direct)]
    newest = measured[-1] if measured else None
    by_runs = _law_of_runs(facts, recipe, known, target)
    found: list[Law | CriticalBatch] = [one for one in (by_runs, newest.direct if newest else None) if one is not None]
    bounding = [one for one in found if (one.critical if isinstance(one, Law) else one).high is not None]
    direct = next(iter([*bounding, *found]), None)
    return (None, direct, "") if newest is None else (newest.noise, direct, str(newest.path.parent))


def _rated(known: Known) -> list[Measured]:
    """Measurements of throughput on the kind of device that the last of them was made on: others say nothing of it."""
    rated = [one for one in known.measured if one.rates]
    return [one for one in rated if one.device == rated[-1].device]


def _largest(facts: TaskFacts, known: Known, memory_bytes: int | None) -> int | None:
    """The largest worker batch: as it was measured, or by how memory grows in a device of so much of it."""
    if memory_bytes is None:
        return next((one.largest_worker_batch for one in reversed(known.measured) if one.largest_worker_batch), None)
    line = next((one.memory for one in reversed(known.measured) if one.memory is not None), None)
    if line is None:
        return None
    largest = int(min(facts.samples, line.largest(memory_bytes)))
    if largest < 1:
        raise UsageError(
            f"--memory must hold one sample at least, by the records {line.peak(1):,.0f} bytes, got {memory_bytes:,}; "
            f"raise it"
        )
    return largest


def _shown(critical: CriticalBatch) -> str:
    """With its 95 % interval, in the three digits that `measure` shows."""
    ends = [critical.value, critical.low or 0.0, critical.high]
    value, low, high = ("unbounded" if end is None else f"{float(f'{end:.3g}'):,.10g}" for end in ends)
    return f"{value} (95 %: {low} to {high})"


def _compute(rates: Sequence[tuple[int, float]], worker_batch: int) -> tuple[float, float, float]:
    """α, β and their spread, where seconds of a step of b samples are α + β·b.

    Least squares on relative errors through the worker batches near the recipe's, with α, β ≥ 0.
    """
    near = [rate for rate in rates if worker_batch / NEAR <= rate[0] <= worker_batch * NEAR]
    chosen = near if len({batch for batch, _ in near}) >= 2 else rates
    batches = np.array([batch for batch, _ in chosen], float)
    seconds = batches / np.array([rate for _, rate in chosen])
    design = np.stack([1 / seconds, batches / seconds], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(design, np.ones(len(seconds)), rcond=None)
    if fixed < 0 or len(set(batches)) < 2:
        fixed, each = 0.0, 1 / np.mean(design[:, 1])
    elif each < 0:
        fixed, each = 1 / np.mean(design[:, 0]), 0.0
    errors = design @ np.array([fixed, each]) - 1
    spread = float(np.sqrt(np.mean(errors**2)))
    return float(fixed), float(each), min(0.5, max(LEAST_COMPUTE_SPREAD, 1.28 * spread))


def _tested(runs: Sequence[SeenRun]) -> dict[int, Metric]:
    """What runs had on test data at the end of their budget, by number of workers."""
    tested: dict[int, list[float]] = {}
    for run in runs:
        if run.test is not None and not run.recipe.selects:
            tested.setdefault(run.recipe.workers, []).append(run.test)
    return {workers: Metric.of(tested[workers]) for workers in sorted(tested)}


def _notes(known: Known, hardware: Hardware, largest: int | None) -> tuple[str, ...]:
    """Where the numbers come from, and what was assumed."""
    notes = [f"link: {hardware.link.name}, {hardware.link.source}"]
    if hardware.node_devices > 1:
        link = hardware.node_link
        notes.append(f"within a node of {hardware.node_devices}: {link.name}, {link.source}")
    device = _rated(known)[-1].device
    others = sorted({one.device for one in known.measured if one.rates} - {device})
    faster = "" if hardware.device_speed == 1 else f", times {hardware.device_speed:g} (given)"
    notes.append(f"compute of one worker as measured on {device}{faster}")
    if others:
        notes.append(f"throughput that was measured on {', '.join(others)} is left out")
    if hardware.overlap is None:
        notes.append("how much of the communication hides behind compute is assumed (--overlap)")
    if largest is None:
        notes.append("the largest worker batch that fits is not known")
    return (*notes, *known.notes)
