"""`scalewise replay`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from scalewise.cli.flags import DataFolder, Device, Json, Quiet
from scalewise.cli.inputs import show
from scalewise.present import terminal
from scalewise.present.stories.replay import replay_story


def replay(
    run: Path,
    /,
    *,
    step: int | None = None,
    task: str | None = None,
    data: DataFolder = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compute one step of a run again, bit for bit, and show what every worker did in it.

    scalewise replay runs/digits-20261116-101500 --step 120
    scalewise replay runs/mine-20261116-101500 --task my_task.py

    It begins at the newest good checkpoint from before the step, or at the start of training, and trains up to it; the
    run's folder stays as it is. Exit code 1: the result is not what the run recorded.

    Arguments:
        run: A run folder of scalewise train.
        step: Which step, counted from 1 as in the run's records; by default the one in which the run failed.
        task: The run's task, where it is code of your own: a folder is not trusted to name code to run.
    """
    from scalewise.runs.replay import replay as compute

    console = terminal.console(quiet)
    with contextlib.redirect_stdout(sys.stderr):
        found = compute(run, step=step, task=task, data=data, device=device, notify=console.print)
    for problem in found.problems:
        console.print(problem, style="yellow", markup=False)
    show(replay_story, found.to_json(), None, console, json)
    return 1 if found.matches is False else 0
