"""`scalewise bisect`."""

from __future__ import annotations

import contextlib
import json as to_json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli import bisect_view
from scalewise.cli.inputs import stored_task
from scalewise.engine.placement import DeviceName
from scalewise.errors import RunFolderError, ScalewiseError
from scalewise.present import terminal
from scalewise.records import finite

if TYPE_CHECKING:
    from rich.console import Console

    from scalewise.engine.store.folder import RunFolder, RunRecipe
    from scalewise.runs.bisect import Comparison, Parting
    from scalewise.runs.replay import Replay

Recomputed = tuple["Parting", tuple["Replay", "Replay"]]


def bisect(
    left: Path,
    right: Path,
    /,
    *,
    task: str | None = None,
    data: Path | None = None,
    device: DeviceName = "auto",
    recompute: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Find the first step, worker and tensor in which two runs differ, and what may be the reason.

    scalewise bisect runs/digits-20261116-101500 runs/digits-20261116-104500

    Compares what both have recorded, step by step, and their checkpoints; then computes the step in which they part
    once more for both, and looks at its weights, samples, losses and gradients in turn.

    Parameters
    ----------
    left: Path
        A run folder of scalewise train.
    right: Path
        Another.
    task: str | None
        The runs' task, where it is code of your own: a run's folder is not believed about code to run.
    data: Path | None
        Folder of the task's data files.
    device: DeviceName
        Kind of device.
    recompute: bool
        Compute the step in which they part again.
    json: bool
        Print what was found as one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import RunFolder, read_recipe
    from scalewise.runs.bisect import compare

    console = terminal.console(quiet)
    folders = (RunFolder(left), RunFolder(right))
    if left.resolve() == right.resolve():
        raise RunFolderError(f"two runs are needed, got {left} twice; name another")
    with contextlib.redirect_stdout(sys.stderr):
        recipes = (read_recipe(folders[0]), read_recipe(folders[1]))
        try:
            found = compare(*folders, recipes)
            again = None
            if recompute and found.step is not None:
                again = _recompute(found.step, folders, recipes, (task, data, device), console)
        except ScalewiseError:
            raise
        except Exception as error:
            raise translated(error) from error
    if json:
        print(to_json.dumps(document(found, again, (str(left), str(right))), indent=2), file=sys.__stdout__)
    console.print(bisect_view.bisect_view(found, again, (str(left), str(right))))
    return 0


def _recompute(
    step: int,
    folders: tuple[RunFolder, RunFolder],
    recipes: tuple[RunRecipe, RunRecipe],
    how: tuple[str | None, Path | None, DeviceName],
    console: Console,
) -> Recomputed:
    """Both runs around a step once more."""
    from scalewise.runs.bisect import part
    from scalewise.runs.replay import replay

    task, data, device = how
    tasks = [stored_task(recipe, task, data) for recipe in recipes]

    def again(number: int) -> tuple[Replay, Replay]:
        console.print(f"computing step {number} of both runs again", style="dim")
        first, second = (
            replay(folder, recipe, one, number, device)
            for folder, recipe, one in zip(folders, recipes, tasks, strict=True)
        )
        return first, second

    return part(again, step)


def document(found: Comparison, again: Recomputed | None, runs: tuple[str, str]) -> dict[str, Any]:
    """What `--json` prints."""
    parting, both = again if again is not None else (None, None)
    located = parting is not None and parting.stage is not None
    content: dict[str, Any] = finite(
        {
            "runs": list(runs),
            "differ": found.differ,
            "step": parting.step if parting is not None and located else found.step,
            "worker": parting.worker if parting is not None else None,
            "tensor": parting.tensor if parting is not None and located else found.checkpoint_tensor,
            "stage": parting.stage if parting is not None else None,
            "compared_steps": found.compared_steps,
            "record": {
                "step": found.record_step,
                "fields": {name: [*pair] for name, pair in found.record_fields.items()},
            },
            "checkpoints": {
                "same": found.same_steps,
                "different": found.checkpoint_step,
                "tensor": found.checkpoint_tensor,
            },
            "reasons": [asdict(reason) for reason in found.reasons],
            "reproduced": None if both is None else [one.matches for one in both],
            "problems": found.problems,
        }
    )
    return content
