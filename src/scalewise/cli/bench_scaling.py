"""`scalewise bench scaling`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli import bench_view
from scalewise.cli.bench import finish
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, given_fields, recipe_flags, whole_numbers
from scalewise.engine.placement import DeviceName, ReduceName
from scalewise.present.live import StatusView

DERIVED_HERE = ("workers", "threads", "epochs", "steps", "schedule", "lr_rule", "warmup_epochs", "patience", "target")
RecipeFlags = recipe_flags(__name__, without=DERIVED_HERE)


def scaling(
    task: str,
    /,
    *,
    processes: str,
    weak: Annotated[bool, Parameter(negative=())] = False,
    strong: Annotated[bool, Parameter(negative=())] = False,
    workers: int | None = None,
    threads: int = 1,
    seconds: float = 25.0,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    hosts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    rate: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    reduce: Annotated[ReduceName, Parameter(group=PLACEMENT)] = "ordered",
    shard_optimizer: Annotated[bool, Parameter(group=PLACEMENT, negative=())] = False,
    loaders: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Train on one number of processes after another, in interleaved rounds: speed, efficiency, what was lost where.

    scalewise bench scaling fashion-mnist --processes 1,2,4
    scalewise bench scaling digits --processes 1,2 --weak --hosts 2 --rate 100mbit

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
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
    set: list[str] | None
        name=value for the task's function; may be repeated.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    hosts: int | None
        Spread the processes over N network namespaces of this machine (Linux, root).
    rate: str | None
        What each host's link carries, as tc writes it: 100mbit, 1gbit.
    device: DeviceName
        Kind of device.
    reduce: ReduceName
        How gradients are summed: ordered and server are exact, allreduce is the backend's own.
    shard_optimizer: bool
        Each process updates, and keeps optimizer state for, its part of the parameters.
    loaders: int | None
        Loader processes of each process, for data that are not in memory.
    out: Path | None
        Folder of the result; by default runs/bench-scaling-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
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
        finish(report, view, bench_view.scaling_screen(report), json)
    return 0
