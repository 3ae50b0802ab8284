"""`scalewise train`."""

from __future__ import annotations

import dataclasses
import json as to_json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from scalewise.cli import views
from scalewise.engine.placement import DeviceName, Placement, ReduceName, check_processes, default_processes
from scalewise.errors import RecipeError, RunFolderError, ScalewiseError, UserCodeError
from scalewise.recipe import Recipe, resolve

if TYPE_CHECKING:
    from scalewise.engine.run import RunFolder, RunRecipe
    from scalewise.records import Result
    from scalewise.tasks.task import Task

RECIPE = Group("Recipe (how it is learned; part of the result)", sort_key=1)
PLACEMENT = Group("Placement (where it runs; never changes an exact result)", sort_key=2)
OUTPUT = Group("Output", sort_key=3)


def _recipe_flags() -> type:
    """A dataclass with every recipe field as an optional flag: the recipe is the one list of them."""
    columns = [
        (
            name,
            Annotated[field.annotation | None, Parameter(help=field.description, group=RECIPE)],  # type: ignore[operator]
            dataclasses.field(default=None),
        )
        for name, field in Recipe.model_fields.items()
    ]
    return dataclasses.make_dataclass("RecipeFlags", columns, frozen=True, namespace={"__module__": __name__})


RecipeFlags = _recipe_flags()


@dataclass(frozen=True)
class Request:
    """A training run as asked for on the command line."""

    task_spec: str
    settings: list[str]
    given: dict[str, Any]
    recipe: str
    placement: Placement
    processes: int | None
    out: Path | None
    resume: str | None
    checkpoint_steps: int | None
    json: bool
    quiet: bool


def train(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    recipe: str = "auto",
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    reduce: Annotated[ReduceName, Parameter(group=PLACEMENT)] = "ordered",
    shard_optimizer: Annotated[bool, Parameter(group=PLACEMENT, negative=())] = False,
    noise: Annotated[bool, Parameter(group=PLACEMENT)] = True,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    checkpoint_steps: Annotated[int | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Train a task with any number of workers.

    scalewise train digits
    scalewise train digits --workers 8 --worker-batch 32 --processes 2
    scalewise train my_task.py --set width=64 --workers 4 --resume auto

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    recipe: str
        auto derives what was not given when there are several workers; plain changes nothing else; or a JSON file.
    processes: int | None
        Operating-system processes, 1 to workers; by default as many as fill the machine.
    device: DeviceName
        Kind of device.
    reduce: ReduceName
        How gradients are summed: ordered and server are exact, allreduce is the backend's own.
    shard_optimizer: bool
        Each process updates, and keeps optimizer state for, its part of the parameters.
    noise: bool
        Measure the noise scale.
    out: Path | None
        Run folder; by default runs/<task>-<time>.
    resume: str | None
        A run folder to go on from, or auto for the newest one of this task (or --out).
    checkpoint_steps: int | None
        Write a checkpoint every so many steps, besides one at every epoch's end.
    json: bool
        Print the result as one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    placement = Placement(device=device, reduce=reduce, shard_optimizer=shard_optimizer, noise=noise)
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise RecipeError(f"checkpoint_steps must be at least 1, got {checkpoint_steps}; change --checkpoint-steps")
    request = Request(
        task, list(set or []), given, recipe, placement, processes, out, resume, checkpoint_steps, json, quiet
    )
    return _start(request)


def _start(request: Request) -> int:
    """Check everything that can be checked, then train here or launch the processes that will."""
    from scalewise.engine.team import takes_part
    from scalewise.tasks.load import load_task

    task = load_task(request.task_spec, request.settings)
    folder, resumed = _folder(request, task)
    run = _resolve(request, task, resumed, folder)
    if takes_part():
        return _take_part(request, task, run, resumed)
    processes = request.processes or default_processes(run.recipe, os.cpu_count() or 1)
    if request.processes is not None:
        check_processes(request.processes, run.recipe)
    if processes > 1:
        from scalewise.engine.launch import launch

        return launch(processes, sys.argv[1:], run.recipe.threads or 1)
    return _run(request, task, run, folder, resumed)


def _folder(request: Request, task: Task) -> tuple[RunFolder, RunFolder | None]:
    """The run folder, and the same again if there is a run in it to go on from."""
    from scalewise.engine.run import RunFolder, new_folder, newest

    if request.resume is None:
        return new_folder(request.out, task.name), None
    if request.resume == "auto":
        if request.out is not None:
            known = RunFolder(request.out) if RunFolder(request.out).recipe.is_file() else None
        else:
            known = newest(task.name, Path("runs"))
        return (known, known) if known else (new_folder(request.out, task.name), None)
    if request.out is not None:
        raise RunFolderError(f"--resume {request.resume} goes on in that folder; drop --out {request.out}")
    folder = RunFolder(Path(request.resume))
    return folder, folder


def _resolve(request: Request, task: Task, resumed: RunFolder | None, folder: RunFolder) -> RunRecipe:
    """The complete recipe: the stored one on resume, else the task's with the flags and what follows from them."""
    from scalewise.engine.run import RunRecipe, check_same, read_recipe

    if resumed is not None:
        stored = read_recipe(resumed)
        wanted = RunRecipe(request.task_spec, request.settings, stored.recipe.replace(**request.given), stored.derived)
        check_same(stored, wanted, folder)
        return wanted
    base, mode = task.recipe, request.recipe
    if mode not in ("auto", "plain"):
        base, mode = Recipe.load(Path(mode)), "plain"
    recipe, derived = resolve(base, request.given, "auto" if mode == "auto" else "plain", os.cpu_count() or 1)
    return RunRecipe(request.task_spec, request.settings, recipe, derived)


def _take_part(request: Request, task: Task, run: RunRecipe, resumed: RunFolder | None) -> int:
    """Train as one of several processes; all agree on the first one's folder."""
    import torch.distributed as dist

    from scalewise.engine.run import RunFolder
    from scalewise.engine.team import joined

    with joined(request.placement.device) as team:
        paths = [""]
        if team.leads:
            paths = [str(_folder(request, task)[0].path)]
        dist.broadcast_object_list(paths, 0)
        return _run(request, task, run, RunFolder(Path(paths[0])), resumed)


def _run(request: Request, task: Task, run: RunRecipe, folder: RunFolder, resumed: RunFolder | None) -> int:
    """Train on this process, and draw and store if it leads."""
    from scalewise.engine import checkpoint
    from scalewise.engine.loop import Training
    from scalewise.engine.run import begin, environment_changes, stored_records
    from scalewise.records import Result

    try:
        with Training(task, run.recipe, request.placement, run.derived, request.checkpoint_steps) as training:
            quiet = request.quiet or not training.team.leads
            console = views.console(quiet)
            if resumed is not None:
                for change in environment_changes(folder):
                    console.print(f"[yellow]resuming elsewhere: {change}; the bytes may differ[/yellow]")
                path, problems = checkpoint.load_newest(training, folder.checkpoints)
                for problem in problems:
                    console.print(f"[yellow]{problem}; passed over[/yellow]", markup=True)
                where = f"step {training.progress.step}" if path else "step 0: there is no checkpoint yet"
                console.print(f"resuming {folder.path} from {where}")
            if training.team.leads:
                begin(folder, run, training.team.size)
            for line in views.derived_lines(run.derived):
                console.print(line)
            if training.validation is not None and task.validation is None:
                console.print(f"validation: {len(training.validation):,} training samples held out to select by")
            view = views.TrainingView(quiet, training.total_steps, training.progress.step)
            result: Result | None = None
            with view.live():
                for record in stored_records(training, folder, request.checkpoint_steps):
                    view.show(record)
                    if isinstance(record, Result):
                        result = record
            assert result is not None
            return _report(result, request, training.team.leads)
    except (ScalewiseError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _as_user_error(error) from error


def _as_user_error(error: Exception) -> ScalewiseError:
    from scalewise.frames import user_frames

    return UserCodeError(f"training failed:\n{user_frames(error)}")


def _report(result: Result, request: Request, leads: bool) -> int:
    if request.json and leads:
        print(to_json.dumps(result.to_json(), indent=2), flush=True)
    return 3 if result.target_reached is False else 0
