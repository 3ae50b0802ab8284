"""A plan over numbers of workers: read what records hold, measure here what they do not, and choose a row.

What is measured stands in the plan's folder, for other plans too.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalewise.engine.placement import DeviceName, Placement
from scalewise.errors import UsageError
from scalewise.plan import assemble as assembling
from scalewise.plan import hardware
from scalewise.plan.assemble import Gap
from scalewise.plan.document import Plan, Wish, choose, rows_with_ends
from scalewise.plan.hardware import Hardware
from scalewise.plan.jobs import IN_CONTAINERS, Job, System, command, job_file
from scalewise.plan.records import Known, TaskFacts, read_records
from scalewise.records import finite, save_document, write_atomically
from scalewise.runs.compare.rows import chosen_workers
from scalewise.runs.measure.memory import parse_bytes
from scalewise.runs.request import (
    PYTHON,
    Begun,
    Notice,
    Notify,
    Numbers,
    Question,
    Subject,
    answering,
    check_alone,
    comma_separated,
    keywords_of,
    request_from,
    save_request,
    silent,
    single_recipe,
)

if TYPE_CHECKING:
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.tasks.task import Task

DOCUMENT_FILE = "plan.json"
USUAL_WORKERS, USUAL_LINK, USUAL_NODE_LINK = "1,2,4,8,16,32,64", "10gbit", "nvlink"
LINK_PROCESSES, LINK_SIZES, LINK_SECONDS = 2, (1 << 14, 1 << 20, 1 << 23), 3.0  # bytes of the buffers

MEASURED_HERE: dict[Gap, str] = {  # in the order in which it is done
    "single": "one worker's whole training",
    "memory": "the largest worker batch",
    "throughput": "throughput",
    "noise": "the noise scale along one training",
}


@dataclass(frozen=True)
class PlanRequest(Question):
    """A plan as it is asked for; `source` is the flag --from."""

    workers: Numbers = USUAL_WORKERS
    source: Sequence[Path] = ()
    target: float | None = None
    deadline: str | float | None = None
    budget: float | None = None
    price: str | float | None = None
    link: str | None = None
    node_devices: int = 1
    node_link: str = USUAL_NODE_LINK
    device_speed: str | float = "1x"
    overlap: float | None = None
    input_rate: float | None = None
    memory: str | int | None = None
    accelerator: str | None = None
    image: str | None = None
    write: Sequence[System] = ()

    def __post_init__(self) -> None:
        check_alone("plan")
        if self.node_devices < 1:
            raise UsageError(f"--node-devices must be at least 1, got {self.node_devices}")
        if self.overlap is not None and not 1 <= self.overlap <= 10:
            raise UsageError(f"--overlap must be between 1 (nothing hides) and 10 (nearly all), got {self.overlap:g}")
        if self.input_rate is not None and not 0 < self.input_rate < math.inf:
            raise UsageError(f"--input-rate must be above 0 samples a second, got {self.input_rate:g}")
        if self.target is not None and not math.isfinite(self.target):
            raise UsageError(f"--target must be a number that the metric can come to, got {self.target:g}")
        for system in self.write:
            if system in IN_CONTAINERS and self.image is None:
                raise UsageError(f"--write {system} needs the container image that holds scalewise; add --image NAME")
        if self.budget is not None and self.price is None:
            raise UsageError(f"--budget {self.budget:g} needs the price of a device; add --price 2.50/h")
        _ = self.hardware, self.counts, self.wish  # refuse what cannot be read before anything is loaded

    @property
    def hardware(self) -> Hardware:
        """What is planned for."""
        return Hardware(
            link=hardware.parse_link(self.link or USUAL_LINK),
            node_link=hardware.parse_link(self.node_link, "--node-link"),
            node_devices=self.node_devices,
            device_speed=hardware.parse_speed(str(self.device_speed)),
            price_per_hour=None if self.price is None else hardware.parse_price(str(self.price)),
            overlap=self.overlap,
            input_samples_per_second=self.input_rate,
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
        )

    @property
    def counts(self) -> list[int]:
        """The numbers of workers, and 1 among them."""
        return sorted({1, *chosen_workers(comma_separated(self.workers))})

    @property
    def wish(self) -> Wish:
        """What the recommended row must keep to."""
        return Wish(None if self.deadline is None else hardware.parse_duration(str(self.deadline)), self.budget)


@dataclass(frozen=True)
class PlanResult:
    """A plan, the folder that it stands in, and the job files that were written there."""

    plan: Plan
    folder: Path
    job_files: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        content: dict[str, Any] = finite({"run": str(self.folder), **self.plan.to_json()})
        return content


@keywords_of(PlanRequest)
def plan(task: str | Path | Task, *, notify: Notify = silent, **options: Any) -> PlanResult:  # noqa: ANN401
    """Plan how far more workers go: steps, time, money and accuracy at each number of them.

        >>> found = sw.plan("digits", workers=[1, 2, 4, 8], price="2.50/h")  # doctest: +SKIP
        >>> found.plan.choice.row.workers  # doctest: +SKIP
        8

    Arguments:
        task: a built-in name, a file, or a `Task`, which is measured in this process where others cannot load it.
        notify: called with each line on what is being done; a `Notice` is worth keeping.
        options: fields of `PlanRequest`, named like the flags of the command, and fields of the recipe.
    """
    return answer(request_from(PlanRequest, task, options), notify)


def answer(request: PlanRequest, notify: Notify = silent) -> PlanResult:
    """Load the task and the records, measure what is missing, plan, and store it."""
    from scalewise.engine.store.folder import RunRecipe

    subject = request.load()
    recipe, derived = single_recipe(subject.task.recipe, request.given, request.device)
    hold_out = request.target is not None and subject.task.validation is None
    run, facts = RunRecipe(subject.spec, subject.settings, recipe, derived, hold_out), task_facts(subject)
    known = read_records(request.source, facts)
    with answering(f"plan-{subject.task.name}", request.out) as folder:
        known = _with_measured(request, subject, run, facts, known, folder, notify)
        found, job = _planned(request, subject, run, facts, known)
        files = [] if job is None else [job_file(system, job) for system in request.write]
        for name, content in files:
            write_atomically(folder / name, content)
        result = PlanResult(found, folder, tuple(folder / name for name, _ in files))
        save_document(folder / DOCUMENT_FILE, result.to_json())
    return result


def task_facts(subject: Subject) -> TaskFacts:
    """Names, sizes and metric; the model is built once to count its parameters."""
    from scalewise.engine.data import streams
    from scalewise.engine.data.samples import open_samples

    task = subject.task
    with streams.undisturbed():
        model = task.model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert task.metric is not None
    return TaskFacts(
        name=task.name,
        spec=subject.spec,
        settings=tuple(subject.settings),
        samples=len(open_samples(task.train, 0, "training")),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
    )


def _with_measured(
    request: PlanRequest,
    subject: Subject,
    run: RunRecipe,
    facts: TaskFacts,
    known: Known,
    folder: Path,
    notify: Notify,
) -> Known:
    """The records, with what they do not hold measured here."""
    from scalewise.engine.store.folder import RunFolder
    from scalewise.runs.measure import measure as measuring
    from scalewise.runs.measure.request import MeasureRequest
    from scalewise.runs.run import train_in

    memory = request.hardware.memory_bytes
    gaps = assembling.missing(facts, run.recipe, known, request.target, memory)
    if "memory" in gaps and sys.platform != "linux" and request.device != "cuda":
        gaps.remove("memory")  # measured with Linux's limits
    without_link = request.link is None and known.link is None and max(request.counts) > 1
    if gaps or without_link:
        notify(Notice(_announcement(gaps, without_link, bool(request.source))))
    if without_link:
        known = known.plus(_measured_link(request.device, folder, notify))
    if "single" in gaps:
        train_in(RunFolder(folder / "single"), subject.task, run, Placement(device=request.device), notify)
        known = known.plus(read_records([folder / "single"], facts))
    skip = [part for part in ("noise", "memory", "throughput") if part not in gaps]
    if len(skip) < 3:
        wanted = MeasureRequest(subject.task, skip=skip, memory=memory, device=request.device)  # type: ignore[arg-type]
        found = measuring.measured(subject.task, run, wanted, folder, notify)
        save_request(folder, Begun(subject.spec, subject.settings, request.given))
        save_document(folder / measuring.DOCUMENT_FILE, found.to_json())
        known = known.plus(read_records([folder / measuring.DOCUMENT_FILE], facts))
    return known


def _announcement(gaps: Collection[Gap], link: bool, from_records: bool) -> str:
    """What is about to be measured, before anybody waits for it."""
    parts = ["the link between processes of this machine"] if link else []
    parts += [words for gap, words in MEASURED_HERE.items() if gap in gaps]
    why = "the records do not hold it" if from_records else "no records were given"
    return f"measuring first, since {why}: {', '.join(parts)}; --from takes it from earlier measurements"


def _measured_link(device: DeviceName, folder: Path, notify: Notify) -> Known:
    """The link between processes of this machine, as `bench collectives` measures it, stored in the plan's folder."""
    from scalewise.runs.bench.collectives import measure_collectives
    from scalewise.runs.bench.common import chosen_device

    report = measure_collectives(
        [LINK_PROCESSES],
        LINK_SIZES,
        seconds=LINK_SECONDS,
        device=chosen_device(device, LINK_PROCESSES),
        source=f"measured between {LINK_PROCESSES} processes of this machine",
        notify=notify,
    )
    hardware.save_link(folder / "link.json", report.link)
    return Known(link=report.link)


def _planned(
    request: PlanRequest, subject: Subject, run: RunRecipe, facts: TaskFacts, known: Known
) -> tuple[Plan, Job | None]:
    """The plan that follows from what is known, and its recommended row as a job."""
    hardware = request.hardware
    if request.link is None and known.link is not None:
        hardware = dataclasses.replace(hardware, link=known.link)
    found = assembling.assemble(facts, run.recipe, known, hardware, request.target, _race_steps(request, subject))
    rows, low, high = rows_with_ends(found.inputs, request.counts)
    wish = dataclasses.replace(request.wish, impossible=found.unreachable)
    planned = Plan(
        facts,
        run.recipe,
        found.inputs,
        rows,
        low,
        high,
        wish,
        choose(rows, wish),
        found.notes,
        request.target,
        curve=found.curve,
        seen=found.seen,
        critical=found.critical,
    )
    row = planned.choice.row
    if row is None:
        return planned, None
    job = Job(
        name=f"{planned.facts.name}-{row.workers}",
        arguments=_train_arguments(request, subject, planned, row.workers),
        workers=row.workers,
        node_devices=request.node_devices,
        seconds=planned.interval(planned.rows.index(row), "seconds")[1],
        accelerator=request.accelerator,
        image=request.image or "",
    )
    return dataclasses.replace(planned, command=_command(request, job)), job


def _race_steps(request: PlanRequest, subject: Subject) -> int | None:
    """Of the race that `train` begins with; 0 where it would follow the noise, and on the way to a target.

    None where the recipe has a rule of its own, so that auto derives nothing.
    """
    from scalewise.engine.auto import race_steps
    from scalewise.recipe import adapts

    if request.target is not None or max(request.counts) == 1:
        return 0
    given = {**request.given, "workers": max(request.counts)}
    if not adapts(subject.task.recipe.replace(**given)):
        return None
    return race_steps(subject.task, subject.task.recipe, given, Placement(device=request.device))


def _command(request: PlanRequest, job: Job) -> str | None:
    """The line to type, with a process for each device of a cluster; None for a task that no command can load."""
    if job.arguments[1].startswith(PYTHON):
        return None
    on_cluster = request.link is not None or job.node_devices > 1
    return command(job) if on_cluster else shlex.join(["scalewise", *job.arguments])


def _train_arguments(request: PlanRequest, subject: Subject, planned: Plan, workers: int) -> tuple[str, ...]:
    """What `scalewise` is called with: whatever was given here, and a micro batch where memory needs one."""
    given = dict(request.given)
    largest = planned.inputs.largest_worker_batch
    batch = planned.inputs.worker_batch
    if largest is not None and batch > largest and "micro_batch" not in given:
        given["micro_batch"] = max(size for size in range(1, largest + 1) if batch % size == 0)
    found = ["train", subject.spec]
    for setting in subject.settings:
        found += ["--set", setting]
    by_noise = workers > 1 and planned.inputs.race_samples is None
    found += ["--workers", str(workers), *(["--search", "0"] if by_noise else [])]
    for name, value in given.items():
        flag = name.replace("_", "-")
        found += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    if request.target is not None:
        found += ["--target", f"{request.target:g}"]
    if request.data is not None:
        found += ["--data", str(request.data)]
    return tuple(found)
