"""`scalewise bench scaling` and `parallelism`: benches that train a task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Loaders, Quiet, Reduce, Settings, ShardOptimizer, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, asking, options, recipe_flags, show, whole_numbers
from scalewise.present.stories.bench import benching_story

DERIVED_HERE = ("workers", "threads", "epochs", "steps", "schedule", "lr_rule", "warmup_epochs", "patience", "target")
ScalingFlags = recipe_flags(__name__, without=DERIVED_HERE)
WITHOUT = ("threads", "epochs", "steps", "schedule", "warmup_epochs", "patience", "target", "compile")
ParallelismFlags = recipe_flags(__name__, without=WITHOUT)


def scaling(
    task: TaskName,
    /,
    *,
    processes: str,
    weak: Annotated[bool, Parameter(negative=())] = False,
    strong: Annotated[bool, Parameter(negative=())] = False,
    workers: int | None = None,
    threads: int = 1,
    seconds: float = 25.0,
    flags: Annotated[ScalingFlags, Parameter(name="*")] = ScalingFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    data: DataFolder = None,
    hosts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    rate: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    device: Device = "auto",
    reduce: Reduce = "ordered",
    shard_optimizer: ShardOptimizer = False,
    loaders: Loaders = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Train on one number of processes after another, in interleaved rounds: speed, efficiency, what was lost where.

    scalewise bench scaling fashion-mnist --processes 1,2,4
    scalewise bench scaling digits --processes 1,2 --weak --hosts 2 --rate 100mbit

    Arguments:
        processes: How many, as in 1,2,4; each is compared with the fewest.
        weak: The global batch grows with the processes.
        strong: The same global batch on more processes (the default).
        workers: Workers in all; by default a number that all numbers of processes share evenly. With --weak those of
            each process, 1 by default.
        threads: Computing threads of each process, the same for all.
        seconds: How long to time, in rounds; three rounds at least. Starting the processes comes on top.
        hosts: Spread the processes over N network namespaces of this machine (Linux, root).
        rate: What each host's link carries, as tc writes it: 100mbit, 1gbit.
        out: Folder of the result; by default runs/bench-scaling-<time>.
    """
    asked = options(locals()) | {"processes": whole_numbers(processes, "--processes")}
    with asking(quiet, task, data) as view:
        from scalewise.runs.bench.scaling import scaling as measure

        report = measure(task, **asked, notify=view.notify)
    show(benching_story, report.to_json(), report.run, view.console, json)
    return 0


def parallelism(
    task: TaskName,
    /,
    *,
    flags: Annotated[ParallelismFlags, Parameter(name="*")] = ParallelismFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    rounds: int = 7,
    data: DataFolder = None,
    processes: Annotated[int, Parameter(group=PLACEMENT)] = 2,
    device: Device = "auto",
    link: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare data parallelism, sharded optimizer, server, fsdp, pipeline and tensor on a task.

    Bytes sent and held are counted; steps are timed interleaved in the same processes.

    scalewise bench parallelism chars --processes 2 --workers 2 --worker-batch 32 --micro-batch 8
    scalewise bench parallelism mlp --processes 4 --link runs/bench-collectives/link.json --json

    Arguments:
        rounds: How often every way is timed; its median counts.
        processes: How many, at least 2. By default one worker each, with four micro batches.
        link: A link profile, as `bench collectives` writes it, to estimate the exchange with.
        out: Folder of the result; by default runs/bench-parallelism-<time>.
    """
    asked = options(locals())
    with asking(quiet or os.environ.get("RANK", "0") != "0", task, data) as view:
        from scalewise.runs.bench.parallelism import parallelism as measure

        report = measure(task, **asked, notify=view.notify)
    if report is not None:
        show(benching_story, report.to_json(), report.run, view.console, json)
    return 0
