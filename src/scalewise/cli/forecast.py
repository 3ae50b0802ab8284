"""`scalewise forecast`."""

from __future__ import annotations

import contextlib
import json as to_json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from scalewise.cli import forecast_view as views
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.engine.placement import DeviceName
from scalewise.errors import DataError, ScalewiseError, TargetMissed, UsageError
from scalewise.files import read_json
from scalewise.present.live import StatusView
from scalewise.present.terminal import console
from scalewise.runs.request import resumed_folder, single_recipe

if TYPE_CHECKING:
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.plan.model import Inputs
    from scalewise.runs.forecast import Outlook, Points
    from scalewise.runs.subsets import Trained
    from scalewise.tasks.task import Task

DOCUMENT_FILE = "forecast.json"
USUAL_SHARES, USUAL_SEEDS = "2,4,8,16,32", 3

RecipeFlags = recipe_flags(__name__, without=("workers", "target", "patience", "steps", "lr_rule", "seed"))


@dataclass(frozen=True)
class KnownPlan:
    """What a forecast takes from a plan."""

    path: Path
    task: str | None
    inputs: Inputs
    workers: list[int]
    epochs: float


@dataclass(frozen=True)
class Request:
    """A forecast as asked for on the command line."""

    source: str
    settings: list[str]
    given: dict[str, Any]
    shares: list[float]
    sizes: list[str]
    seeds: int
    target: float | None
    plan: KnownPlan | None
    data: Path | None
    device: DeviceName
    out: Path | None
    resume: str | None
    json: bool
    quiet: bool


def forecast(
    source: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    target: float | None = None,
    shares: str = USUAL_SHARES,
    sizes: str | None = None,
    seeds: int = USUAL_SEEDS,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    plan: Path | None = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Say how much data, or how large a model, an error takes: the power law through errors at smaller sizes.

    scalewise forecast errors.csv --target 0.05
    scalewise forecast fashion-mnist --shares 2,4,8,16,25 --seeds 3 --target 0.08 --plan runs/plan-fashion-mnist-…
    scalewise forecast mlp --sizes hidden=8,16,32,64,128

    Parameters
    ----------
    source: str
        A CSV file with columns samples (or parameters) and error; or a task, which is then trained on shares of its
        data: a built-in name, path/to/file.py (its task() function), or package.module:function.
    target: float | None
        The error to come down to.
    shares: str
        Percentages of the training data to train on.
    sizes: str | None
        Models to train instead, as values of a setting of the task's function: width=16,32,64.
    seeds: int
        Trainings at each size.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    plan: Path | None
        The folder of a plan of this task: what the target takes is then said for each of its numbers of workers.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    device: DeviceName
        Kind of device.
    out: Path | None
        Folder of the trainings; by default runs/forecast-<task>-<time>. A table of errors leaves one only where this
        is given.
    resume: str | None
        The folder of a forecast to go on with, or auto for the newest one of this task (or --out).
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    if "RANK" in os.environ:
        raise UsageError("forecast is made by one process, got a torchrun job (RANK is set); run it without torchrun")
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {seeds}")
    if target is not None and not 0 < target < float("inf"):
        raise UsageError(f"--target is an error above 0, got {target:g}")
    request = Request(
        source=source,
        settings=list(set or []),
        given={name: value for name, value in vars(flags).items() if value is not None},
        shares=_shares(shares),
        sizes=_sizes(sizes),
        seeds=seeds,
        target=target,
        plan=None if plan is None else _read_plan(plan),
        data=data,
        device=device,
        out=out,
        resume=resume,
        json=json,
        quiet=quiet,
    )
    if plan is not None and target is None:
        console(quiet).print("--plan says what a target takes: nothing, without --target", style="yellow", markup=False)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        return _from_file(request) if _is_table(source) else _from_task(request)


def _is_table(source: str) -> bool:
    return source.endswith(".csv") or (Path(source).is_file() and not source.endswith(".py"))


def _shares(text: str) -> list[float]:
    try:
        found = sorted({float(part.strip().removesuffix("%")) / 100 for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < share <= 1 for share in found):
        raise UsageError(f"--shares needs percentages above 0 and up to 100, as in 2,4,8,16, got {text!r}")
    return found


def _sizes(text: str | None) -> list[str]:
    """`width=16,32` as settings, one for each value."""
    if text is None:
        return []
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise UsageError(f"--sizes needs a setting and its values, as in width=16,32,64, got {text!r}")
    return [f"{name.strip()}={value.strip()}" for value in values.split(",")]


def _from_file(request: Request) -> int:
    """Errors that are known already; they leave a folder, with a page, where --out asks for one."""
    from scalewise.engine.store.folder import check_folder
    from scalewise.runs.forecast import outlook, read_points

    if request.resume is not None:
        raise UsageError(f"--resume goes on with trainings, got a table of errors, {request.source}; drop it")
    if request.out is not None:
        check_folder(request.out)
    found = outlook(read_points(Path(request.source)), request.target)
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
    return _finish(request, found, [], request.out, StatusView(request.quiet))


def _from_task(request: Request) -> int:
    """Errors from trainings of a task, in a folder that they can be gone on with in."""
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.store.folder import RunRecipe, check_folder, make_folder
    from scalewise.runs.forecast import outlook
    from scalewise.runs.measure import wanted as folders
    from scalewise.tasks.load import load_task

    _check_sizes(request)
    download(request.source, request.data, request.quiet)
    task = load_task(request.source, request.settings, request.data)
    plan = request.plan
    if plan is not None and plan.task not in (None, task.name):
        raise UsageError(f"--plan needs a plan of task {task.name}, got {plan.path} of task {plan.task}; leave it out")
    asked = folders.Request(request.source, request.settings, request.given, None)
    resumed = resumed_folder(request.resume, request.out, f"forecast-{task.name}", folders.REQUEST_FILE)
    if resumed is None:
        check_folder(request.out)
    else:
        asked = folders.resumed_request(resumed, asked)
    recipe, derived = single_recipe(task.recipe, asked.given, request.device)
    run = RunRecipe(request.source, request.settings, recipe, derived)
    folder = resumed or make_folder(request.out, f"forecast-{task.name}").path
    folders.save_request(folder, asked)
    view = StatusView(request.quiet)
    try:
        with view.live():
            trained = _train(request, task, run, folder, view)
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error
    return _finish(request, outlook(_points(request, trained, view), request.target), trained, folder, view)


def _check_sizes(request: Request) -> None:
    """Refuse too few sizes for a curve before any of them is trained."""
    from scalewise.stats.learning_curve import LEAST_SIZES

    flag, asked = ("--sizes", request.sizes) if request.sizes else ("--shares", request.shares)
    if len({*asked}) < LEAST_SIZES:
        raise UsageError(f"{flag} needs {LEAST_SIZES} or more, for a curve with three unknowns, got {len({*asked})}")


def _train(request: Request, task: Task, run: RunRecipe, folder: Path, view: StatusView) -> list[Trained]:
    from scalewise.runs.subsets import on_shares, on_sizes

    if request.sizes:
        return on_sizes(task, run, request.sizes, request.seeds, folder, request.device, view.notify)
    return on_shares(task, run, request.shares, request.seeds, folder, request.device, view.notify)


def _points(request: Request, trained: list[Trained], view: StatusView) -> Points:
    """Errors by size; none at all on the test data is less than they can show, and no point of a curve."""
    from scalewise.runs.forecast import Kind, Points
    from scalewise.stats.learning_curve import LEAST_SIZES

    kind: Kind = "parameters" if request.sizes else "samples"
    pairs = [(float(one.parameters if request.sizes else one.samples), one.error) for one in trained]
    seen = tuple(pair for pair in pairs if pair[1] > 0)
    sizes = len({size for size, _ in seen})
    perfect = f"{len(pairs) - len(seen)} of {len(pairs)} trainings made no error on the test data"
    if len(seen) < len(pairs) and sizes < LEAST_SIZES:
        raise DataError(
            f"a learning curve needs errors at {LEAST_SIZES} or more sizes, got {sizes}: {perfect}; take smaller "
            f"{'--sizes' if request.sizes else '--shares'}, or more test data"
        )
    if len(seen) < len(pairs):
        view.console.print(f"{perfect}, too few to show one, and are left out", style="yellow", markup=False)
    return Points(kind, seen)


def _finish(request: Request, found: Outlook, trained: list[Trained], folder: Path | None, view: StatusView) -> int:
    """Write, draw and print the forecast; a target that cannot be reached is exit code 3."""
    from scalewise.records import finite, write_atomically

    takes = _takes(request, found, trained)
    content = {
        **({} if folder is None else {"run": str(folder)}),
        **found.to_json(),
        "trained": [asdict(one) for one in trained],
        "takes": takes,
    }
    text = to_json.dumps(finite(content), indent=2)
    view.console.print(views.screen(found, takes))
    if folder is not None:
        write_atomically(folder / DOCUMENT_FILE, text + "\n")
        leave_page(folder, view.console)
        view.console.print(f"[dim]folder {folder}[/dim]")
    if request.json:
        print(text, file=sys.__stdout__, flush=True)
    if found.unreachable:
        raise TargetMissed(views.sentence(found))
    return 0


def _takes(request: Request, found: Outlook, trained: list[Trained]) -> list[dict[str, Any]]:
    """Samples to train on in all and seconds to the target: by a plan's rows, or with one worker as it was trained."""
    needed = found.needed
    if needed is None or needed.value is None or found.kind != "samples":
        return []
    if request.plan is not None:
        return _planned(request.plan, needed.value)
    if not trained:
        return []
    last = max(trained, key=lambda one: one.samples)
    epochs = last.epochs * (last.samples / needed.value) ** 0.5
    seen = epochs * needed.value
    return [{"workers": 1, "samples": seen, "seconds": seen / last.samples_per_second, "cost": None}]


def _read_plan(path: Path) -> KnownPlan:
    """A plan that anyone may have written; its rows can be computed."""
    from scalewise.plan.model import Inputs, rows

    file = path / "plan.json" if path.is_dir() else path
    try:
        content = read_json(file)
        inputs, workers = Inputs(**content["inputs"]), [int(row["workers"]) for row in content["rows"]]
        rows(inputs, workers)
        return KnownPlan(path, content.get("task"), inputs, workers, float(content["recipe"]["epochs"]))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"--plan needs the folder of a plan, got {path} ({said}); scalewise plan makes one") from None


def _planned(plan: KnownPlan, samples: float) -> list[dict[str, Any]]:
    """The rows of a plan, with the steps that one worker's epochs over so many samples are."""
    from scalewise.plan.model import rows

    steps = plan.epochs * samples / plan.inputs.worker_batch
    scaled = replace(plan.inputs, single_steps=steps, single_low=steps, single_high=steps)
    names = ("workers", "samples", "seconds", "cost")
    try:
        return [{name: getattr(row, name) for name in names} for row in rows(scaled, plan.workers)]
    except OverflowError:  # more steps than there are numbers for
        return []
