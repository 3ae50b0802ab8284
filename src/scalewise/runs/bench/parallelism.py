"""Every kind of parallelism on one task: what is sent, what is held, how long a step takes, and whether it is equal.

Counted: payload (payload.py) and what is held between steps. Measured: the peak of resident memory, each way by itself;
and the step, all ways interleaved in the same processes, so that none meets a busier machine than the others.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scalewise.engine.loop import Training
from scalewise.engine.parallel import HeldBytes
from scalewise.engine.placement import DeviceName, Placement
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.memory import held, release_freed, reset_peak
from scalewise.engine.processes.team import Team, joined, takes_part
from scalewise.engine.store.folder import check_folder
from scalewise.errors import PlacementError, UsageError
from scalewise.plan import hardware
from scalewise.plan.hardware import Link
from scalewise.recipe import Recipe
from scalewise.runs.bench.common import Report
from scalewise.runs.bench.payload import KINDS, Kind, Payload, Traffic
from scalewise.runs.processes import Progress, ask
from scalewise.runs.request import Notify, Settings, load_subject, silent
from scalewise.tasks.task import Task

ROUNDS = 7
COMPARED_STEPS = 3
NOTABLY = 0.9  # of a step's time: smaller differences between medians of a few rounds say nothing


def ways(device: DeviceName) -> dict[str, Placement]:
    """What is compared."""
    data = Placement(device=device)
    return {
        "data": data,
        "sharded-optimizer": replace(data, shard_optimizer=True),
        "server": replace(data, reduce="server"),
        "fsdp": replace(data, parallel="fsdp"),
        "pipeline": replace(data, parallel="pipeline"),
        "tensor": replace(data, parallel="tensor"),
    }


@dataclass(frozen=True)
class Row:
    """One way; bytes are those of the process with the most. No figures where the model cannot be split this way."""

    name: str
    reason: str | None = None  # why it is not possible
    exact: bool | None = None
    loss_difference: float | None = None  # the largest, relative to one process, over the compared steps
    sent_bytes_per_step: int | None = None
    received_bytes_per_step: int | None = None
    sent_by_kind_bytes_per_step: dict[Kind, int] | None = None  # of the process that moves the most
    received_by_kind_bytes_per_step: dict[Kind, int] | None = None
    messages_per_step: int | None = None
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    peak_rss_bytes: int | None = None
    step_seconds: float | None = None
    idle_share: float | None = None  # of the step's wall time in which the computing thread did not compute
    bubble_share: float | None = None  # of the pipeline, by theory
    link_seconds_per_step: float | None = None

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return (self.parameter_bytes or 0) + (self.gradient_bytes or 0) + (self.optimizer_bytes or 0)


@dataclass(frozen=True)
class _Own:
    """What one process found about one way."""

    exact: bool
    losses: list[float]
    traffic: dict[Kind, Traffic]
    held: HeldBytes
    peak: int

    @property
    def total(self) -> Traffic:
        """What was moved of all kinds."""
        return Traffic().plus(*self.traffic.values())


def parallelism(
    task: str | Task,
    /,
    *,
    set: Settings = (),
    rounds: int = ROUNDS,
    data: Path | None = None,
    processes: int = 2,
    device: DeviceName = "auto",
    link: Path | None = None,
    out: Path | None = None,
    notify: Notify = silent,
    **fields: Any,  # noqa: ANN401
) -> ParallelismReport | None:
    """Compare every kind of parallelism on a task, and store the report.

    Returns None on the processes of a torchrun job that do not lead it.

    Arguments:
        task, set, data: the task, or its name with its settings and the folder of its data.
        rounds: how often every way is timed; its median counts.
        processes: how many, at least 2; in a torchrun job those of the job.
        link: a link profile, as `bench collectives` writes it, to estimate the exchange with.
        out: folder of the result; by default runs/bench-parallelism-<time>.
        notify: receives what is being done.
        fields: fields of the recipe to change.
    """
    if rounds < 1:
        raise PlacementError(f"--rounds must be at least 1, got {rounds}")
    check_folder(out)
    count = int(os.environ["WORLD_SIZE"]) if takes_part() else processes
    if count < 2:
        raise PlacementError(f"--processes must be at least 2 to compare ways to share work, got {count}")
    known = hardware.load_link(link) if link else None
    loaded = load_subject(task, set, data).task
    recipe = _recipe(loaded, count, fields)
    with translating():
        arguments = (recipe, device, known, rounds)
        rows = ask(compare_ways, loaded, arguments, count, recipe.threads or 1, device, notify)
        if rows is None:
            return None
        return ParallelismReport(loaded.name, recipe, count, known, rows).stored(out)


def _recipe(task: Task, processes: int, given: dict[str, Any]) -> Recipe:
    """The task's own recipe with a worker for every process, four micro batches each and one thread, unless given."""
    base = task.recipe.replace(workers=processes, threads=1, lr_rule="none", patience=None, target=None)
    recipe = base.replace(**given)
    quarter = recipe.worker_batch // 4
    if "micro_batch" not in given and recipe.worker_batch % 4 == 0 and quarter > 1:
        recipe = recipe.replace(micro_batch=quarter)
    return recipe


def compare_ways(task: Task, recipe: Recipe, device: DeviceName, link: Link | None, rounds: int) -> Progress[list[Row]]:
    """The rows, on every process of a job; the exchange is estimated if its link is known."""
    steps = COMPARED_STEPS + 2 + rounds
    recipe = recipe.replace(steps=steps, patience=None, target=None)
    for engine in ("fsdp", "pipeline", "tensor"):  # or the first to use torch's engines would have them in its peak
        importlib.import_module(f"scalewise.engine.parallel.{engine}")
    with joined(device) as team:
        yield "one process, to compare with"
        expected: list[list[float]] = [[]]
        if team.leads:
            with Training(task, recipe, Placement(device=device), alone=True) as training:
                expected = [[take_step(training) for _ in range(COMPARED_STEPS)]]
        dist.broadcast_object_list(expected, 0)
        rows: dict[str, Row] = {}
        for name, placement in ways(device).items():
            yield f"{name}: memory and payload"
            try:
                own = _alone(task, recipe, placement, team)
            except UsageError as error:
                rows[name] = Row(name, reason=str(error))
            else:
                rows[name] = _row(name, own, expected[0], recipe, team, link)
        possible = {name: ways(device)[name] for name, row in rows.items() if row.reason is None}
        times = yield from _times(task, recipe, possible, team, rounds)
    return [
        replace(row, step_seconds=times[name][0], idle_share=times[name][1]) if name in times else row
        for name, row in rows.items()
    ]


def take_step(training: Training) -> float:
    """One step; its loss."""
    workers = training.take_step().read()
    return float(sum(worker.loss for worker in workers) / sum(worker.weight for worker in workers))


def _alone(task: Task, recipe: Recipe, placement: Placement, team: Team) -> _Own:
    """A few steps of one way by itself: losses, what is held and sent, and the peak of memory."""
    release_freed()
    with Training(task, recipe, placement) as training:
        gc.collect()
        reset_peak()
        losses = [take_step(training) for _ in range(COMPARED_STEPS)]
        peak = held().highest
        with Payload(team) as payload:
            take_step(training)
        traffic = {kind: payload.found[kind] for kind in KINDS}
        return _Own(training.strategy.exact, losses, traffic, training.strategy.held(), peak)


def _row(name: str, own: _Own, expected: list[float], recipe: Recipe, team: Team, link: Link | None) -> Row:
    everybody: list[_Own] = [own] * team.size
    dist.all_gather_object(everybody, own)
    totals = [other.total for other in everybody]
    sent, received = max(total.sent_bytes for total in totals), max(total.received_bytes for total in totals)
    busiest = max(everybody, key=lambda other: other.total.sent_bytes + other.total.received_bytes)
    messages = busiest.total.messages
    difference = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(own.losses, expected, strict=True))
    bubble = (team.size - 1) / (recipe.micro_batches + team.size - 1) if name == "pipeline" else None
    seconds = messages * link.latency_seconds + max(sent, received) / link.bytes_per_second if link else None
    return Row(
        name,
        exact=own.exact,
        loss_difference=difference,
        sent_bytes_per_step=sent,
        received_bytes_per_step=received,
        sent_by_kind_bytes_per_step={kind: busiest.traffic[kind].sent_bytes for kind in KINDS},
        received_by_kind_bytes_per_step={kind: busiest.traffic[kind].received_bytes for kind in KINDS},
        messages_per_step=messages,
        parameter_bytes=max(other.held.parameters for other in everybody),
        gradient_bytes=max(other.held.gradients for other in everybody),
        optimizer_bytes=max(other.held.optimizer for other in everybody),
        peak_rss_bytes=max(other.peak for other in everybody),
        bubble_share=bubble,
        link_seconds_per_step=seconds,
    )


def _times(
    task: Task, recipe: Recipe, placements: dict[str, Placement], team: Team, rounds: int
) -> Progress[dict[str, tuple[float, float]]]:
    """The median seconds of a step, and its idle share, on the slowest process; all ways interleaved."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in placements}
    with ExitStack() as stack:
        trainings = {name: stack.enter_context(Training(task, recipe, where)) for name, where in placements.items()}
        for number in range(rounds + 1):
            yield f"timing, round {number} of {rounds}"
            for name, training in trainings.items():
                timed = _timed(training, team)
                if number:  # the first step of each allocates
                    found[name].append(timed)
    medians = {
        name: tuple(statistics.median(column) for column in zip(*values, strict=True)) for name, values in found.items()
    }
    everybody = [medians] * team.size
    dist.all_gather_object(everybody, medians)
    return {
        name: (max(other[name][0] for other in everybody), statistics.mean(other[name][1] for other in everybody))
        for name in placements
    }


def _timed(training: Training, team: Team) -> tuple[float, float]:
    team.barrier()
    began, worked = time.perf_counter(), time.thread_time()
    take_step(training)
    team.barrier()
    seconds = time.perf_counter() - began
    return seconds, max(0.0, 1 - (time.thread_time() - worked) / seconds)


@dataclass(frozen=True)
class ParallelismReport(Report):
    """All rows, and of what."""

    kind = "parallelism"
    task: str
    recipe: Recipe
    processes: int
    link: Link | None
    rows: list[Row]

    @property
    def advice(self) -> str:
        """Which way for this model, on this machine and over the link."""
        known = [row for row in self.rows if row.step_seconds is not None]
        base = known[0]
        fastest = min(known, key=lambda row: row.step_seconds or 0.0)
        smallest = min(known, key=lambda row: row.held_bytes)
        times = {row.name: 1000 * (row.step_seconds or 0.0) for row in (base, fastest)}
        words = [f"{base.name} has the shortest step here"]
        if times[fastest.name] < NOTABLY * times[base.name]:
            shown = f"{times[fastest.name]:.1f} ms against {times[base.name]:.1f} with {base.name}"
            words = [f"{fastest.name} has the shortest step here ({shown})"]
        elif fastest is not base:
            words = [f"no step is notably shorter here than that with {base.name}"]
        if smallest is not base and base.held_bytes:
            share = smallest.held_bytes / base.held_bytes
            words.append(
                f"{smallest.name} holds the least ({share:.0%} of {base.name}); take it if {base.name} does not fit"
            )
        if self.link is not None:
            best = min(known, key=lambda row: (row.step_seconds or 0.0) + (row.link_seconds_per_step or 0.0))
            words.append(f"over {self.link.name} {best.name} is the fastest, its estimated exchange included")
        pipeline = next((row for row in known if row.name == "pipeline"), None)
        if pipeline is not None and self.recipe.micro_batches == 1:
            words.append("a pipeline with one micro batch a worker has one stage at work at a time: give --micro-batch")
        return "; ".join(words) + "."

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        content = super().to_json()
        del content["recipe"]
        spread = {name: getattr(self.recipe, name) for name in ("workers", "worker_batch", "micro_batches")}
        return content | spread | {"advice": self.advice}
