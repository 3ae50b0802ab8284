"""`scalewise replay`."""

from __future__ import annotations

import contextlib
import json as to_json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli import replay_view
from scalewise.cli.inputs import stored_task
from scalewise.engine.placement import DeviceName
from scalewise.errors import ScalewiseError
from scalewise.present import terminal
from scalewise.records import finite

if TYPE_CHECKING:
    from scalewise.runs.replay import Replay


def replay(
    run: Path,
    /,
    *,
    step: int | None = None,
    task: str | None = None,
    data: Path | None = None,
    device: DeviceName = "auto",
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compute one step of a run again, bit for bit, and show what every worker did in it.

    scalewise replay runs/digits-20261116-101500 --step 120
    scalewise replay runs/mine-20261116-101500 --task my_task.py

    It begins at the newest good checkpoint from before the step, or at the start of training, and trains up to it; the
    run's folder stays as it is. Exit code 1: what came out is not what the run recorded.

    Parameters
    ----------
    run: Path
        A run folder of scalewise train.
    step: int | None
        Which step, counted from 1 as in the run's records; by default the one in which the run failed.
    task: str | None
        The run's task, where it is code of your own: a run's folder is not believed about code to run.
    data: Path | None
        Folder of the task's data files.
    device: DeviceName
        Kind of device.
    json: bool
        Print what came out as one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import RunFolder, read_recipe
    from scalewise.runs.replay import replay as compute

    console = terminal.console(quiet)
    with contextlib.redirect_stdout(sys.stderr):
        folder = RunFolder(run)
        recipe = read_recipe(folder)
        try:
            found = compute(folder, recipe, stored_task(recipe, task, data), step, device, console.print)
        except ScalewiseError:
            raise
        except Exception as error:
            raise translated(error) from error
    if json:
        print(to_json.dumps(document(found, str(run)), indent=2), file=sys.__stdout__)
    for problem in found.problems:
        console.print(problem, style="yellow", markup=False)
    console.print(replay_view.replay_view(found, str(run)))
    return 1 if found.matches is False else 0


def document(found: Replay, run: str) -> dict[str, Any]:
    """What `--json` prints."""
    recorded = found.recorded or {}
    now = {"loss": math.nan, "gradient_norm": None, "lr": None}
    if found.record is not None:
        now = {name: getattr(found.record, name) for name in now}
    content: dict[str, Any] = finite(
        {
            "run": run,
            "step": found.step,
            "start": found.start,
            "trained_steps": found.trained_steps,
            "matches": found.matches,
            "exact": found.exact,
            "recomputed": now,
            "recorded": {name: recorded.get(name) for name in now} if found.recorded is not None else None,
            "failure": found.failure,
            "weights": {"before": found.before, "after": found.after or None},
            "workers": [
                {
                    "worker": one.worker,
                    "loss": one.loss,
                    "weight": one.weight,
                    "gradient_norm": one.gradient_norm,
                    "parameters": one.parameters,
                    "not_finite": one.not_finite,
                    "samples": one.samples,
                    "epochs": one.epochs,
                }
                for one in found.workers
            ],
        }
    )
    return content
