"""`scalewise bench scaling`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Loaders, Quiet, Reduce, Settings, ShardOptimizer, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, given_fields, recipe_flags, show, whole_numbers
from scalewise.present.live import StatusView
from scalewise.present.stored import Stored
from scalewise.present.stories.bench import benching_story

DERIVED_HERE = ("workers", "threads", "epochs", "steps", "schedule", "lr_rule", "warmup_epochs", "patience", "target")
RecipeFlags = recipe_flags(__name__, without=DERIVED_HERE)


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
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
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

    Parameters
    ----------
    processes: str
        How many, as in 1,2,4; each is compared with the fewest.
    weak: bool
        The global batch grows with the processes.
    strong: bool
        The same global batch on more processes (the default).
    workers: int | None
        Workers in all; by default a number that all numbers of processes share evenly. With --weak those of each
        process, 1 by default.
    threads: int
        Computing threads of each process, the same for all.
    seconds: float
        How long to time, in rounds; three rounds at least. Starting the processes comes on top.
    hosts: int | None
        Spread the processes over N network namespaces of this machine (Linux, root).
    rate: str | None
        What each host's link carries, as tc writes it: 100mbit, 1gbit.
    out: Path | None
        Folder of the result; by default runs/bench-scaling-<time>.
    """
    view = StatusView(quiet)
    with contextlib.redirect_stdout(sys.stderr):
        from scalewise.runs.bench.scaling import scaling as measure

        counts = whole_numbers(processes, "--processes")
        download(task, data, quiet)
        with view.live():
            report = measure(
                task,
                processes=counts,
                weak=weak,
                strong=strong,
                workers=workers,
                threads=threads,
                seconds=seconds,
                set=set or (),
                data=data,
                hosts=hosts,
                rate=rate,
                device=device,
                reduce=reduce,
                shard_optimizer=shard_optimizer,
                loaders=loaders,
                out=out,
                notify=view.notify,
                **given_fields(flags),
            )
        document = report.to_json()
        show(benching_story(Stored(document)), document, report.run, view.console, json)
    return 0
