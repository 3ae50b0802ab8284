"""`scalewise train`."""

from __future__ import annotations

import contextlib
import json as to_json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from scalewise.cli.flags import Device, Quiet, Reduce, Settings, ShardOptimizer, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, given_fields, leave_page, recipe_flags
from scalewise.engine.placement import CHECK_REPLICAS, DiskFull, ParallelName, Placement
from scalewise.extras import check as check_extra
from scalewise.present import live, terminal
from scalewise.recipe import RecipeMode
from scalewise.runs.request import HANG_SECONDS, Notice, Notify
from scalewise.trackers import TrackerName, tracking

if TYPE_CHECKING:
    from rich.console import Console

    from scalewise.records import Record, Result
    from scalewise.runs.train import Request

RecipeFlags = recipe_flags(__name__)
STOP_SECONDS = 25.0  # from a signal to the end, within the 30 that torch's agent and most schedulers allow


def train(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    recipe: str = "auto",
    epochs_fixed: Annotated[bool, Parameter(negative=())] = False,
    search: float | None = None,
    candidates: str = "muon,own",
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    min_processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    max_restarts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    hang_timeout: Annotated[float, Parameter(group=PLACEMENT)] = HANG_SECONDS,
    device: Device = "auto",
    reduce: Reduce = "ordered",
    parallel: Annotated[ParallelName, Parameter(group=PLACEMENT)] = "data",
    shard_optimizer: ShardOptimizer = False,
    noise: Annotated[bool, Parameter(group=PLACEMENT)] = True,
    loaders: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    check_replicas: Annotated[int, Parameter(group=PLACEMENT)] = CHECK_REPLICAS,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    checkpoint_steps: Annotated[int | None, Parameter(group=OUTPUT)] = None,
    on_disk_full: Annotated[DiskFull, Parameter(group=OUTPUT)] = "stop",
    track: Annotated[list[TrackerName] | None, Parameter(group=OUTPUT, negative=())] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Quiet = False,
) -> int:
    """Train a task with any number of workers.

    scalewise train digits --workers 8 --worker-batch 32 --processes 2
    scalewise train my_task.py --set width=64 --workers 4 --resume auto

    Arguments:
        recipe: auto derives what was not given, with several workers; plain changes nothing else; or a JSON file.
        epochs_fixed: Keep auto to the number of samples of a single worker, at the price of accuracy.
        search: Steps of auto's race, as a share of one worker's; by default about 0.03. 0 follows the noise (AdaScale).
        candidates: Optimizers that auto races, separated by commas; own is the task's.
        data: Folder of the task's data files, searched before $SCALEWISE_DATA and the usual caches; for downloads.
        processes: Operating-system processes, 1 to workers; by default as many as fill the machine.
        min_processes: Minimum number of processes to continue with if one cannot be restarted; by default all.
        max_restarts: How often processes are restarted from the newest state when one dies; by default 3 with several.
        hang_timeout: Seconds without any progress after which a process counts as dead; 0 waits for ever.
        parallel: What a process has: data (the model), fsdp (a part of each tensor), pipeline (some layers) or tensor.
        noise: Measure the noise scale.
        loaders: Loader processes per process, for data that are not in memory; by default cores ÷ processes, at most 8.
        check_replicas: Compare the processes' weights every N steps, to detect silent faults; 0 at checkpoints only.
        out: Run folder; by default runs/<task>-<time>.
        resume: A run folder to continue in, or auto for the newest one of this task (or --out).
        checkpoint_steps: Write a checkpoint every N steps, besides one at the end of every epoch.
        on_disk_full: When a checkpoint does not fit on the disk: stop, to resume later, or continue without it.
        track: Also report every number of the run to a tracker, in the run's folder and offline; may be repeated.
        json: Print the result as one JSON document on stdout.
    """
    placement = Placement(device, reduce, parallel, shard_optimizer, noise, loaders, check_replicas)
    for name in track or ():
        check_extra(name)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        from scalewise.engine.auto import Auto
        from scalewise.engine.processes.fork_server import preloaded
        from scalewise.runs.train import Request, launched
        from scalewise.tasks.load import load_task

        download(task, data, quiet)
        several = resume is not None or (processes or flags.workers or 1) > 1  # type: ignore[attr-defined]
        with preloaded(several) as fork_server:
            base = None if recipe in ("auto", "plain") else Path(recipe)
            mode: RecipeMode = "auto" if recipe == "auto" else "plain"
            auto = Auto(epochs_fixed, search, candidates.replace(" ", "").split(","))
            how = base, given_fields(flags), mode, auto, placement
            stored = out, resume, checkpoint_steps, on_disk_full
            request = Request(load_task(task, set or [], data), *how, *stored, hang_timeout, STOP_SECONDS)
            say = _printer(terminal.console(quiet))
            code = launched(request, sys.argv[1:], processes, min_processes, max_restarts, fork_server, say)
        return _train(request, track or [], json, quiet) if code is None else code


def _printer(console: Console) -> Notify:
    return lambda line: console.print(line, style="yellow" if isinstance(line, Notice) else None, markup=False)


def _train(request: Request, trackers: list[TrackerName], json: bool, quiet: bool) -> int:
    """Train on this process or as one of several, of which the first one draws, tracks and reports."""
    from scalewise.runs.train import started

    console = terminal.console(quiet)
    with started(request, lambda line: _printer(console)(line)) as run:
        training, names = run.training, trackers if run.leads else []
        done, total = training.progress, training.pace.total
        view = live.TrainingView(quiet or not run.leads, training.planned_steps, total, done.learned)
        console = view.console
        for line in live.derived_lines(run.recipe.derived, run.recipe.search):
            console.print(line)
        if training.validation is not None and training.task.validation is None:
            console.print(f"validation: {len(training.validation):,} training samples held out to select by")
        try:
            with tracking(names, run.folder.metrics, done.step) as tell, view.live():

                def show(record: Record) -> None:
                    view.show(record)
                    tell(record)

                result = run.train(show)
        finally:  # also of a run that failed: its page says why
            if run.leads:
                leave_page(run.folder.path, console)
        return _report(result, run.folder.path, json) if run.leads else 0


def _report(result: Result, folder: Path, json: bool) -> int:
    from scalewise.engine.processes.last_words import leave_document, print_once

    if json:
        document = to_json.dumps(result.to_json(), indent=2)
        if not leave_document(document):
            print_once(document, folder)
    return 3 if result.target_reached is False else 0
