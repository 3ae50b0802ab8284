"""`scalewise profile`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Loaders, Quiet, Reduce, Settings, ShardOptimizer, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, options, recipe_flags, show
from scalewise.present import terminal
from scalewise.present.stories.profile import profiling_story

RecipeFlags = recipe_flags(__name__, without=("target", "patience", "steps"))


def profile(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    recipe: Path | None = None,
    steps: int | None = None,
    data: DataFolder = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Device = "auto",
    reduce: Reduce = "ordered",
    shard_optimizer: ShardOptimizer = False,
    noise: Annotated[bool, Parameter(group=PLACEMENT)] = True,
    loaders: Loaders = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Where a step's time goes: 15 phases, layer by layer, on one process or several.

    Trains some steps and cuts each into 15 phases, layer by layer, on one process or several. A phase has worked while
    its own code ran, whatever that did with the time: the data set's __getitem__ in read, a layer's forward in forward.
    It has waited while something else had to finish first: loader processes in queue, other processes in communication.
    Worked and waited seconds add up to the step. What loader processes do is counted under their phases too, as beside
    the step, and is not part of that sum.

    scalewise profile digits
    scalewise profile digits --workers 8 --processes 2
    scalewise profile my_task.py --worker-batch 64 --loaders 2 --json

    Arguments:
        recipe: A JSON file to start from instead of the task's own recipe.
        steps: Steps to look at; by default enough for a steady picture. The same number is taken without the profiler,
            interleaved, to see what it costs.
        processes: Operating-system processes, 1 to workers; by default enough to fill the machine.
        noise: Measure the noise scale, as training does.
        out: Folder for profile.json and trace.json; by default runs/profile-<task>-<time>.
    """
    asked = options(locals())
    view = terminal.console(quiet)

    def notify(line: str) -> None:  # no spinner: it would be a thread that takes time from the steps
        view.print(line, style="dim", markup=False)

    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        download(task, data, quiet)
        from scalewise.runs.profile.profiler import TRACE_FILE
        from scalewise.runs.profile.profiler import profile as measure

        outcome = measure(task, **asked, notify=notify)
        if outcome is not None:  # the first process of a job draws
            hint = f"open {TRACE_FILE} in ui.perfetto.dev"
            show(profiling_story, outcome.to_json(), outcome.run, view, json, [hint])
    return 0
