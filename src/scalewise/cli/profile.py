"""`scalewise profile`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, given_fields, leave_page, print_document, recipe_flags
from scalewise.cli.profile_view import screen
from scalewise.engine.placement import DeviceName, ReduceName
from scalewise.present import terminal

RecipeFlags = recipe_flags(__name__, without=("target", "patience", "steps"))


def profile(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    recipe: Path | None = None,
    steps: int | None = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    reduce: Annotated[ReduceName, Parameter(group=PLACEMENT)] = "ordered",
    shard_optimizer: Annotated[bool, Parameter(group=PLACEMENT, negative=())] = False,
    noise: Annotated[bool, Parameter(group=PLACEMENT)] = True,
    loaders: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
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

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    recipe: Path | None
        A JSON file to start from instead of the task's own recipe.
    steps: int | None
        Steps to look at; by default enough for a steady picture. The same number is taken without the profiler,
        interleaved, to see what it costs.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    processes: int | None
        Operating-system processes, 1 to workers; by default as many as fit the machine.
    device: DeviceName
        Kind of device.
    reduce: ReduceName
        How gradients are summed.
    shard_optimizer: bool
        Each process updates its part of the parameters.
    noise: bool
        Measure the noise scale, as training does.
    loaders: int | None
        Loader processes of each process, for data that are not in memory; by default the cores shared out, at most 8.
    out: Path | None
        Folder for profile.json and trace.json; by default runs/profile-<task>-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    view = terminal.console(quiet)

    def notify(line: str) -> None:  # no spinner: it would be a thread that takes time from the steps
        view.print(line, style="dim", markup=False)

    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        download(task, data, quiet)
        from scalewise.runs.profile.profiler import TRACE_FILE
        from scalewise.runs.profile.profiler import profile as measure

        outcome = measure(
            task,
            set=set or (),
            recipe=recipe,
            steps=steps,
            data=data,
            processes=processes,
            device=device,
            reduce=reduce,
            shard_optimizer=shard_optimizer,
            noise=noise,
            loaders=loaders,
            out=out,
            notify=notify,
            **given_fields(flags),
        )
        if outcome is None or outcome.run is None:
            return 0  # the first process of the job draws
        leave_page(outcome.run, view)
        view.print(screen(outcome.profile, view.width))
        view.print(f"folder {outcome.run}; open {TRACE_FILE} in ui.perfetto.dev", style="dim", markup=False)
        if json:
            print_document(outcome.to_json())
    return 0
