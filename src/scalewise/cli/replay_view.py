"""A step computed again, drawn for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scalewise.present.words import number

if TYPE_CHECKING:
    from scalewise.runs.replay import Replay, WorkerReplay

SHOWN_SAMPLES = 8
SHOWN_PARAMETERS = 12


def replay_view(found: Replay, run: str) -> RenderableType:
    """What was done, whether it is what the run recorded, and every worker's part."""
    parts: list[RenderableType] = [
        f"[bold]{escape(run)}[/bold], step {found.step:,}",
        f"[dim]{_way(found)}[/dim]",
        "",
        _verdict(found),
        "",
    ]
    if found.workers:
        parts += [_workers(found.workers), "", _parameters(found.workers)]
    return Group(*parts)


def _way(found: Replay) -> str:
    begun = f"the checkpoint of step {found.start:,}" if found.start else "the start of training"
    return f"from {begun}, {found.trained_steps:,} steps trained to get there"


def _verdict(found: Replay) -> RenderableType:
    if found.failure is not None:
        told = "as the run recorded" if found.matches else "which the run did not record"
        return Text(f"✗ {found.failure}\n  {told}", style="red" if found.matches else "bold red")
    if found.recorded is None:
        return Text("the run recorded nothing of this step: there is nothing to compare with", style="yellow")
    if found.matches:
        return Text("✓ bit for bit what the run recorded: loss and gradient norm", style="bold green")
    lines = [
        f"  {name}: recorded {found.recorded.get(name)!r}, now {getattr(found.record, name, None)!r}"
        for name in found.differing
    ]
    reason = "" if found.exact else " (the run was not exact, so that was to be expected)"
    return Text("\n".join([f"✗ not what the run recorded{reason}", *lines]), style="bold red")


def _workers(workers: list[WorkerReplay]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("worker", "loss", "gradient norm"):
        table.add_column(name, justify="right")
    table.add_column("training samples", overflow="fold")
    for one in workers:
        more = f", … {len(one.samples)} in all" if len(one.samples) > SHOWN_SAMPLES else ""
        samples = ", ".join(map(str, one.samples[:SHOWN_SAMPLES])) + more
        style = "bold red" if one.not_finite or not math.isfinite(one.loss) else ""
        table.add_row(str(one.worker), _shown(one.loss), _shown(one.gradient_norm), samples, style=style)
    return table


def _parameters(workers: list[WorkerReplay]) -> Table:
    """The largest gradients, and those that are not finite, over the workers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("gradient of", overflow="fold")
    for name in ("smallest norm", "largest norm", "of worker"):
        table.add_column(name, justify="right")
    broken = {name for one in workers for name in one.not_finite}
    names = [*workers[0].parameters]
    order = sorted(names, key=lambda name: (name not in broken, -_largest(workers, name)[0]))
    for name in order[:SHOWN_PARAMETERS]:
        largest, worker = _largest(workers, name)
        norms = [one.parameters[name] for one in workers if math.isfinite(one.parameters[name])]
        smallest = min(norms, default=math.nan)
        style = "bold red" if name in broken else ""
        table.add_row(name, _shown(smallest), _shown(largest), str(worker), style=style)
    if len(order) > SHOWN_PARAMETERS:
        table.add_row(f"… and {len(order) - SHOWN_PARAMETERS} smaller ones", "", "", "", style="dim")
    return table


def _largest(workers: list[WorkerReplay], name: str) -> tuple[float, int]:
    """The largest norm of a parameter's gradient, before all one that is none, and whose it is."""
    norms = [(one.parameters[name], one.worker) for one in workers]
    return max(norms, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def _shown(value: float) -> str:
    return number(value) if math.isfinite(value) else str(value)
