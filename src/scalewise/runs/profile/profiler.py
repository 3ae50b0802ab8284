"""The profile of a task: trained on every process of the job, put together on the first, stored."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalewise.engine.loop import Training
from scalewise.engine.placement import (
    DeviceName,
    Placement,
    ReduceName,
    available_cores,
    check_processes,
    check_recipe,
    default_processes,
    loader_processes,
)
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.team import takes_part
from scalewise.engine.store.folder import check_folder, make_folder
from scalewise.errors import UsageError
from scalewise.recipe import Recipe, resolve
from scalewise.records import save_document, write_atomically
from scalewise.runs.processes import Progress, ask
from scalewise.runs.profile import times
from scalewise.runs.profile.result import LoaderRow, Overhead, ProcessRow, Profile, Setting, verdict
from scalewise.runs.profile.session import Recording, observe, usage
from scalewise.runs.profile.times import trace
from scalewise.runs.request import Notify, Settings, compilable, load_subject, silent
from scalewise.stats.interval import median_interval
from scalewise.tasks.task import Task

DOCUMENT_FILE, TRACE_FILE = "profile.json", "trace.json"
MOST_STEPS = 1 << 20  # training never ends before the profile does


@dataclass(frozen=True)
class Outcome:
    """The profile, its trace for a viewer, and the folder that holds both."""

    profile: Profile
    trace: dict[str, Any]
    run: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        assert self.run is not None
        return {"run": str(self.run), **self.profile.to_json(), "trace": str(self.run / TRACE_FILE)}


def profile(
    task: str | Task,
    /,
    *,
    set: Settings = (),
    recipe: Path | Recipe | None = None,
    steps: int | None = None,
    data: Path | None = None,
    processes: int | None = None,
    device: DeviceName = "auto",
    reduce: ReduceName = "ordered",
    shard_optimizer: bool = False,
    noise: bool = True,
    loaders: int | None = None,
    out: Path | None = None,
    notify: Notify = silent,
    **fields: Any,  # noqa: ANN401
) -> Outcome | None:
    """Profile some steps of a training from its start, and store the profile and its trace.

    Returns None on the processes of a torchrun job that do not lead it.

    Arguments:
        task, set, data: the task, or its name with its settings and the folder of its data.
        recipe: to start from instead of the task's own.
        steps: how many steps to look at; by default enough for a steady picture.
        processes: 1 to workers; by default enough to fill the machine.
        device, reduce, shard_optimizer, noise, loaders: the placement.
        out: folder for profile.json and trace.json; by default runs/profile-<task>-<time>.
        notify: receives what is being done.
        fields: fields of the recipe to change.
    """
    placement = Placement(device=device, reduce=reduce, shard_optimizer=shard_optimizer, noise=noise, loaders=loaders)
    if steps is not None and steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}; change --steps")
    loaded = load_subject(task, set, data).task
    base = Recipe.load(recipe) if isinstance(recipe, Path) else recipe or loaded.recipe
    chosen, _ = resolve(base, fields, "plain", available_cores())
    chosen = compilable(chosen, device)
    with translating():
        if os.environ.get("RANK", "0") == "0":
            check_folder(out)
        count = 1
        if not takes_part():
            check_recipe(placement, chosen)
            if processes is not None:
                check_processes(processes, chosen, placement)
                count = processes
            elif loaded.origin is not None:
                count = default_processes(chosen, placement)
        outcome = ask(profiled, loaded, (chosen, placement, steps), count, chosen.threads or 1, device, notify)
        if outcome is None:
            return None
        folder = make_folder(out, f"profile-{loaded.name}").path
        outcome = replace(outcome, run=folder)
        write_atomically(folder / TRACE_FILE, json.dumps(outcome.trace))
        save_document(folder / DOCUMENT_FILE, outcome.to_json())
    return outcome


def profiled(task: Task, recipe: Recipe, placement: Placement, steps: int | None = None) -> Progress[Outcome | None]:
    """Profile on every process of the job; the answer is on the first. The length of the training is not used."""
    endless = recipe.replace(steps=MOST_STEPS, patience=None, target=None)
    with Training(task, endless, placement) as training:
        recording = yield from observe(training, steps)
        recordings = [recording] * training.team.size
        if training.team.size > 1:
            dist.gather_object(recording, recordings if training.team.leads else None, 0)
        if not training.team.leads:
            return None
        return Outcome(_profile(_setting(training), recordings), trace(recordings))


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


def _profile(setting: Setting, recordings: Sequence[Recording]) -> Profile:
    by_step = zip(*(recording.steps for recording in recordings), strict=True)
    walls = {same[0].number: statistics.fmean(step.seconds for step in same) for same in by_step}
    chosen = times.middle_steps(walls)
    rows = tuple(_process_row(recording, chosen) for recording in recordings)
    wall = statistics.fmean(row.step_seconds for row in rows)
    phases = times.mean_phases([row.phases for row in rows], wall)
    steps = [step for recording in recordings for step in recording.steps if step.number in set(chosen)]
    layers = times.layer_rows(steps, recordings[0].kinds, wall)
    timeline, flights = times.drawn_step(recordings, chosen)
    bottleneck, advice = verdict(setting, wall, phases, layers, rows)
    return Profile(
        setting=setting,
        steps=len(recordings[0].steps),
        step_seconds=wall,
        phases=phases,
        layers=layers,
        communication=times.communication(steps),
        by_process=rows,
        timeline=timeline,
        flights=flights,
        overhead=_overhead(recordings),
        bottleneck=bottleneck,
        advice=advice,
    )


def _process_row(recording: Recording, chosen: Sequence[int]) -> ProcessRow:
    steps = [step for step in recording.steps if step.number in set(chosen)]
    wall, phases = times.phase_rows(steps, times.beside_steps(recording))
    return ProcessRow(
        process=recording.process,
        step_seconds=wall,
        phases=phases,
        communication=times.communication(steps),
        usage=usage(recording.usage_samples),
        loaders=tuple(LoaderRow(loader.number, times.busy_share(loader, recording)) for loader in recording.loaders),
    )


def _overhead(recordings: Sequence[Recording]) -> Overhead:
    """Rounds of the first process: the others take the same steps."""
    both = (recordings[0].profiled, recordings[0].plain)
    walls = [[statistics.median(step.seconds for step in one) for one in rounds] for rounds in both]
    processor = [[statistics.median(step.processor_seconds for step in one) for one in rounds] for rounds in both]
    ratios = [profiled / plain - 1 for profiled, plain in zip(*walls, strict=True)]
    low, high = median_interval(ratios)
    return Overhead(
        share=statistics.median(ratios),
        low=low,
        high=high,
        processor_share=statistics.median(profiled / plain - 1 for profiled, plain in zip(*processor, strict=True)),
        rounds=len(ratios),
        profiled_seconds=statistics.median(walls[0]),
        plain_seconds=statistics.median(walls[1]),
    )
