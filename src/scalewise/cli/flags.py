"""Flags that mean the same in every command that has them: type, group and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT
from scalewise.engine.placement import DeviceName, ReduceName

TaskName = Annotated[
    str, Parameter(help="A built-in name, path/to/file.py (its task() function), or package.module:function.")
]
Settings = Annotated[
    list[str] | None, Parameter(negative=(), help="name=value for the task's function; may be repeated.")
]
DataFolder = Annotated[
    Path | None,
    Parameter(
        group=PLACEMENT,
        help="Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go "
        "there.",
    ),
]
Device = Annotated[DeviceName, Parameter(group=PLACEMENT, help="Kind of device.")]
Reduce = Annotated[
    ReduceName,
    Parameter(
        group=PLACEMENT,
        help="How gradients are summed: ordered and server are exact, allreduce is the backend's own.",
    ),
]
ShardOptimizer = Annotated[
    bool,
    Parameter(
        group=PLACEMENT,
        negative=(),
        help="Each process updates, and keeps optimizer state for, its part of the parameters.",
    ),
]
Loaders = Annotated[
    int | None,
    Parameter(
        group=PLACEMENT,
        help="Loader processes of each process, for data that are not in memory; by default the cores shared out, at "
        "most 8.",
    ),
]
Json = Annotated[bool, Parameter(group=OUTPUT, negative=(), help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, Parameter(group=OUTPUT, negative=(), help="Draw nothing.")]
