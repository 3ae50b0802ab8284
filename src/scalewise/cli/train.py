"""`scalewise train`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json as to_json
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.engine.placement import (
    CHECK_REPLICAS,
    DeviceName,
    DiskFull,
    ParallelName,
    Placement,
    ReduceName,
    check_processes,
    check_recipe,
    default_processes,
)
from scalewise.engine.processes import signals
from scalewise.errors import Failed, LostContact, PlacementError, RecipeError, ScalewiseError
from scalewise.extras import check as check_extra
from scalewise.present import live, terminal
from scalewise.recipe import Derived, Recipe, RecipeMode
from scalewise.runs.request import compiles, resumed_folder
from scalewise.trackers import TrackerName, tracking

if TYPE_CHECKING:
    from rich.console import Console

    from scalewise.engine.loop import Training
    from scalewise.engine.processes.fork_server import ForkServer
    from scalewise.engine.store.folder import RunFolder, RunRecipe
    from scalewise.records import Result
    from scalewise.tasks.task import Task

RecipeFlags = recipe_flags(__name__)
MAX_RESTARTS = 3  # as torch's own launcher once had it
HANG_SECONDS = 60.0
SURVIVOR_SECONDS = 20.0
STOP_SECONDS = 25.0  # from a signal to the end, within the 30 that torch's agent and most schedulers allow


@dataclass(frozen=True)
class Request:
    """A training run as asked for on the command line."""

    task_spec: str
    settings: list[str]
    data: Path | None
    given: dict[str, Any]
    recipe: str
    epochs_fixed: bool
    placement: Placement
    processes: int | None
    min_processes: int | None
    max_restarts: int | None
    hang_timeout: float
    out: Path | None
    resume: str | None
    checkpoint_steps: int | None
    on_disk_full: DiskFull
    track: list[TrackerName]
    json: bool
    quiet: bool


def train(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    recipe: str = "auto",
    epochs_fixed: Annotated[bool, Parameter(negative=())] = False,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    min_processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    max_restarts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    hang_timeout: Annotated[float, Parameter(group=PLACEMENT)] = HANG_SECONDS,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    reduce: Annotated[ReduceName, Parameter(group=PLACEMENT)] = "ordered",
    parallel: Annotated[ParallelName, Parameter(group=PLACEMENT)] = "data",
    shard_optimizer: Annotated[bool, Parameter(group=PLACEMENT, negative=())] = False,
    noise: Annotated[bool, Parameter(group=PLACEMENT)] = True,
    loaders: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    check_replicas: Annotated[int, Parameter(group=PLACEMENT)] = CHECK_REPLICAS,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    checkpoint_steps: Annotated[int | None, Parameter(group=OUTPUT)] = None,
    on_disk_full: Annotated[DiskFull, Parameter(group=OUTPUT)] = "stop",
    track: Annotated[list[TrackerName] | None, Parameter(group=OUTPUT, negative=())] = None,
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
    epochs_fixed: bool
        Keep auto to the number of samples of a single worker, at the price of accuracy.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    processes: int | None
        Operating-system processes, 1 to workers; by default as many as fill the machine.
    min_processes: int | None
        Go on with fewer processes, down to so many, when one does not come back; by default with all or none.
    max_restarts: int | None
        How often processes are started again when one dies, from the newest state; by default 3 with several processes.
    hang_timeout: float
        Seconds without any progress after which a process counts as dead; 0 waits for ever.
    device: DeviceName
        Kind of device.
    reduce: ReduceName
        How gradients are summed: ordered and server are exact, allreduce is the backend's own.
    parallel: ParallelName
        What processes share: data (each has the model), fsdp (a part of each tensor), pipeline (some layers), tensor.
    shard_optimizer: bool
        Each process updates, and keeps optimizer state for, its part of the parameters.
    noise: bool
        Measure the noise scale.
    loaders: int | None
        Loader processes of each process, for data that are not in memory; by default the cores shared out, at most 8.
    check_replicas: int
        Compare the processes' weights every so many steps, so that a silent fault shows; 0 for at checkpoints only.
    out: Path | None
        Run folder; by default runs/<task>-<time>.
    resume: str | None
        A run folder to go on from, or auto for the newest one of this task (or --out).
    checkpoint_steps: int | None
        Write a checkpoint every so many steps, besides one at every epoch's end.
    on_disk_full: DiskFull
        When there is no room for a checkpoint: stop, to resume from the one before, or train on and try the next time.
    track: list[TrackerName] | None
        Also tell every number of the run to a tracker, in the run's folder and offline; may be repeated.
    json: bool
        Print the result as one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    placement = Placement(device, reduce, parallel, shard_optimizer, noise, loaders, check_replicas)
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise RecipeError(f"checkpoint_steps must be at least 1, got {checkpoint_steps}; change --checkpoint-steps")
    settings, trackers = list(set or []), list(track or [])
    for name in trackers:
        check_extra(name)
    request = Request(
        task,
        settings,
        data,
        given,
        recipe,
        epochs_fixed,
        placement,
        processes,
        min_processes,
        max_restarts,
        hang_timeout,
        out,
        resume,
        checkpoint_steps,
        on_disk_full,
        trackers,
        json,
        quiet,
    )
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _start(request)


def _start(request: Request) -> int:
    """Check everything that can be checked, then train here or launch the processes that will."""
    from scalewise.engine.processes.fork_server import preloaded
    from scalewise.engine.processes.team import takes_part
    from scalewise.tasks.load import load_task

    download(request.task_spec, request.data, request.quiet)
    several = request.resume is not None or (request.processes or request.given.get("workers", 1)) > 1
    with preloaded(several) as fork_server:
        task = load_task(request.task_spec, request.settings, request.data)
        if takes_part():
            return _take_part(request, task)
        run, resumed = _resolve(request, task, measure=False)
        check_recipe(request.placement, run.recipe)
        if request.processes is not None:
            check_processes(request.processes, run.recipe, request.placement)
        processes = request.processes or default_processes(run.recipe, request.placement)
        _check_elasticity(request, processes)
        if processes > 1 or request.max_restarts:
            return _launch(request, processes, run.recipe.threads or 1, fork_server)
    run, resumed = _resolve(request, task, measure=True)
    return _report(_train(request, task, run, resumed), request)


def _check_elasticity(request: Request, processes: int) -> None:
    if not 1 <= (request.min_processes or processes) <= processes or request.min_processes == 0:
        raise PlacementError(
            f"min_processes must be between 1 and the number of processes ({processes}), got {request.min_processes}; "
            f"change --min-processes"
        )
    if request.max_restarts is not None and request.max_restarts < 0:
        raise PlacementError(f"max_restarts must be at least 0, got {request.max_restarts}; change --max-restarts")
    if request.hang_timeout != 0 and not 1 <= request.hang_timeout < math.inf:
        raise PlacementError(
            f"hang_timeout must be at least 1 second, or 0 for ever, got {request.hang_timeout}; change --hang-timeout"
        )


def _launch(request: Request, processes: int, threads: int, fork_server: ForkServer | None) -> int:
    """Train in several processes on this machine, and say when they are started again."""
    from scalewise.engine.processes.launch import Elasticity, launch

    console = terminal.console(request.quiet)
    restarts = MAX_RESTARTS if request.max_restarts is None else request.max_restarts
    elasticity = Elasticity(
        max_restarts=restarts,
        min_processes=request.min_processes,
        emergency_seconds=max(SURVIVOR_SECONDS, request.hang_timeout),
        say=lambda line: console.print(line, style="yellow", markup=False),
    )
    return launch(processes, sys.argv[1:], threads, elasticity=elasticity, fork_server=fork_server)


def _resolve(request: Request, task: Task, measure: bool) -> tuple[RunRecipe, RunFolder | None]:
    """The recipe, complete if `measure`, and the folder of the run to go on from if there is one."""
    from scalewise.engine.auto import complete
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import (
        RunFolder,
        RunRecipe,
        begun_by_this_job,
        check_folder,
        check_same,
        check_writable,
        read_recipe,
    )

    begun = begun_by_this_job(request.out, task.name)
    if begun is not None:
        return read_recipe(begun), begun
    going_on = resumed_folder(request.resume, request.out, task.name, "recipe.json")
    if going_on is not None:
        resumed = RunFolder(going_on)
        stored = read_recipe(resumed)
        changes = request.given
        if "epochs" in changes and "steps" not in changes:
            changes = changes | {"steps": None}
        recipe = stored.recipe.replace(**changes)
        wanted = dataclasses.replace(stored, task=request.task_spec, settings=request.settings, recipe=recipe)
        check_same(stored, wanted, resumed, task.validation is not None)
        check_writable(resumed.path)
        return wanted, resumed
    check_folder(request.out)
    base, mode = task.recipe, request.recipe
    if mode not in ("auto", "plain"):
        base, mode = Recipe.load(Path(mode)), "plain"
    automatic: RecipeMode = "auto" if mode == "auto" and measure else "plain"
    try:
        recipe, derived, pilot = complete(
            task, base, request.given, automatic, request.placement.device, request.epochs_fixed
        )
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error
    if recipe.compile and not compiles(request.placement.device):
        recipe = recipe.replace(compile=False)
        derived.append(Derived("compile", False, "torch.compile needs a C++ compiler on a CPU; found none"))
    return RunRecipe(request.task_spec, request.settings, recipe, derived, pilot=pilot), None


def _take_part(request: Request, task: Task) -> int:
    """Train as one of several processes; all do what the first one has resolved."""
    import torch.distributed as dist

    from scalewise.engine.processes.last_words import leave_exit_report
    from scalewise.engine.processes.launch import end_with_launcher
    from scalewise.engine.processes.team import joined
    from scalewise.engine.processes.watchdog import watched

    end_with_launcher()
    with joined(request.placement.device) as team, watched(team, request.hang_timeout) as watch:
        agreed: list[Any] = [None]
        if team.leads:
            try:
                agreed = [_resolve(request, task, measure=True)]
            except ScalewiseError as error:
                agreed = [(str(error), error.exit_code)]
        dist.broadcast_object_list(agreed, 0)
        first, second = agreed[0]
        if isinstance(first, str):
            raise Failed(first, second)
        if watch is not None:
            watch.recipe = first.recipe
        try:
            result = _train(request, task, first, second)
        except ScalewiseError as error:  # said before the others notice that this process is gone
            leave_exit_report(error.exit_code, str(error), isinstance(error, LostContact))
            raise
        return _report(result, request) if team.leads else 0


def _train(request: Request, task: Task, run: RunRecipe, resumed: RunFolder | None) -> Result:
    """Train on this process, and draw and store if it leads."""
    from scalewise.engine.loop import Training
    from scalewise.engine.processes.failures import translated

    every = request.checkpoint_steps
    try:
        with Training(task, run.recipe, request.placement, run.derived, every, run.hold_out, run.pilot) as training:
            return _train_and_store(request, run, resumed, training)
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error


def _train_and_store(request: Request, run: RunRecipe, resumed: RunFolder | None, training: Training) -> Result:
    from scalewise.engine.store.folder import check_folder
    from scalewise.engine.store.lock import holding

    folder = resumed or _agree_on_folder(request, training)
    with holding(folder.path) if training.team.leads else contextlib.nullcontext():
        if resumed is None and training.team.leads:
            check_folder(folder.path)  # another run may have begun and ended in it in the meantime
        return _train_in(folder, request, run, resumed, training)


def _train_in(
    folder: RunFolder, request: Request, run: RunRecipe, resumed: RunFolder | None, training: Training
) -> Result:
    from scalewise.engine.store.folder import begin, stored_records
    from scalewise.records import Result

    team = training.team
    quiet = request.quiet or not team.leads
    console = terminal.console(quiet)
    if resumed is not None:
        _load(training, resumed, console)
    if team.leads:
        begin(folder, run, team.device.type, team.size)
    for line in live.derived_lines(run.derived):
        console.print(line)
    if training.validation is not None and training.task.validation is None:
        console.print(f"validation: {len(training.validation):,} training samples held out to select by")
    view = live.TrainingView(quiet, training.planned_steps, training.pace.total, training.progress.learned)
    try:
        told = request.track if team.leads else []
        warn = functools.partial(view.console.print, style="yellow", markup=False)
        with (
            tracking(told, folder.metrics, training.progress.step) as tell,
            view.live(),
            _stopping_after_a_step(training, view.console),
        ):
            for record in stored_records(training, folder, request.checkpoint_steps, request.on_disk_full, warn):
                view.show(record)
                tell(record)
    finally:  # also of a run that failed: its page says why
        if team.leads:
            leave_page(folder.path, console)
    assert isinstance(record, Result)
    return record


@contextlib.contextmanager
def _stopping_after_a_step(training: Training, console: Console) -> Iterator[None]:
    """Let a signal stop training where its state can be saved; a second one, or one after the end, stops it at once."""
    ends: list[threading.Timer] = []

    def ask(number: int) -> None:
        training.signal = number
        ends.append(threading.Timer(STOP_SECONDS, _give_up, (number, console)))
        ends[0].daemon = True
        ends[0].start()
        console.print("stopping after this step to save the state; a second signal stops at once")

    with signals.stopping(ask, lambda: training.ended):
        try:
            yield
        finally:
            for end in ends:
                end.cancel()


def _give_up(number: int, console: Console) -> None:
    """End a process that does not come to the end of its step; what it has not saved is lost."""
    console.print(f"no step has ended for {STOP_SECONDS:.0f} s; the newest checkpoint is what is left")
    os._exit(128 + number)


def _load(training: Training, folder: RunFolder, console: Console) -> None:
    """Go on from the newest good checkpoint, and say so."""
    from scalewise.engine.store.checkpoint import load_newest
    from scalewise.engine.store.folder import environment_changes

    for change in environment_changes(folder, training.team.device.type):
        console.print(f"resuming elsewhere: {change}; the bytes may differ", style="yellow", markup=False)
    for problem in load_newest(training, folder.checkpoints):
        console.print(f"{problem}; set aside", style="yellow", markup=False)
    step = training.progress.step
    where = f"step {step}" if step else "step 0: there is no checkpoint yet"
    console.print(f"resuming {folder.path} from {where}", markup=False)
    if training.progress.learned >= training.pace.total:
        console.print(
            "nothing is left to train: the budget is done; raise --epochs or --steps (with AdaScale: of one worker)",
            style="yellow",
            markup=False,
        )


def _agree_on_folder(request: Request, training: Training) -> RunFolder:
    """The first process makes the folder of a new run; all use it."""
    import torch.distributed as dist

    from scalewise.engine.store.folder import RunFolder, make_folder

    paths = [str(make_folder(request.out, training.task.name).path)] if training.team.leads else [""]
    if training.team.size > 1:
        dist.broadcast_object_list(paths, 0)
    return RunFolder(Path(paths[0]))


def _report(result: Result, request: Request) -> int:
    from scalewise.engine.processes.last_words import leave_document, print_once

    if request.json:
        document = to_json.dumps(result.to_json(), indent=2)
        assert result.run is not None
        if not leave_document(document):
            print_once(document, Path(result.run))
    return 3 if result.target_reached is False else 0
