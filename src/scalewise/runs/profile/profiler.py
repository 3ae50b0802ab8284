"""The profile of a task and recipe: trained here, on every process of the job, and put together on the first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement, available_cores, loader_processes
from scalewise.recipe import Recipe
from scalewise.runs.profile import times
from scalewise.runs.profile.result import LoaderRow, Overhead, ProcessRow, Profile, Setting
from scalewise.runs.profile.session import Notes, Times, observe, usage
from scalewise.runs.profile.times import trace
from scalewise.runs.profile.verdict import verdict
from scalewise.stats.timing import median_interval
from scalewise.tasks.task import Task

MOST_STEPS = 1 << 20  # training never ends before the profile does


@dataclass(frozen=True)
class Outcome:
    """The profile, and its trace for a viewer."""

    profile: Profile
    trace: dict[str, Any]


def profile(
    task: Task,
    recipe: Recipe,
    placement: Placement | None = None,
    *,
    steps: int | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Outcome | None:
    """Profile some steps of a training from its start; None on all processes but the first.

    Arguments:
        task, recipe, placement: what is trained, how and where; the length of the training is not used.
        steps: how many steps to look at; by default as many as give a steady picture.
        notify: told what will be done.
    """
    endless = recipe.replace(steps=MOST_STEPS, patience=None, target=None)
    with Training(task, endless, placement or Placement()) as training:
        notes = observe(training, steps, notify)
        everybody = _gathered(training, notes)
        if not training.team.leads:
            return None
        return Outcome(_profile(_setting(training), everybody), trace(everybody))


def _gathered(training: Training, notes: Notes) -> list[Notes]:
    """The notes of every process, on the first."""
    if training.team.size == 1:
        return [notes]
    places: list[Any] = [None] * training.team.size
    dist.gather_object(notes, places if training.team.leads else None, 0)
    return places


def _setting(training: Training) -> Setting:
    recipe, placement, team = training.recipe, training.placement, training.team
    assert recipe.threads is not None
    in_memory = training.samples.in_memory
    return Setting(
        task=training.task.name,
        workers=recipe.workers,
        worker_batch=recipe.worker_batch,
        processes=team.size,
        threads=recipe.threads,
        device=team.device.type,
        cores=available_cores(),
        in_memory=in_memory,
        loaders=0 if in_memory else loader_processes(placement, team.here),
        reduce=placement.reduce,
        shard_optimizer=placement.shard_optimizer,
        optimizer=recipe.optimizer,
        precision=recipe.precision,
        layout=recipe.layout,
        compiled=recipe.compile,
    )


def _profile(setting: Setting, everybody: Sequence[Notes]) -> Profile:
    chosen = times.middle_steps(times.mean_walls(everybody))
    rows = tuple(_process_row(notes, chosen) for notes in everybody)
    wall = statistics.fmean(row.step_seconds for row in rows)
    phases = times.mean_phases([row.phases for row in rows], wall)
    steps = [step for notes in everybody for step in notes.steps if step.number in set(chosen)]
    layers = times.layer_rows(steps, everybody[0].kinds, wall)
    timeline, flights = times.drawn_step(everybody, chosen)
    bottleneck, advice = verdict(setting, wall, phases, layers, rows)
    return Profile(
        setting=setting,
        steps=len(everybody[0].steps),
        step_seconds=wall,
        phases=phases,
        layers=layers,
        communication=times.communication(steps),
        by_process=rows,
        timeline=timeline,
        flights=flights,
        overhead=_overhead(everybody),
        bottleneck=bottleneck,
        advice=advice,
    )


def _process_row(notes: Notes, chosen: Sequence[int]) -> ProcessRow:
    steps = [step for step in notes.steps if step.number in set(chosen)]
    wall, phases = times.phase_rows(steps, times.beside_steps(notes))
    return ProcessRow(
        process=notes.process,
        step_seconds=wall,
        phases=phases,
        communication=times.communication(steps),
        usage=usage(notes.looks),
        loaders=tuple(_loader_rows(notes)),
    )


def _loader_rows(notes: Notes) -> list[LoaderRow]:
    looked = sum(stop - start for start, stop in notes.stretches)
    return [
        LoaderRow(
            loader.number,
            sum(piece.seconds for start, stop in notes.stretches for piece in loader.between(start, stop)) / looked,
        )
        for loader in notes.loaders
    ]


def _overhead(everybody: Sequence[Notes]) -> Overhead:
    """Rounds of the first process: the others take the same steps."""
    rounds = [*zip(everybody[0].profiled, everybody[0].plain, strict=True)]
    wall = [(_median(profiled, 0), _median(plain, 0)) for profiled, plain in rounds]
    processor = [(_median(profiled, 1), _median(plain, 1)) for profiled, plain in rounds]
    ratios = [profiled / plain - 1 for profiled, plain in wall]
    low, high = median_interval(ratios)
    return Overhead(
        share=statistics.median(ratios),
        low=low,
        high=high,
        processor_share=statistics.median(profiled / plain - 1 for profiled, plain in processor),
        rounds=len(ratios),
        profiled_seconds=statistics.median(profiled for profiled, _ in wall),
        plain_seconds=statistics.median(plain for _, plain in wall),
    )


def _median(round_times: Times, column: int) -> float:
    return statistics.median(times[column] for times in round_times)
