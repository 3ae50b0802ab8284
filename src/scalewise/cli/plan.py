"""`scalewise plan`."""

from __future__ import annotations

import contextlib
import json as to_json
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from scalewise.cli import plan_view as views
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.engine.placement import DeviceName
from scalewise.errors import ScalewiseError, TargetMissed, UsageError
from scalewise.plan import assemble as assembling
from scalewise.plan.assemble import Hardware
from scalewise.plan.jobs import IN_CONTAINERS, System
from scalewise.present.live import StatusView
from scalewise.runs.plan import PlanRequest, complete, known_with_measured, task_facts

if TYPE_CHECKING:
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.plan.document import Plan, Wish
    from scalewise.plan.jobs import Job
    from scalewise.plan.records import Known, TaskFacts

DOCUMENT_FILE = "plan.json"
USUAL_WORKERS, USUAL_LINK, USUAL_NODE_LINK = "1,2,4,8,16,32,64", "10gbit", "nvlink"
DEVICES = Group("Devices (what is planned for)", sort_key=0)
WISH = Group("Wish (chooses the recommended row)", sort_key=0)

RecipeFlags = recipe_flags(__name__, without=("workers", "target", "patience", "steps", "lr_rule"))


def plan(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    workers: str = USUAL_WORKERS,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    source: Annotated[list[Path] | None, Parameter(name="--from", negative=(), consume_multiple=True)] = None,
    target: Annotated[float | None, Parameter(group=WISH)] = None,
    deadline: Annotated[str | None, Parameter(group=WISH, allow_leading_hyphen=True)] = None,
    budget: Annotated[float | None, Parameter(group=WISH)] = None,
    price: Annotated[str | None, Parameter(group=DEVICES, allow_leading_hyphen=True)] = None,
    link: Annotated[str | None, Parameter(group=DEVICES)] = None,
    node_devices: Annotated[int, Parameter(group=DEVICES)] = 1,
    node_link: Annotated[str, Parameter(group=DEVICES)] = USUAL_NODE_LINK,
    device_speed: Annotated[str, Parameter(group=DEVICES, allow_leading_hyphen=True)] = "1x",
    overlap: Annotated[float | None, Parameter(group=DEVICES)] = None,
    input_rate: Annotated[float | None, Parameter(group=DEVICES)] = None,
    memory: Annotated[str | None, Parameter(group=DEVICES)] = None,
    accelerator: Annotated[str | None, Parameter(group=DEVICES)] = None,
    image: Annotated[str | None, Parameter(group=DEVICES)] = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    write: Annotated[list[System] | None, Parameter(group=OUTPUT, negative=())] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Say how far more workers go: steps, time, money and accuracy at each number of them, and which to take.

    scalewise plan digits --workers 1,2,4,8,16 --price 2.50/h --deadline 2h
    scalewise plan cifar10 --from runs/measure-cifar10-20261116-101500 --link 25gbit --device-speed 10x --budget 40
    scalewise plan cifar10 --from runs --node-devices 8 --node-link nvlink --link infiniband --write slurm

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    workers: str
        The numbers of workers to plan for, each on a device of its own.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    source: list[Path] | None
        Records to plan from: folders of measure, train, compare or plan, link profiles of bench. What they do not
        hold is measured.
    target: float | None
        The validation metric to train to, instead of one worker's whole budget.
    deadline: str | None
        The longest time, as in 2h or 90min.
    budget: float | None
        The most money.
    price: str | None
        What one device costs, as in 2.50/h.
    link: str | None
        Between nodes: a rate as in 25gbit, nvlink, pcie, infiniband, or a file that bench collectives wrote; by
        default one among the records, else what is measured between processes of this machine.
    node_devices: int
        Devices of a node.
    node_link: str
        Among the devices of a node, named like --link.
    device_speed: str
        How many times faster than the measured device those to plan for are, as in 10x.
    overlap: float | None
        How much of the communication hides behind compute, from 1 (nothing) to 10 (nearly all).
    input_rate: float | None
        Samples a second that can be read for each worker; by default what runs among the records show.
    memory: str | None
        Memory of a device, as in 16GB; by default what is free here.
    accelerator: str | None
        Kind of device for --write, as in A100; without it the job files ask for no GPU.
    image: str | None
        Container image for --write kubernetes and trainjob.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    device: DeviceName
        Kind of device to measure on.
    write: list[System] | None
        Write a job file of the recommended row for this system into the plan's folder; may be repeated. kubernetes is
        a PyTorchJob of Kubeflow's training operator, trainjob a TrainJob of Kubeflow Trainer 2.
    out: Path | None
        Folder of the plan; by default runs/plan-<task>-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    from scalewise.plan import words
    from scalewise.runs.compare.rows import chosen_workers
    from scalewise.runs.measure.memory.budget import parse_bytes

    _check(node_devices, overlap, input_rate, target)
    for system in write or []:
        if system in IN_CONTAINERS and image is None:
            raise UsageError(f"--write {system} needs the container image that holds scalewise; add --image NAME")
    hardware = Hardware(
        link=words.parse_link(link or USUAL_LINK),
        node_link=words.parse_link(node_link, "--node-link"),
        node_devices=node_devices,
        device_speed=words.parse_speed(device_speed),
        price_per_hour=None if price is None else words.parse_price(price),
        overlap=overlap,
        input_samples_per_second=input_rate,
        memory_bytes=None if memory is None else parse_bytes(memory),
    )
    request = PlanRequest(
        task=task,
        settings=list(set or []),
        given={name: value for name, value in vars(flags).items() if value is not None},
        workers=sorted({1, *chosen_workers(workers)}),
        sources=list(source or []),
        target=target,
        deadline=None if deadline is None else words.parse_duration(deadline),
        budget=budget,
        hardware=hardware,
        link_given=link is not None,
        data=data,
        device=device,
        write=list(write or []),
        accelerator=accelerator,
        image=image,
        out=out,
        json=json,
        quiet=quiet,
    )
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _start(request)


def _check(node_devices: int, overlap: float | None, input_rate: float | None, target: float | None) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if "RANK" in os.environ:
        raise UsageError("plan is made by one process, got a torchrun job (RANK is set); run it without torchrun")
    if node_devices < 1:
        raise UsageError(f"--node-devices must be at least 1, got {node_devices}")
    if overlap is not None and not 1 <= overlap <= 10:
        raise UsageError(f"--overlap must be between 1 (nothing hides) and 10 (nearly all), got {overlap:g}")
    if input_rate is not None and not 0 < input_rate < float("inf"):
        raise UsageError(f"--input-rate must be above 0 samples a second, got {input_rate:g}")
    if target is not None and not math.isfinite(target):
        raise UsageError(f"--target must be a number that the metric can come to, got {target:g}")


def _start(request: PlanRequest) -> int:
    """Load the task and what is known of it, measure the rest, and plan."""
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import make_folder
    from scalewise.plan.document import Wish
    from scalewise.plan.records import read_records
    from scalewise.tasks.load import load_task

    wish = Wish(request.deadline, request.budget)
    if request.budget is not None and request.hardware.price_per_hour is None:
        raise UsageError(f"--budget {request.budget:g} needs the price of a device; add --price 2.50/h")
    download(request.task, request.data, request.quiet)
    task = load_task(request.task, request.settings, request.data)
    view = StatusView(request.quiet)
    try:
        run, facts = complete(request, task), task_facts(request, task)
        known = read_records(request.sources, facts)
        folder = make_folder(request.out, f"plan-{task.name}").path
        try:
            with view.live():
                known = known_with_measured(request, task, run, facts, known, folder, view.notify)
            found = _planned(request, run, facts, known, wish)
        except BaseException:
            if not any(folder.iterdir()):
                folder.rmdir()
            raise
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error
    return _finish(request, found, folder, view)


def _planned(request: PlanRequest, run: RunRecipe, facts: TaskFacts, known: Known, wish: Wish) -> Plan:
    """The plan that follows from what is known."""
    from scalewise.plan.document import Plan, choose, rows_with_ends

    hardware = request.hardware
    if not request.link_given and known.link is not None:
        hardware = replace(hardware, link=known.link)
    found = assembling.assemble(facts, run.recipe, known, hardware, request.target)
    rows, low, high = rows_with_ends(found.inputs, request.workers)
    wish = replace(wish, impossible=found.unreachable)
    choice = choose(rows, wish)
    planned = Plan(
        facts,
        run.recipe,
        found.inputs,
        rows,
        low,
        high,
        wish,
        choice,
        found.notes,
        request.target,
        curve=found.curve,
        seen=found.seen,
    )
    job = _job(request, planned)
    return planned if job is None else replace(planned, command=_command(request, job))


def _job(request: PlanRequest, planned: Plan) -> Job | None:
    """The recommended row as a job."""
    from scalewise.plan.jobs import Job

    row = planned.choice.row
    if row is None:
        return None
    place = planned.rows.index(row)
    return Job(
        name=f"{planned.facts.name}-{row.workers}",
        arguments=_train_arguments(request, planned, row.workers),
        workers=row.workers,
        node_devices=request.hardware.node_devices,
        seconds=planned.interval(place, "seconds")[1],
        accelerator=request.accelerator,
        image=request.image or "",
    )


def _command(request: PlanRequest, job: Job) -> str:
    """The line to type: with a process for each device of a cluster, or as train itself fills this machine."""
    from scalewise.plan.jobs import command

    on_cluster = request.link_given or job.node_devices > 1
    return command(job) if on_cluster else shlex.join(["scalewise", *job.arguments])


def _train_arguments(request: PlanRequest, planned: Plan, workers: int) -> tuple[str, ...]:
    """What `scalewise` is called with: whatever was given here, and a micro batch where memory needs one."""
    given = dict(request.given)
    largest = planned.inputs.largest_worker_batch
    batch = planned.inputs.worker_batch
    if largest is not None and batch > largest and "micro_batch" not in given:
        given["micro_batch"] = max(size for size in range(1, largest + 1) if batch % size == 0)
    words = ["train", request.task]
    for setting in request.settings:
        words += ["--set", setting]
    words += ["--workers", str(workers)]
    for name, value in given.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    if request.target is not None:
        words += ["--target", f"{request.target:g}"]
    if request.data is not None:
        words += ["--data", str(request.data)]
    return tuple(words)


def _finish(request: PlanRequest, planned: Plan, folder: Path, view: StatusView) -> int:
    """Write, draw and print the plan; a wish that cannot be kept is exit code 3."""
    from scalewise.plan.jobs import job_file
    from scalewise.records import finite, write_atomically

    text = to_json.dumps(finite({"run": str(folder), **planned.to_json()}), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    leave_page(folder, view.console)
    view.console.print(views.screen(planned, view.console.width))
    job = _job(request, planned)
    for name, content in [] if job is None else [job_file(system, job) for system in request.write]:
        write_atomically(folder / name, content)
        view.console.print(f"[dim]wrote {folder / name}[/dim]")
    view.console.print(f"[dim]folder {folder}[/dim]")
    if request.json:
        print(text, file=sys.__stdout__, flush=True)
    if planned.choice.row is None:
        raise TargetMissed(views.refusal(planned))
    return 0
