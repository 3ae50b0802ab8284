"""`scalewise measure`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.cli.measure_view import screen
from scalewise.engine.placement import DeviceName, available_cores
from scalewise.errors import Interrupted, ScalewiseError, TargetMissed, TooLittleMemory, UsageError
from scalewise.present.live import StatusView
from scalewise.recipe import Recipe, resolve
from scalewise.runs.measure import wanted as folders
from scalewise.runs.measure.memory import parse_bytes
from scalewise.runs.measure.wanted import Part, Request, Verify, Wanted
from scalewise.runs.request import compiles, resumed_folder

if TYPE_CHECKING:
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.tasks.task import Task

RecipeFlags = recipe_flags(__name__, without=("target", "patience"))


@dataclass(frozen=True)
class Options:
    """Where the data are and what is written: nothing of it changes what is measured."""

    data: Path | None
    out: Path | None
    resume: str | None
    json: bool
    quiet: bool


def measure(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    recipe: Path | None = None,
    verify: Verify | None = None,
    target: float | None = None,
    seeds: int | None = None,
    most_seeds: int | None = None,
    sharpness: Annotated[bool, Parameter(negative=())] = False,
    weights: Path | None = None,
    between: tuple[Path, Path] | None = None,
    plane: str | None = None,
    samples: int = 1024,
    layers: Annotated[bool, Parameter(negative=())] = False,
    skip: Annotated[list[Part] | None, Parameter(negative=())] = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    memory: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Measure how far a model can scale: noise scale, critical batch, largest worker batch that fits, throughput.

    scalewise measure digits --workers 8
    scalewise measure digits --workers 8 --verify sweep --seeds 5
    scalewise measure cifar10 --memory 4GB
    scalewise measure digits --sharpness --between runs/small runs/large --plane random --skip noise --skip memory

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    recipe: Path | None
        A JSON file to start from instead of the task's own recipe.
    verify: Verify | None
        Measure the critical batch directly as well, by training: branch (from checkpoints, at several global batches)
        or sweep (steps to a target loss over global batches).
    target: float | None
        The validation loss that a sweep trains to; by default one that the recipe reaches.
    seeds: int | None
        Runs of --verify at each global batch; by default 3 of branches, 5 of a sweep, which adds as many as it takes to
        know the median of their steps to 3 %.
    most_seeds: int | None
        Runs of a sweep at each global batch at most; by default 64.
    sharpness: bool
        Measure how sharp the minimum is (Keskar et al. 2017), in the full space and in a random subspace.
    weights: Path | None
        The run folder, or its checkpoint, whose sharpness is measured; by default those of --between, or a run of this
        recipe that is trained for it.
    between: tuple[Path, Path] | None
        Two run folders of this task: the loss on the line between their weights.
    plane: str | None
        With --between, the loss on a plane as well, in a third direction: a third run folder, or random.
    samples: int
        Training samples that sharpness and the loss between runs are means over.
    layers: bool
        The noise scale of every layer too.
    skip: list[Part] | None
        A part to leave out; may be repeated.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    memory: str | None
        The memory of a machine, as in 4GB, for the largest worker batch; by default what is free here.
    processes: int | None
        Processes that share that memory; 1 by default.
    device: DeviceName
        Kind of device.
    out: Path | None
        Folder of the measurement; by default runs/measure-<task>-<time>.
    resume: str | None
        The folder of a measurement to go on with, or auto for the newest one of this task (or --out): runs that it
        holds are not trained again.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    wanted = Wanted(
        skip=skip or (),
        layers=layers,
        verify=verify,
        target=target,
        seeds=seeds,
        most_seeds=most_seeds,
        memory=None if memory is None else parse_bytes(memory),
        processes=processes,
        sharpness=sharpness,
        weights=weights,
        between=between,
        plane=plane,
        samples=samples,
        device=device,
    )
    if "RANK" in os.environ:
        raise UsageError(
            "measure starts its processes itself, got a torchrun job (RANK is set); run it without torchrun"
        )
    request = Request(task, list(set or []), given, None if recipe is None else str(recipe))
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _start(request, wanted, Options(data, out, resume, json, quiet))


def _start(request: Request, wanted: Wanted, options: Options) -> int:
    """Load the task, complete the recipe, and measure in a folder."""
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import check_folder
    from scalewise.tasks.load import load_task

    download(request.task, options.data, options.quiet)
    task = load_task(request.task, request.settings, options.data)
    resumed = resumed_folder(options.resume, options.out, f"measure-{task.name}", folders.REQUEST_FILE)
    if resumed is None:
        check_folder(options.out)
    else:
        request = folders.resumed_request(resumed, request)
    try:
        return _in_folder(request, task, wanted, options, resumed)
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error


def _in_folder(request: Request, task: Task, wanted: Wanted, options: Options, resumed: Path | None) -> int:
    """Measure in the folder that is resumed or in a new one; a mistake of the user's leaves no new one behind."""
    from scalewise.engine.store.folder import check_writable, make_folder

    run = _complete(request, task, wanted.device)
    if resumed is not None:
        check_writable(resumed)
    folder = resumed or make_folder(options.out, f"measure-{task.name}").path
    try:
        folders.save_request(folder, request)
        return _measure(task, run, wanted, options, folder)
    except Interrupted as error:
        number = signal.Signals(error.exit_code - 128)
        words = "stopped the measurement; its runs are saved, go on with the same command and --resume"
        raise Interrupted(f"{number.name} {words} {folder}", number) from None
    except BaseException:
        if resumed is None and all(folders.REQUEST_FILE in path.name for path in folder.iterdir()):
            shutil.rmtree(folder)  # nothing that one could go on with
        raise


def _complete(request: Request, task: Task, device: DeviceName) -> RunRecipe:
    """The recipe, complete: the file's or the task's own, what was given, and what follows from it."""
    from scalewise.engine.store.folder import RunRecipe

    base = task.recipe if request.recipe is None else Recipe.load(Path(request.recipe))
    recipe, derived = resolve(base, request.given, "plain", available_cores())
    if recipe.compile and not compiles(device):
        recipe = recipe.replace(compile=False)
    recipe = recipe.replace(patience=None, target=None)
    return RunRecipe(request.task, request.settings, recipe, derived)


def _measure(task: Task, run: RunRecipe, wanted: Wanted, options: Options, folder: Path) -> int:
    """Measure everything, then write and draw what came out."""
    from scalewise.runs.measure.measured import Unfinished, measured

    view = StatusView(options.quiet)
    with view.live():
        try:
            measurement = measured(task, run, wanted, folder, view.notify)
        except Unfinished as error:
            measurement = error.found
    text = folders.save_document(folder, {"run": str(folder), **measurement.to_json()})
    leave_page(folder, view.console)
    view.console.print(screen(measurement, view.console.width))
    view.console.print(f"[dim]folder {folder}[/dim]")
    if options.json:
        print(text, file=sys.__stdout__, flush=True)
    if measurement.missed is not None:
        raise TargetMissed(measurement.missed)
    if measurement.unfinished is not None:
        raise TooLittleMemory(measurement.unfinished)
    return 0
