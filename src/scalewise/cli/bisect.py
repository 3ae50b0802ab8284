"""`scalewise bisect`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from scalewise.cli.flags import DataFolder, Device, Json, Quiet
from scalewise.cli.inputs import show
from scalewise.present import terminal
from scalewise.present.stories.replay import bisect_story


def bisect(
    left: Path,
    right: Path,
    /,
    *,
    task: str | None = None,
    data: DataFolder = None,
    device: Device = "auto",
    recompute: bool = True,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find the first step, worker and tensor in which two runs differ, and what may be the reason.

    scalewise bisect runs/digits-20261116-101500 runs/digits-20261116-104500

    Compares what both have recorded, step by step, and their checkpoints; then computes the step in which they part
    again for both, and looks at its weights, samples, losses and gradients in turn.

    Arguments:
        left: A run folder of scalewise train.
        right: Another.
        task: The runs' task, where it is code of your own: a folder is not trusted to name code to run.
        recompute: Compute the step in which they part again.
    """
    from scalewise.runs.bisect import bisect as find

    console = terminal.console(quiet)

    def notify(line: str) -> None:
        console.print(line, style="dim", markup=False)

    with contextlib.redirect_stdout(sys.stderr):
        found = find(left, right, task=task, data=data, device=device, recompute=recompute, notify=notify)
    show(bisect_story, found.to_json(), None, console, json)
    return 0
