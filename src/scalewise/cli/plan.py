"""`scalewise plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from scalewise.cli.flags import DataFolder, Json, Quiet, Settings, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, asking, options, recipe_flags, show
from scalewise.engine.placement import DeviceName
from scalewise.errors import TargetMissed
from scalewise.plan.jobs import System
from scalewise.present.stories.plan import planning_story, refusal
from scalewise.runs.plan import USUAL_NODE_LINK, USUAL_WORKERS, PlanRequest, answer
from scalewise.runs.request import request_from

DEVICES = Group("Devices (what is planned for)", sort_key=0)
WISH = Group("Wish (chooses the recommended row)", sort_key=0)

RecipeFlags = recipe_flags(__name__, without=("workers", "target", "patience", "steps", "lr_rule"))


def plan(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    workers: str = USUAL_WORKERS,
    set: Settings = None,
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
    data: DataFolder = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    write: Annotated[list[System] | None, Parameter(group=OUTPUT, negative=())] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say how far more workers go: steps, time, money and accuracy at each number of them, and which to take.

    scalewise plan digits --workers 1,2,4,8,16 --price 2.50/h --deadline 2h
    scalewise plan cifar10 --from runs/measure-cifar10-20261116-101500 --link 25gbit --device-speed 10x --budget 40
    scalewise plan cifar10 --from runs --node-devices 8 --node-link nvlink --link infiniband --write slurm

    Arguments:
        workers: The numbers of workers to plan for, each on a device of its own.
        source: Records to plan from: folders of measure, train, compare or plan, link profiles of bench. What they do
            not hold is measured.
        target: The validation metric to train to, instead of one worker's whole budget.
        deadline: The longest time, as in 2h or 90min.
        budget: The most money.
        price: What one device costs, as in 2.50/h.
        link: Between nodes: a rate as in 25gbit, nvlink, pcie, infiniband, or a file that bench collectives wrote; by
            default one among the records, else what is measured between processes of this machine.
        node_devices: Devices of a node.
        node_link: Among the devices of a node, named like --link.
        device_speed: How many times faster than the measured device those to plan for are, as in 10x.
        overlap: How much of the communication hides behind compute, from 1 (nothing) to 10 (nearly all).
        input_rate: Samples a second that can be read for each worker; by default what runs among the records show.
        memory: Memory of a device, as in 16GB; by default what is free here.
        accelerator: Kind of device for --write, as in A100; without it the job files ask for no GPU.
        image: Container image for --write kubernetes and trainjob.
        device: Kind of device to measure on.
        write: Write a job file of the recommended row for this system into the plan's folder; may be repeated.
            kubernetes is a PyTorchJob of Kubeflow's training operator, trainjob a TrainJob of Kubeflow Trainer 2.
        out: Folder of the plan; by default runs/plan-<task>-<time>.
    """
    request = request_from(PlanRequest, task, options(locals()))
    with asking(quiet, task, data) as view:
        found = answer(request, view.notify)
    wrote = [f"wrote {file}" for file in found.job_files]
    document = show(planning_story, found.to_json(), found.folder, view.console, json, wrote)
    if found.plan.choice.row is None:
        raise TargetMissed(refusal(document))
    return 0
