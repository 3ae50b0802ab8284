"""`scalewise bench parallelism`."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, print_document, recipe_flags
from scalewise.cli.measure_view import small_table
from scalewise.engine.placement import DeviceName
from scalewise.errors import LostContact, PlacementError, ScalewiseError
from scalewise.present.live import StatusView
from scalewise.runs.measure.memory.budget import show_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from scalewise.engine.processes.team import Team
    from scalewise.plan.links import Link
    from scalewise.recipe import Recipe
    from scalewise.runs.bench.parallelism import ParallelismReport, Row
    from scalewise.tasks.task import Task

WITHOUT = ("threads", "epochs", "steps", "schedule", "warmup_epochs", "patience", "target", "compile")
RecipeFlags = recipe_flags(__name__, without=WITHOUT)
ROUNDS = 7
WIDE = 96  # columns from which on there is room for everything
LEGEND = (
    "Bytes of gradients, parameters and activations (with their gradients) that the busiest process moves in a step, "
    "one way. Held: parameters, gradients and optimizer state between steps; peak: all of the process. Idle: the share "
    "of a step in which it does not compute; in brackets the pipeline's by theory. Loss: against one process."
)
DRAWS = "its stages draw random numbers of their own (as for dropout): the loss is another sample, not a worse one"


@dataclass(frozen=True)
class Request:
    """A comparison as asked for on the command line."""

    task: str
    settings: list[str]
    data: Path | None
    given: dict[str, Any]
    processes: int
    device: DeviceName
    link: Path | None
    rounds: int
    out: Path | None
    json: bool
    quiet: bool


def parallelism(
    task: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    rounds: int = ROUNDS,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int, Parameter(group=PLACEMENT)] = 2,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    link: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Compare data parallelism, sharded optimizer, server, fsdp, pipeline and tensor on a task.

    Bytes sent and held are counted, steps are timed by turns in the same processes.

    scalewise bench parallelism chars --processes 2 --workers 2 --worker-batch 32 --micro-batch 8
    scalewise bench parallelism mlp --processes 4 --link runs/bench-collectives/link.json --json

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    rounds: int
        How often every way is timed; its median counts.
    data: Path | None
        Folder of the task's data files.
    processes: int
        How many, at least 2. By default there are as many workers, and four micro batches each.
    device: DeviceName
        Kind of device.
    link: Path | None
        A link profile, as `bench collectives` writes it, to reckon the exchange with.
    out: Path | None
        Folder of the result; by default runs/bench-parallelism-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    given = {name: value for name, value in vars(flags).items() if value is not None}
    if rounds < 1:
        raise PlacementError(f"--rounds must be at least 1, got {rounds}")
    request = Request(task, list(set or []), data, given, processes, device, link, rounds, out, json, quiet)
    with contextlib.redirect_stdout(sys.stderr):
        return _start(request)


def _start(request: Request) -> int:
    from scalewise.engine.processes.fork_server import preloaded
    from scalewise.engine.processes.launch import launch
    from scalewise.engine.processes.team import takes_part
    from scalewise.engine.store.folder import check_folder
    from scalewise.plan import links
    from scalewise.tasks.load import load_task

    check_folder(request.out)
    if takes_part():  # also in a job of torchrun, which knows how many
        request = replace(request, processes=int(os.environ["WORLD_SIZE"]))
    if request.processes < 2:
        raise PlacementError(f"--processes must be at least 2 to compare ways to share work, got {request.processes}")
    link = links.load(request.link) if request.link else None
    download(request.task, request.data, request.quiet)
    with preloaded() as fork_server:
        task = load_task(request.task, request.settings, request.data)
        recipe = _recipe(request, task)
        if takes_part():
            return _take_part(request, task, recipe, link)
        return launch(request.processes, sys.argv[1:], recipe.threads or 1, "start it again", fork_server=fork_server)


def _recipe(request: Request, task: Task) -> Recipe:
    """The task's own recipe with a worker for every process, four micro batches each and one thread, unless given."""
    base = task.recipe.replace(workers=request.processes, threads=1, lr_rule="none", patience=None, target=None)
    recipe = base.replace(**request.given)
    quarter = recipe.worker_batch // 4
    if "micro_batch" not in request.given and recipe.worker_batch % 4 == 0 and quarter > 1:
        recipe = recipe.replace(micro_batch=quarter)
    return recipe


def _take_part(request: Request, task: Task, recipe: Recipe, link: Link | None) -> int:
    from scalewise.engine.processes.failures import translated
    from scalewise.engine.processes.last_words import leave_exit_report
    from scalewise.engine.processes.launch import end_with_launcher
    from scalewise.engine.processes.team import joined

    end_with_launcher()
    with joined(request.device) as team:
        try:
            return _compare(request, task, recipe, link, team)
        except Exception as error:  # said before the others notice that this process is gone
            known = error if isinstance(error, ScalewiseError) else translated(error)
            leave_exit_report(known.exit_code, str(known), isinstance(known, LostContact))
            raise known from None


def _compare(request: Request, task: Task, recipe: Recipe, link: Link | None, team: Team) -> int:
    from scalewise.runs.bench.common import stored
    from scalewise.runs.bench.parallelism import ParallelismReport, compare_ways

    view = StatusView(request.quiet or not team.leads)
    with view.live():
        rows = compare_ways(task, recipe, team, request.device, link, request.rounds, view.notify)
    if team.leads:
        report = stored(ParallelismReport(task.name, recipe, team.size, link, rows), request.out)
        assert report.run is not None
        leave_page(report.run, view.console)
        _draw(report, view.console)
        view.console.print(f"[dim]folder {escape(str(report.run))}[/dim]")
        if request.json:
            print_document(report.to_json())
    return 0


def _draw(report: ParallelismReport, console: Console) -> None:
    console.print(table(report, console.width))
    console.print(LEGEND, style="dim", markup=False)
    for row in report.rows:
        if row.reason is not None:
            console.print(f"{row.name}: {row.reason}", style="yellow", markup=False)
        elif row.name == "pipeline" and not row.exact:
            console.print(f"{row.name}: {DRAWS}", style="yellow", markup=False)
    console.print(f"\n{report.advice}", markup=False, highlight=False)


def table(report: ParallelismReport, width: int) -> Table:
    """One line for each way; where there is little room, without the peak of memory."""
    recipe, micro = report.recipe, report.recipe.micro_batches
    title = (
        f"{report.task}: {recipe.workers} workers × {recipe.worker_batch} in {micro} micro "
        f"batch{'es' if micro > 1 else ''}, {report.processes} processes"
    )
    columns = ["way", "gradi-\nents", "para-\nmeters", "activa-\ntions", "held", "peak", "step\nms", "idle", "loss"]
    shown = [place for place, column in enumerate(columns) if width >= WIDE or column != "peak"]
    found = small_table(title, *(columns[place] for place in shown))
    for cells in map(_cells, report.rows):
        found.add_row(*(cells[place] for place in shown if place < len(cells)))
    if width < WIDE:
        found.padding = (0, 1, 0, 0)
    return found


def _cells(row: Row) -> list[str]:
    sent, received = row.sent_by_kind_bytes_per_step, row.received_by_kind_bytes_per_step
    if row.reason is not None or sent is None or received is None:
        return [escape(row.name), "[dim]–[/dim]"]
    moved = {kind: max(sent[kind], received[kind]) for kind in sent}
    shown = (moved["gradients"], moved["parameters"], moved["activations"] + moved["activation_gradients"])
    bubble = f" [dim]({row.bubble_share:.0%})[/dim]" if row.bubble_share is not None else ""
    return [
        escape(row.name),
        *(show_bytes(size) if size else "–" for size in shown),
        show_bytes(row.held_bytes),
        show_bytes(row.peak_rss_bytes or 0),
        f"{1000 * (row.step_seconds or 0):.1f}",
        f"{row.idle_share or 0:.0%}{bubble}",
        "exact" if row.exact and row.loss_difference == 0 else f"{row.loss_difference:.0e}",
    ]
