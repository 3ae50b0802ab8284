"""`scalewise profile`."""

from __future__ import annotations

import contextlib
import json as to_json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.cli.profile_view import screen
from scalewise.engine.placement import (
    DeviceName,
    Placement,
    ReduceName,
    available_cores,
    check_processes,
    check_recipe,
    default_processes,
)
from scalewise.errors import LostContact, ScalewiseError, UsageError
from scalewise.present import terminal
from scalewise.recipe import Recipe, resolve
from scalewise.records import finite, write_atomically
from scalewise.runs.request import compiles

if TYPE_CHECKING:
    from scalewise.runs.profile.profiler import Outcome
    from scalewise.tasks.task import Task

RecipeFlags = recipe_flags(__name__, without=("target", "patience", "steps"))
DOCUMENT_FILE, TRACE_FILE = "profile.json", "trace.json"


@dataclass(frozen=True)
class Request:
    """A profile as asked for on the command line."""

    task_spec: str
    settings: list[str]
    data: Path | None
    given: dict[str, Any]
    recipe: Path | None
    placement: Placement
    processes: int | None
    steps: int | None
    out: Path | None
    json: bool
    quiet: bool


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
        Steps to look at; by default as many as give a steady picture. As many again are taken without looking, by
        turns, to see what looking costs.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    processes: int | None
        Operating-system processes, 1 to workers; by default as many as fill the machine.
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
    given = {name: value for name, value in vars(flags).items() if value is not None}
    placement = Placement(device=device, reduce=reduce, shard_optimizer=shard_optimizer, noise=noise, loaders=loaders)
    if steps is not None and steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}; change --steps")
    request = Request(task, list(set or []), data, given, recipe, placement, processes, steps, out, json, quiet)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _start(request)


def _start(request: Request) -> int:
    """Check everything that can be checked, then profile here or launch the processes that will."""
    from scalewise.engine.processes.fork_server import preloaded
    from scalewise.engine.processes.launch import launch
    from scalewise.engine.processes.team import takes_part
    from scalewise.engine.store.folder import check_folder
    from scalewise.tasks.load import load_task

    download(request.task_spec, request.data, request.quiet)
    with preloaded((request.processes or request.given.get("workers", 1)) > 1) as fork_server:
        task = load_task(request.task_spec, request.settings, request.data)
        recipe = _recipe(request, task)
        if takes_part():
            return _take_part(request, task, recipe)
        check_folder(request.out)
        check_recipe(request.placement, recipe)
        if request.processes is not None:
            check_processes(request.processes, recipe, request.placement)
        processes = request.processes or default_processes(recipe, request.placement)
        if processes > 1:
            return launch(processes, sys.argv[1:], recipe.threads or 1, fork_server=fork_server)
    return _report(request, task, _profile(request, task, recipe, leads=True))


def _recipe(request: Request, task: Task) -> Recipe:
    base = task.recipe if request.recipe is None else Recipe.load(request.recipe)
    recipe, _ = resolve(base, request.given, "plain", available_cores())
    if recipe.compile and not compiles(request.placement.device):
        recipe = recipe.replace(compile=False)
    return recipe


def _take_part(request: Request, task: Task, recipe: Recipe) -> int:
    """Profile as one of several processes."""
    from scalewise.engine.processes.last_words import leave_exit_report
    from scalewise.engine.processes.launch import end_with_launcher
    from scalewise.engine.processes.team import joined
    from scalewise.engine.store.folder import check_folder

    end_with_launcher()
    with joined(request.placement.device) as team:
        try:
            if team.leads:
                check_folder(request.out)
            return _report(request, task, _profile(request, task, recipe, team.leads))
        except ScalewiseError as error:  # said before the others notice that this process is gone
            leave_exit_report(error.exit_code, str(error), isinstance(error, LostContact))
            raise


def _profile(request: Request, task: Task, recipe: Recipe, leads: bool) -> Outcome | None:
    from scalewise.engine.processes.failures import translated
    from scalewise.runs.profile.profiler import profile as profiled

    console = terminal.console(request.quiet or not leads)

    def notify(line: str) -> None:  # no spinner: it would be a thread that takes time from the steps
        console.print(line, style="dim", markup=False)

    try:
        return profiled(task, recipe, request.placement, steps=request.steps, notify=notify)
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error


def _report(request: Request, task: Task, outcome: Outcome | None) -> int:
    """Write and draw what came out, where it did."""
    from scalewise.engine.store.folder import make_folder

    if outcome is None:
        return 0
    folder = make_folder(request.out, f"profile-{task.name}").path
    trace = folder / TRACE_FILE
    write_atomically(trace, to_json.dumps(outcome.trace))
    document = {"run": str(folder), **outcome.profile.to_json(), "trace": str(trace)}
    text = to_json.dumps(finite(document), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    console = terminal.console(request.quiet)
    leave_page(folder, console)
    console.print(screen(outcome.profile, console.width))
    console.print(f"folder {folder}; open {TRACE_FILE} in ui.perfetto.dev", style="dim", markup=False)
    if request.json:
        print(text, file=sys.__stdout__, flush=True)
    return 0
