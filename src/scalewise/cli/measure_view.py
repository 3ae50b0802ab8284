"""A measurement on one screen: a sentence to act on, then small tables, then what was done for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scalewise.cli.measure_sentence import percent, percents, rough, sentence, with_interval, worth
from scalewise.present.terminal import blocks
from scalewise.present.words import number, seconds
from scalewise.runs.measure.memory import show_bytes

if TYPE_CHECKING:
    from scalewise.runs.measure.critical.branch import BranchReport
    from scalewise.runs.measure.critical.sweep import SweepReport
    from scalewise.runs.measure.efficiency import Efficiency
    from scalewise.runs.measure.measurement import Measurement, Minimum
    from scalewise.runs.measure.memory.largest import MemoryReport
    from scalewise.runs.measure.minima.landscape import Line, LinePoint, Plane
    from scalewise.runs.measure.noise import NoiseReport
    from scalewise.runs.measure.throughput import ThroughputReport

BAR_WIDTH = 24
HEIGHTS = "▁▂▃▄▅▆▇█"
GAP = 4  # between tables side by side
THROUGHPUT_LINES, LAYER_LINES = 8, 12


def screen(found: Measurement, width: int) -> RenderableType:
    """Everything that was measured."""
    parts: list[RenderableType] = ["", *_sentences(found), ""]
    tables: list[RenderableType] = []
    if found.noise is not None:
        tables.append(noise_table(found.noise))
    if found.efficiencies:
        tables.append(efficiency_table(found.efficiencies, found.recipe.workers))
    if found.throughput is not None:
        tables.append(throughput_table(found.throughput))
    parts += _laid_out(tables, width)
    if found.memory is not None:
        parts += [memory_lines(found.memory), ""]
    if found.noise is not None and found.noise.layers:
        parts += [layers_table(found.noise), ""]
    parts += _verification(found)
    if found.line is not None:
        parts += [line_view(found.line, found.plane), ""]
    if found.sharpness is not None:
        parts += [sharpness_table(found.sharpness), ""]
    return Group(*parts, how(found))


def _laid_out(tables: Sequence[RenderableType], width: int) -> list[RenderableType]:
    """Tables side by side where there is room for the next one, each row followed by an empty line."""
    wide = Console(width=1000)
    parts: list[RenderableType] = []
    row: list[RenderableType] = []
    for place, table in enumerate(tables):
        row.append(table)
        following = [*row, *tables[place + 1 : place + 2]]
        needed = sum(wide.measure(one).maximum for one in following) + GAP * (len(following) - 1)
        if len(following) == len(row) or needed > width:
            grid = Table.grid(padding=(0, GAP, 0, 0))
            grid.add_row(*row)
            parts += [grid, ""]
            row = []
    return parts


def _sentences(found: Measurement) -> list[RenderableType]:
    """First what to act on, then what stands in the way of acting on it."""
    lines: list[RenderableType] = [Text(sentence(found), style="bold")]
    if found.noise is not None and not found.noise.used.enough:
        lines.append(Text(f"noise scale: {found.noise.verdict}", style="yellow"))
    if found.unfinished is not None:
        lines.append(Text(found.unfinished, style="yellow"))
    return lines


def small_table(title: str, *columns: str) -> Table:
    """An empty table without lines: the first column to the left, numbers to the right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        min_width=len(title) + 2,
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def noise_table(report: NoiseReport) -> Table:
    """The noise scale as training goes on."""
    precise = report.preconditioned is not None
    table = small_table(
        "noise scale over training", "", "step", "samples (95 %)", *(["preconditioned"] if precise else [])
    )
    for stage in report.stages:
        cells = [with_interval(stage.estimate)]
        if precise:
            cells.append("" if stage.preconditioned is None else with_interval(stage.preconditioned))
        table.add_row(stage.name, f"{stage.step:,}", *cells)
    average = [with_interval(report.estimate)]
    if report.preconditioned is not None:
        average.append(with_interval(report.preconditioned))
    table.add_row("average", "", *average, style="bold")
    return table


def layers_table(report: NoiseReport) -> Table:
    """The noise scale of each parameter; the noisiest where there are many."""
    layers = sorted(report.layers, key=lambda layer: -(layer.estimate.value or math.inf))
    shown = layers[:LAYER_LINES]
    left_out = len(layers) - len(shown)
    kind = ", of plain gradients" if report.preconditioned is not None else ""
    title = f"noise scale by layer{kind}" + (f", the {LAYER_LINES} largest of {len(layers)}" if left_out else "")
    table = small_table(title, "parameter", "samples (95 %)")
    for layer in shown:
        table.add_row(escape(layer.name), with_interval(layer.estimate))
    return table


def efficiency_table(rows: Sequence[Efficiency], own: int) -> Table:
    """What more workers bring."""
    table = small_table("what more workers bring", "workers", "global batch", "sample worth", "steps", "samples")
    for row in rows:
        interval = f" ({percent(row.low)[:-2]}–{percent(row.high)})" if row.low is not None else ""
        table.add_row(
            str(row.workers),
            f"{row.global_batch:,}",
            f"{worth(row)}{interval if row.worth else ''}",
            _times(row.steps),
            _times(row.samples),
            style="bold" if row.workers == own else None,
        )
    return table


def _times(ratio: float | None) -> str:
    return "?" if ratio is None else f"× {ratio:.2g}"


def throughput_table(report: ThroughputReport) -> Table:
    """Samples per second against worker batch, as bars; of many worker batches the largest."""
    threads = f"{report.threads} thread{'' if report.threads == 1 else 's'}"
    table = small_table(
        f"throughput of one worker, {report.device}, {threads}", "worker batch", "samples/s", "", "inference"
    )
    best = max(row.samples_per_second for row in report.rows)
    inference = {row.worker_batch: row.samples_per_second for row in report.inference}
    for row in report.rows[-THROUGHPUT_LINES:]:
        mark = "cyan" if row.worker_batch >= report.knee else "blue"
        table.add_row(
            f"{row.worker_batch:,}",
            rough(row.samples_per_second),
            Text(bar(row.samples_per_second / best), style=mark, justify="left"),
            rough(inference[row.worker_batch]) if row.worker_batch in inference else "",
        )
    return table


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of a share of the width, exact to an eighth of a character.

    >>> bar(0.5)
    '████████████            '
    """
    return blocks(share * width).ljust(width)


def memory_lines(report: MemoryReport) -> Text:
    """Where the memory goes at the largest worker batch."""
    parts = [f"{part.name} {show_bytes(part.bytes)}" for part in report.parts]
    predicted, measured = (
        show_bytes(report.baseline_bytes + peak) for peak in (report.predicted_peak_bytes, report.measured_peak_bytes)
    )
    shared = "" if report.processes == 1 else f", for each of {report.processes} processes"
    return Text.assemble(
        (f"memory at worker batch {report.largest_worker_batch:,}\n", "bold"),
        f"{show_bytes(report.baseline_bytes)} before training, {', '.join(parts)}\n",
        f"peak {predicted} predicted, {measured} measured, of {show_bytes(report.process_bytes)}{shared} "
        f"({report.budget_source})",
        _uncounted_loaders(report),
    )


def _uncounted_loaders(report: MemoryReport) -> str:
    """What training holds beside that, where it reads samples in processes of their own."""
    if not report.loaders:
        return ""
    count = "1 loader process" if report.loaders == 1 else f"{report.loaders} loader processes"
    return f"\nwith --loaders 0; the {count} that training has by default come on top, with the batches they read ahead"


def _verification(found: Measurement) -> list[RenderableType]:
    """The critical batch by training, beside the cheap one."""
    if found.missed is not None:
        return [Text(f"the critical batch could not be measured by training: {found.missed}", style="yellow"), ""]
    if found.verified is None or found.agreement is None:
        return []
    from scalewise.runs.measure.critical.branch import BranchReport

    style = "green" if found.agreement.startswith("they agree") else "bold yellow"
    report = found.verified
    table = branch_table(report) if isinstance(report, BranchReport) else sweep_table(report)
    notes = [] if isinstance(report, BranchReport) else [Text(note, style="dim") for note in report.notes]
    return [table, *notes, Text(f"cheap and direct: {found.agreement}", style=style), ""]


def sweep_table(report: SweepReport) -> Table:
    """Steps to the target by global batch, beside the law through them and what it says of each from the others."""
    title = f"steps to validation loss {number(report.target)}, median of seeds and its standard error"
    table = small_table(title, "global batch", "learning rate", "seeds", "steps", "law", "left out", "samples")
    table.caption, table.caption_justify = (
        "left out: what the law says from the other global batches, and its error",
        "left",
    )
    held_out = {row.global_batch: row for row in report.held_out}
    for rung in report.rungs:
        law, row = report.law.steps_at(rung.global_batch).value, held_out.get(rung.global_batch)
        error = f" ± {rung.median_error:.0%}" if math.isfinite(rung.median_error) else ""
        table.add_row(
            f"{rung.global_batch:,}",
            number(rung.lr),
            str(len(rung.steps)),
            f"{rough(rung.median_steps)}{error}",
            "" if law is None else rough(law),
            "" if row is None or row.predicted.value is None else f"{rough(row.predicted.value)} ({row.error:+.0%})",
            rough(rung.median_steps * rung.global_batch),
        )
    return table


def branch_table(report: BranchReport) -> Table:
    """Losses of the branches by number of workers, and what they may rise by; those that do harm are dim."""
    counts = [*report.stages[0].losses]
    title = f"validation loss after {report.branch_samples:,} more samples with k workers"
    table = small_table(title, "from", "step", *(f"{count}" for count in counts), "tolerance", "critical batch")
    for stage in report.stages:
        losses = [
            "diverged" if loss is None else f"[{'green' if count <= stage.harmless else 'dim'}]{precise(loss)}[/]"
            for count, loss in stage.losses.items()
        ]
        table.add_row(stage.name, f"{stage.step:,}", *losses, number(stage.tolerance), escape(str(stage.critical)))
    return table


def precise(loss: float) -> str:
    """A loss with digits enough to see a tenth of what branches may differ by.

    >>> precise(2.3456), precise(0.5), precise(0.00123456)
    ('2.346', '0.5000', '0.001235')
    """
    return f"{loss:.3f}" if abs(loss) >= 1 else f"{loss:#.4g}"


def line_view(line: Line, plane: Plane | None) -> RenderableType:
    """The loss along the line between two runs, as heights."""
    table = Table(title="between the two runs", title_justify="left", title_style="bold", box=None, show_header=False)
    first, last = line.rows[0].alpha, line.rows[-1].alpha
    for part in ("train", "test"):
        losses = [_loss(row, part) for row in line.rows]
        shown = f"[dim]{number(first)}[/dim] {heights(losses)} [dim]{number(last)}[/dim]"
        table.add_row(f"{part} loss", shown, _range(losses))
    known = "not known" if line.barrier is None else number(line.barrier)
    notes = [f"distance {number(line.distance)}, barrier {known} (0: they lie in one basin)"]
    if plane is not None:
        losses = [row.train["loss"] for row in plane.rows]
        third = "a random direction" if plane.direction == "random" else "the third run"
        notes.append(f"plane with {third}: {len(losses)} points, loss {_range(losses)}")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _range(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return f"{number(min(finite))} to {number(max(finite))}" if finite else "nowhere finite"


def _loss(row: LinePoint, part: str) -> float:
    return (row.train if part == "train" else row.test)["loss"]


def heights(values: Sequence[float]) -> str:
    """Values as heights on a logarithmic axis; what is not finite is highest.

    >>> heights([0.01, 1.0, float("inf")])
    '▁██'
    """
    logs = [math.log(max(value, 1e-12)) if math.isfinite(value) else math.inf for value in values]
    finite = [value for value in logs if math.isfinite(value)] or [0.0]
    low, span = min(finite), max(finite) - min(finite) or 1.0
    shares = [min(1.0, (value - low) / span) for value in logs]
    return "".join(HEIGHTS[round(share * (len(HEIGHTS) - 1))] for share in shares)


def sharpness_table(minima: Sequence[Minimum]) -> Table:
    """How far the loss rises around each run's weights."""
    epsilons = next(([row.epsilon for row in one.full.rows] for one in minima if one.full.rows), [])
    columns = [f"{space}\nε {epsilon:g}" for space in ("all weights", "subspace") for epsilon in epsilons]
    table = small_table("sharpness: the loss rises by so many percent of 1 + loss", "run", "loss", *columns)
    for minimum in minima:
        values = percents([row for report in (minimum.full, minimum.subspace) for row in report.rows])
        table.add_row(escape(minimum.run), number(minimum.full.loss), *values)
    return table


def how(found: Measurement) -> RenderableType:
    """What was done, and how long it took."""
    notes = {
        "memory": _how_memory(found),
        "throughput": _how_throughput(found),
        "noise": _how_noise(found),
        "verify": _how_verified(found),
        "landscape": ""
        if found.line is None
        else f"{found.line.samples:,} samples, batch norm recomputed at each point",
        "sharpness": _how_sharpness(found),
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), style="dim")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for part, taken in found.seconds.items():
        table.add_row(part, seconds(taken), notes[part])
    return table


def _how_verified(found: Measurement) -> str:
    if found.verified is None:
        return ""
    from scalewise.runs.measure.critical.branch import BranchReport

    report = found.verified
    counts = [report.seeds] if isinstance(report, BranchReport) else [len(rung.steps) for rung in report.rungs]
    fewest, most = min(counts), max(counts)
    return f"trained at each global batch, {_seeds(most) if fewest == most else f'{fewest} to {_seeds(most)}'}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _how_memory(found: Measurement) -> str:
    if found.memory is None:
        return ""
    tried, count = len(found.memory.trials), found.memory.processes
    batches = "1 worker batch" if tried == 1 else f"{tried} worker batches"
    of = "a process of its own" if count == 1 else f"{count} processes"
    return f"predicted from a trace, then {batches} really trained in {of}"


def _how_throughput(found: Measurement) -> str:
    speed = found.throughput
    if speed is None:
        return ""
    share = "" if speed.mfu is None else f", {100 * speed.mfu:.0f} % of this device's best matrix product"
    return f"median of {speed.rows[0].rounds} rounds; {number(speed.flops_per_sample)} FLOPs a sample{share}"


def _how_noise(found: Measurement) -> str:
    if found.noise is None:
        return ""
    looked = sum(stage.samples for stage in found.noise.stages)
    kind = "preconditioned as the optimizer does" if found.noise.preconditioned is not None else "plain gradients"
    return (
        f"{found.noise.steps:,} steps of one worker; gradients of {looked:,} samples in groups of "
        f"{found.noise.group_samples}, {kind}"
    )


def _how_sharpness(found: Measurement) -> str:
    if not found.sharpness:
        return ""
    full = found.sharpness[0].full
    undefined = not all(minimum.full.rows for minimum in found.sharpness)
    return (
        f"L-BFGS-B, {full.iterations} iterations from each of 2 starts, {full.samples:,} samples, "
        f"batch-norm statistics of the weights{'; undefined where 1 + loss is not above 0' if undefined else ''}"
    )
