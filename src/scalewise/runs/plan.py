"""What a plan needs to know of a task: its facts, one worker's recipe, and what records do not hold measured here."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.engine.placement import DeviceName
from scalewise.plan import assemble as assembling
from scalewise.plan.assemble import Gap, Hardware
from scalewise.plan.jobs import System
from scalewise.runs.request import Notice, Notify, single_recipe

LINK_PROCESSES, LINK_SIZES, LINK_SECONDS = 2, (1 << 14, 1 << 20, 1 << 23), 3.0  # bytes of the buffers

MEASURED_HERE: dict[Gap, str] = {  # in the order in which it is done
    "single": "one worker's whole training",
    "memory": "the largest worker batch",
    "throughput": "throughput",
    "noise": "the noise scale along one training",
}

if TYPE_CHECKING:
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.plan.records import Known, TaskFacts
    from scalewise.tasks.task import Task


@dataclass(frozen=True)
class PlanRequest:
    """A plan as asked for on the command line."""

    task: str
    settings: list[str]
    given: dict[str, Any]
    workers: list[int]
    sources: list[Path]
    target: float | None
    deadline: float | None
    budget: float | None
    hardware: Hardware
    link_given: bool
    data: Path | None
    device: DeviceName
    write: list[System]
    accelerator: str | None
    image: str | None
    out: Path | None
    json: bool
    quiet: bool


def complete(request: PlanRequest, task: Task) -> RunRecipe:
    """One worker's recipe."""
    from scalewise.engine.store.folder import RunRecipe

    recipe, derived = single_recipe(task.recipe, request.given, request.device)
    hold_out = request.target is not None and task.validation is None
    return RunRecipe(request.task, request.settings, recipe, derived, hold_out)


def task_facts(request: PlanRequest, task: Task) -> TaskFacts:
    """Names, sizes and metric; the model is built once to count its parameters."""
    from scalewise.engine.data import streams
    from scalewise.engine.data.samples import open_samples
    from scalewise.plan.records import TaskFacts

    with streams.undisturbed():
        model = task.model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert task.metric is not None
    return TaskFacts(
        name=task.name,
        spec=request.task,
        settings=tuple(request.settings),
        samples=len(open_samples(task.train, 0, "training")),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
    )


def known_with_measured(
    request: PlanRequest, task: Task, run: RunRecipe, facts: TaskFacts, known: Known, folder: Path, notify: Notify
) -> Known:
    """The records, with what they do not hold measured here; that stands in the plan's folder, for other plans too."""
    from scalewise.engine.store.folder import RunFolder
    from scalewise.plan.records import read_records
    from scalewise.runs.measure import wanted as folders
    from scalewise.runs.measure.measured import measured
    from scalewise.runs.measure.minima.trained import train_in
    from scalewise.runs.measure.wanted import Wanted

    memory = request.hardware.memory_bytes
    gaps = assembling.missing(facts, run.recipe, known, request.target, memory)
    if "memory" in gaps and sys.platform != "linux" and request.device != "cuda":
        gaps.remove("memory")  # measured with Linux's limits
    without_link = not request.link_given and known.link is None and max(request.workers) > 1
    if gaps or without_link:
        notify(Notice(announcement(gaps, without_link, bool(request.sources))))
    if without_link:
        known = known.plus(_measured_link(request, folder, notify))
    if "single" in gaps:
        train_in(RunFolder(folder / "single"), task, run, request.device, notify)
        known = known.plus(read_records([folder / "single"], facts))
    skip = [part for part in ("noise", "memory", "throughput") if part not in gaps]
    if len(skip) < 3:
        wanted = Wanted(skip=skip, memory=memory, device=request.device)  # type: ignore[arg-type]
        found = measured(task, run, wanted, folder, notify)
        folders.save_request(folder, folders.Request(request.task, request.settings, request.given, None))
        folders.save_document(folder, {"run": str(folder), **found.to_json()})
        known = known.plus(read_records([folder / folders.DOCUMENT_FILE], facts))
    return known


def announcement(gaps: Collection[Gap], link: bool, from_records: bool) -> str:
    """What is about to be measured, before anybody waits for it."""
    parts = ["the link between processes of this machine"] if link else []
    parts += [words for gap, words in MEASURED_HERE.items() if gap in gaps]
    why = "the records do not hold it" if from_records else "no records were given"
    return f"measuring first, since {why}: {', '.join(parts)}; --from takes it from earlier measurements"


def _measured_link(request: PlanRequest, folder: Path, notify: Notify) -> Known:
    """The link between processes of this machine, as `bench collectives` measures it, kept in the plan's folder."""
    from scalewise.plan import links
    from scalewise.plan.records import Known
    from scalewise.runs.bench.collectives import measure_collectives
    from scalewise.runs.bench.common import chosen_device

    device = chosen_device(request.device, LINK_PROCESSES)
    report = measure_collectives(
        [LINK_PROCESSES],
        LINK_SIZES,
        seconds=LINK_SECONDS,
        device=device,
        source=f"measured between {LINK_PROCESSES} processes of this machine",
        notify=notify,
    )
    links.save(folder / "link.json", report.link)
    return Known(link=report.link)
