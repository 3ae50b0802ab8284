"""Every kind of parallelism on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from scalewise.cli.bench_view import small_table
from scalewise.runs.measure.memory import show_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from scalewise.runs.bench.parallelism import ParallelismReport, Row

WIDE = 96  # columns from which on there is room for everything
LEGEND = (
    "Bytes of gradients, parameters and activations (with their gradients) that the busiest process moves in a step, "
    "one way. Held: parameters, gradients and optimizer state between steps; peak: all of the process. Idle: the share "
    "of a step in which it does not compute; in brackets the pipeline's by theory. Loss: against one process."
)
DRAWS = "its stages draw random numbers of their own (as for dropout): the loss is another sample, not a worse one"


def parallelism_screen(report: ParallelismReport, width: int) -> RenderableType:
    """The table, what its columns mean, what cannot be compared, and the advice."""
    parts: list[RenderableType] = [table(report, width), Text(LEGEND, style="dim")]
    for row in report.rows:
        if row.reason is not None:
            parts.append(Text(f"{row.name}: {row.reason}", style="yellow"))
        elif row.name == "pipeline" and not row.exact:
            parts.append(Text(f"{row.name}: {DRAWS}", style="yellow"))
    return Group(*parts, Text(f"\n{report.advice}"))


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
