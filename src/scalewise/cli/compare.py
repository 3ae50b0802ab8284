"""`scalewise compare`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.engine.placement import DeviceName, available_cores
from scalewise.engine.processes import signals
from scalewise.engine.processes.pool import Pool
from scalewise.errors import Failed, Interrupted, ScalewiseError, UsageError
from scalewise.present import terminal
from scalewise.present.live_compare import CompareView
from scalewise.present.stored import parsed
from scalewise.present.stories.compare import comparison_story
from scalewise.recipe import fitting_lr
from scalewise.runs.compare import comparison as folders
from scalewise.runs.compare.comparison import Comparison, Request
from scalewise.runs.compare.jobs import Comparing, Job, Message, Outcome, Setup
from scalewise.runs.compare.rows import chosen_rows, chosen_workers, lines
from scalewise.runs.compare.table import Metric
from scalewise.runs.request import compiles, resumed_folder

if TYPE_CHECKING:
    from scalewise.runs.compare.rows import Facts
    from scalewise.tasks.task import Task

DEFAULT_WORKERS, DEFAULT_SEEDS = "8", 5

RecipeFlags = recipe_flags(__name__, without=("workers", "seed"))


@dataclass(frozen=True)
class Options:
    """Where a comparison runs and what it writes: nothing of it changes a result."""

    data: Path | None
    jobs: int | None
    device: DeviceName
    out: Path | None
    resume: str | None
    json: bool
    quiet: bool


def compare(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    workers: str | None = None,
    seeds: int | None = None,
    rows: str | None = None,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    tune: int | None = None,
    hold_out: Annotated[bool, Parameter(negative=())] = False,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    jobs: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Compare what people do about many workers, over seeds: the table of remedies.

    scalewise compare digits --workers 8
    scalewise compare digits --workers 8 --rows single,naive,auto --seeds 10 --tune 5 --hold-out
    scalewise compare digits --workers 1,2,4,8,16,32

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    workers: str | None
        Workers of every row but single, 8 by default; several as in 1,2,4,8 draw the error against the global batch.
    seeds: int | None
        Runs of every row, with seeds 0, 1, …; 5 by default.
    rows: str | None
        Of single,naive,batch-norm,lr-scaled,warm-up,lars,lamb,adascale,auto; all, or naive,auto with several counts.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    tune: int | None
        Learning rates that every row may try on validation data before its seeds are run.
    hold_out: bool
        Keep a tenth of the training data out for validation, where the task has no validation data.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    jobs: int | None
        Runs at the same time; by default as many as there are cores for their threads.
    device: DeviceName
        Kind of device.
    out: Path | None
        Folder of the comparison; by default runs/compare-<task>-<time>.
    resume: str | None
        The folder of a comparison to go on with, or auto for the newest one of this task (or --out).
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    options = Options(data, jobs, device, out, resume, json, quiet)
    request = Request(
        task, list(set or []), given, tune, hold_out, rows, workers or DEFAULT_WORKERS, seeds or DEFAULT_SEEDS
    )
    asked = {"rows": rows, "workers": workers, "seeds": seeds}
    _check(request, {"seeds": seeds, "tune": tune, "jobs": jobs})
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _start(request, {name: value for name, value in asked.items() if value is not None}, options)


def _check(request: Request, counts: dict[str, int | None]) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{name} must be at least 1, got {count}")
    chosen_rows(request.rows, len(chosen_workers(request.workers)) > 1)
    if "RANK" in os.environ:
        raise UsageError(
            "compare starts its processes itself, got a torchrun job (RANK is set); run it without torchrun"
        )


def _start(request: Request, changed: dict[str, Any], options: Options) -> int:
    """Load the task, find out what is to be run, and run it."""
    from scalewise.tasks.load import load_task

    download(request.task, options.data, options.quiet)
    task = load_task(request.task, request.settings, options.data)
    resumed = resumed_folder(options.resume, options.out, f"compare-{task.name}", folders.REQUEST_FILE)
    if resumed is not None:
        request = folders.merged(folders.load_request(resumed), request, resumed, changed)
    counts = chosen_workers(request.workers)
    names = chosen_rows(request.rows, len(counts) > 1)
    found, skipped = lines(names, counts, _facts(request, task, options), asked=request.rows is not None)
    _check_validation(request, task)
    if not found:
        raise UsageError(f"none of the rows can be run: {'; '.join(f'{row.name}: {row.reason}' for row in skipped)}")
    assert task.metric is not None
    metric = Metric(task.metric, task.higher_is_better)
    comparison = Comparison(found, skipped, metric, request.seeds, request.tune)
    return _in_folder(request, comparison, task, options, resumed)


def _facts(request: Request, task: Task, options: Options) -> Facts:
    from scalewise.engine.processes.failures import translated
    from scalewise.runs.compare.trainings import facts

    base = task.recipe.replace(**request.given)
    if rate := fitting_lr(task.recipe, request.given):  # as train does
        base = base.replace(lr=rate.value)
    if base.threads is None:  # for single too, so that rows differ in nothing but their remedy
        base = base.replace(threads=1)
    if base.compile and not compiles(options.device):
        base = base.replace(compile=False)
    try:
        return facts(task, request.task, tuple(request.settings), base)
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error


def _check_validation(request: Request, task: Task) -> None:
    if request.tune is not None and task.validation is None and not request.hold_out:
        raise UsageError(
            "--tune needs validation data to choose by, and this task has none; give the task validation=…, or add "
            "--hold-out to keep a tenth of the training data out"
        )


def _in_folder(request: Request, comparison: Comparison, task: Task, options: Options, resumed: Path | None) -> int:
    """Run in the folder that is resumed or in a new one; a mistake in task or recipe leaves no new one behind."""
    from scalewise.engine.store.folder import check_writable, make_folder

    if resumed is not None:
        check_writable(resumed)
    folder = resumed or make_folder(options.out, f"compare-{task.name}").path
    folders.save_request(folder, request)
    try:
        return _run(request, comparison, options, folder, task.name)
    except ScalewiseError as error:
        if error.exit_code == UsageError.exit_code and resumed is None:
            shutil.rmtree(folder)
        raise


def _run(request: Request, comparison: Comparison, options: Options, folder: Path, task_name: str) -> int:
    """Train everything, then write and draw what came out."""
    began = time.monotonic()
    threads = comparison.lines[0].plan.recipe.threads or 1
    runs = max(len(comparison.seed_jobs()), len(comparison.trial_jobs()))
    jobs = options.jobs or max(1, min(runs, _slots(options.device, threads)))
    view = CompareView(options.quiet, comparison.metric, comparison.seeds, jobs)
    view.introduce(comparison.lines, comparison.skipped, threads)
    loaders = max(1, available_cores() // jobs)
    setup = Setup(request.task, options.data, folder, request.hold_out, options.device, loaders)

    def ask(number: int) -> None:
        pool.stop(number)
        view.console.print("stopping all runs after their step to save the state; a second signal stops at once")

    with Pool(jobs, Comparing(setup)) as pool, view.live(), signals.stopping(ask):
        _train_all(pool, comparison, view)
    content = {
        "run": str(folder),
        "task": task_name,
        "settings": request.settings,
        "workers": chosen_workers(request.workers),
        "seeds": list(range(comparison.seeds)),
        "threads": threads,
        "jobs": jobs,
        "seconds": time.monotonic() - began,
    }
    text = folders.save_document(folder, content | comparison.document())
    leave_page(folder, view.console)
    if pool.stopping:
        raise Interrupted(
            f"{signals.name(pool.stopping)} stopped the comparison; its runs are saved, go on with the same "
            f"command and --resume {folder}",
            pool.stopping,
        )
    terminal.show(view.console, comparison_story(parsed(text.encode())))
    view.console.print(f"folder {folder}", style="dim", markup=False)
    if options.json:
        print(text, file=sys.__stdout__, flush=True)
    return _verdict(comparison, folder)


def _train_all(pool: Pool[Job, Message], comparison: Comparison, view: CompareView) -> None:
    """The trials, if there are any, then all rows with all seeds."""
    if comparison.budget is not None:
        _follow(pool, comparison.trial_jobs(), "tuning", comparison, view)
        if pool.stopping:
            return
        comparison.choose()
        view.tuned(comparison.tuned)
    _follow(pool, comparison.seed_jobs(), "training", comparison, view)


def _follow(pool: Pool[Job, Message], jobs: list[Job], title: str, comparison: Comparison, view: CompareView) -> None:
    """Do some jobs, keep what comes out, and draw it."""
    view.begin(title, jobs, comparison.rows())
    for message in pool.run(jobs):
        comparison.take(message)
        view.show(message, comparison.rows() if isinstance(message, Outcome) else None)


def _slots(device: DeviceName, threads: int) -> int:
    """Runs that the machine has room for: one on an accelerator, else cores ÷ threads."""
    import torch

    accelerated = device in ("cuda", "mps") or (
        device == "auto" and (torch.cuda.is_available() or torch.backends.mps.is_available())
    )
    return 1 if accelerated else available_cores() // threads


def _verdict(comparison: Comparison, folder: Path) -> int:
    """The exit code: a row that diverged is a finding, a run that broke is not, and no result at all is a failure."""
    failures = comparison.failures()
    broken = [failure for failure in failures if not failure.diverged]
    if broken:
        raise Failed(f"{len(broken)} of the runs failed; --resume {folder} tries them again", 1)
    if failures and all(row.test.mean is None for row in comparison.rows()):
        raise Failed("every run diverged; lower --lr", 1)
    return 0
