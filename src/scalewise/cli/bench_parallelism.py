"""`scalewise bench parallelism`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Quiet, Settings, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, given_fields, recipe_flags, show
from scalewise.present.live import StatusView
from scalewise.present.stored import Stored
from scalewise.present.stories.bench import benching_story

WITHOUT = ("threads", "epochs", "steps", "schedule", "warmup_epochs", "patience", "target", "compile")
RecipeFlags = recipe_flags(__name__, without=WITHOUT)
ROUNDS = 7


def parallelism(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    rounds: int = ROUNDS,
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

    Parameters
    ----------
    rounds: int
        How often every way is timed; its median counts.
    processes: int
        How many, at least 2. By default one worker each, with four micro batches.
    link: Path | None
        A link profile, as `bench collectives` writes it, to estimate the exchange with.
    out: Path | None
        Folder of the result; by default runs/bench-parallelism-<time>.
    """
    view = StatusView(quiet or os.environ.get("RANK", "0") != "0")
    with contextlib.redirect_stdout(sys.stderr):
        download(task, data, quiet)
        from scalewise.runs.bench.parallelism import parallelism as measure

        with view.live():
            report = measure(
                task,
                set=set or (),
                rounds=rounds,
                data=data,
                processes=processes,
                device=device,
                link=link,
                out=out,
                notify=view.notify,
                **given_fields(flags),
            )
        if report is not None:
            document = report.to_json()
            show(benching_story(Stored(document)), document, report.run, view.console, json)
    return 0
