"""Benches on one screen each: a sentence to act on, tables with curves, and how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scalewise.present.terminal import HEIGHTS, blocks
from scalewise.present.terminal import heights as any_heights
from scalewise.present.words import rough, seconds
from scalewise.runs.measure.memory import show_bytes
from scalewise.stats.timing import Estimate

if TYPE_CHECKING:
    from scalewise.runs.bench import collectives as exchanged
    from scalewise.runs.bench import scaling as scaled
    from scalewise.runs.bench.cnn import Trained
    from scalewise.runs.bench.common import Topology
    from scalewise.runs.bench.devices import DevicesReport, Peak, Row, Worth

POOR_FIT = 0.3
BUSY = 0.5  # running programs per core, before anything was timed, from which on a person should know
BAR_WIDTH = 14
Units = tuple[tuple[str, float], ...]
TIMES: Units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
BANDWIDTHS: Units = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))


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


def bar(share: float, width: int = 24) -> str:
    """A bar of a share of the width, exact to an eighth of a character.

    >>> bar(0.5)
    '████████████            '
    """
    return blocks(share * width).ljust(width)


def heights(values: Sequence[float]) -> str:
    """Values as heights on a logarithmic axis."""
    return any_heights(values, log=True)


def duration(value: float) -> str:
    """A duration of any length.

    >>> duration(0.0000123), duration(0.00123), duration(0.123), duration(75)
    ('12.3 µs', '1.23 ms', '123 ms', '1 min 15 s')
    """
    if value >= 1:
        return seconds(value)
    return f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms"


def per_second(value: float) -> str:
    """A bandwidth."""
    return f"{show_bytes(value)}/s"


def ranged(estimate: Estimate, units: Units) -> str:
    """A value with its 95 % interval, all in the value's unit.

    >>> from scalewise.stats.timing import Estimate
    >>> ranged(Estimate(0.0018, 0.0013, 0.0027), TIMES), ranged(Estimate(628e6, 400e6, 903e6), BANDWIDTHS)
    ('1.8 (1.3–2.7) ms', '628 (400–903) MB/s')
    """
    name, size = next(((name, size) for name, size in units if estimate.value >= size), units[-1])
    value, low, high = (_digits(part / size) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low}–{high}) {name}"


def _digits(value: float) -> str:
    """As many as are worth reading: two, and no fractions above ten."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def percent(share: float) -> str:
    """A share, with a minus sign that reads as one."""
    return f"{100 * share:.0f} %".replace("-", "−").replace("−0 %", "0 %")


def shares(values: Sequence[float]) -> str:
    """Shares from 0 to 1 as heights on a linear axis.

    >>> shares([0.0, 0.5, 1.0])
    '▁▅█'
    """
    return "".join(HEIGHTS[min(len(HEIGHTS) - 1, round(max(0.0, value) * (len(HEIGHTS) - 1)))] for value in values)


def short(count: int) -> str:
    """A count in few characters.

    >>> short(512), short(4096), short(4 << 20)
    ('512', '4k', '4M')
    """
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 1e6 else f"{count / 1e6:.0f}M"


def _place(device: str, threads: int) -> str:
    return f"cpu, {threads} thread{'' if threads == 1 else 's'}" if device == "cpu" else device


def _note(text: str, style: str = "dim") -> Text:
    return Text(text, style=style)


def _crowded(processes: int, machine: Topology, threads: int = 1) -> list[RenderableType]:
    if processes * threads <= machine.cores:
        return []
    each = "" if threads == 1 else f" of {threads} threads"
    what = f"{processes} processes{each} on {machine.cores} core{'' if machine.cores == 1 else 's'}"
    return [_note(f"{what}: they take turns, which shows in every figure of theirs", "yellow")]


def _busy(machine: Topology) -> list[RenderableType]:
    if machine.load is None or machine.load <= BUSY * machine.machine_cores:
        return []
    load = f"load {machine.load:.1f} on {machine.machine_cores} core{'' if machine.machine_cores == 1 else 's'}"
    return [_note(f"other programs were running ({load}): the figures are of what they left", "yellow")]


def devices_screen(report: DevicesReport) -> RenderableType:
    """Operations, what is worth sending, and the training."""
    parts: list[RenderableType] = ["", Text(_peaks(report.peaks), style="bold"), "", operations_table(report.rows), ""]
    if report.break_even:
        parts += [worth_table(report.break_even), ""]
    parts += [training_table(report.training), ""]
    parts += [*(_note(line, "yellow") for line in report.missing), *_busy(report.topology)]
    counts = f"medians of {report.rows[0].rounds} rounds by turns, training of {report.training[0].rounds}"
    return Group(*parts, _note(f"{report.topology.sentence()}; {counts}"))


def _peaks(peaks: Sequence[Peak]) -> str:
    """
    >>> from scalewise.runs.bench.devices import Peak
    >>> _peaks([Peak("cpu", 1, 51.23, 20.04)])
    'at most: cpu, 1 thread: 51.2 GFLOP/s and 20 GB/s'
    """
    shown = [
        f"{_place(peak.device, peak.threads)}: {peak.gflops:.3g} GFLOP/s and {peak.gigabytes_per_second:.3g} GB/s"
        for peak in peaks
    ]
    return f"at most: {'; '.join(shown)}"


def operations_table(rows: Sequence[Row]) -> Table:
    """Each operation on each device: its speed over sizes as a curve, and the best of it."""
    table = small_table("operations: speed over sizes", "", "device", "sizes", "curve", "fastest", "of peak")
    names = list(dict.fromkeys(row.operation for row in rows))
    for name in names:
        own = [row for row in rows if row.operation == name]
        places = list(dict.fromkeys((row.device, row.threads) for row in own))
        for number, place in enumerate(places):
            _add_operation(
                table, name if number == 0 else "", [row for row in own if (row.device, row.threads) == place]
            )
    return table


def _add_operation(table: Table, name: str, rows: Sequence[Row]) -> None:
    computes = rows[0].bound == "compute"
    unit = "GFLOP/s" if computes else "GB/s"
    speeds = [row.gflops if computes else row.gigabytes_per_second for row in rows]
    best = max(range(len(rows)), key=speeds.__getitem__)
    table.add_row(
        name,
        _place(rows[0].device, rows[0].threads),
        f"{short(rows[0].size)}–{short(rows[-1].size)} {rows[0].unit}",
        Text(heights(speeds), style="cyan"),
        f"{speeds[best]:.3g} {unit}",
        percent(rows[best].peak_share),
    )


def worth_table(rows: Sequence[Worth]) -> Table:
    """From which size on another device is faster."""
    pairs = list(dict.fromkeys((row.host, row.device) for row in rows))
    table = small_table("faster from this size on", "", *(f"{device}\nagainst {host}" for host, device in pairs), "of")
    for name, unit in dict.fromkeys((row.operation, row.unit) for row in rows):
        own = {(row.host, row.device): row for row in rows if row.operation == name}
        table.add_row(name, *(_from_size(own[pair]) for pair in pairs), unit)
    return table


def _from_size(row: Worth) -> Text:
    doubt = ", but the timings scatter" if row.misfit > POOR_FIT else ""
    if row.from_size is None:
        return Text(f"never up to {row.looked_to_size:,}{doubt}", style="dim")
    outside = " (extrapolated)" if row.extrapolated and row.from_size > 1 else ""
    return Text(f"{'any' if row.from_size == 1 else f'{row.from_size:,}'}{outside}{doubt}")


def training_table(rows: Sequence[Trained]) -> Table:
    """The built-in CNN on each device."""
    title = f"training {rows[0].task} (CNN, worker batch {rows[0].worker_batch}) to loss {rows[0].target_loss:.3g}"
    table = small_table(title, "", "step (95 %)", "samples/s", "to loss", "busy", "over time")
    for row in rows:
        step = Estimate(row.step_seconds, row.step_seconds_low, row.step_seconds_high)
        table.add_row(
            _place(row.device, row.threads),
            ranged(step, TIMES),
            rough(row.samples_per_second),
            "not reached" if row.seconds_to_loss is None else duration(row.seconds_to_loss),
            "?" if row.utilisation is None else percent(row.utilisation),
            Text(shares(row.utilisation_over_time), style="cyan"),
        )
    return table


def collectives_screen(report: exchanged.CollectivesReport) -> RenderableType:
    """The link, every collective over sizes, and the fits."""
    counts = sorted({row.processes for row in report.rows})
    where = "" if report.hosts is None else f" over {report.hosts} hosts{f' at {report.rate}' if report.rate else ''}"
    parts: list[RenderableType] = ["", Text(_link(report), style="bold"), ""]
    for count in counts:
        own = [row for row in report.rows if row.processes == count]
        fits = [line for line in report.fits if line.processes == count]
        parts += [collectives_table(own, f"{count} processes{where}: time, and bus bandwidth as a curve"), ""]
        parts += [fits_table(fits, f"{count} processes: seconds = latency + bytes ÷ bandwidth (95 %)"), ""]
        parts += _crowded(count, report.topology)
    least = min(row.bytes for row in report.rows if row.collective == "ordered")
    if least > min(row.bytes for row in report.rows):
        parts.append(_note(f"ordered sums whole chunks of gradients, so {show_bytes(least)} at least"))
    if report.topology.gpu_links:
        parts += [report.topology.gpu_links, ""]
    parts += _busy(report.topology)
    how = f"medians of {report.rows[0].rounds} rounds by turns, of the slowest process"
    return Group(*parts, _note(f"{report.topology.sentence()}; {how}"))


def _link(report: exchanged.CollectivesReport) -> str:
    link = report.link
    off = (
        f"; the timings are off by {percent(report.link_misfit)} in the middle" if report.link_misfit > POOR_FIT else ""
    )
    speed = f"{duration(link.latency_seconds)} a message, {per_second(link.bytes_per_second)} each way"
    return f"link: {speed}, by the ordered reduction{off}"


def collectives_table(rows: Sequence[exchanged.Row], title: str) -> Table:
    """Times by size, and the bus bandwidth over sizes as a curve."""
    sizes = sorted({row.bytes for row in rows if row.collective != "ordered"})
    table = small_table(title, "", *map(show_bytes, sizes), "bus")
    for name in dict.fromkeys(row.collective for row in rows):
        own = [row for row in rows if row.collective == name]
        speeds = [row.bus_bytes_per_second for row in own]
        table.add_row(name, *(duration(row.seconds) for row in own), Text(heights(speeds), style="cyan"))
    return table


def fits_table(lines: Sequence[exchanged.Line], title: str) -> Table:
    """What each collective costs."""
    table = small_table(title, "", "latency", "bandwidth", "bus bandwidth", "off by")
    for line in lines:
        table.add_row(
            line.collective,
            ranged(line.latency_seconds, TIMES),
            ranged(line.algorithm_bytes_per_second, BANDWIDTHS),
            per_second(line.bus_bytes_per_second.value),
            percent(line.misfit),
        )
    return table


def scaling_screen(report: scaled.ScalingReport) -> RenderableType:
    """Speed, efficiency, and where the rest went."""
    most = report.rows[-1]
    parts: list[RenderableType] = ["", Text(_scaling_sentence(report), style="bold"), "", scaling_table(report), ""]
    parts += [parts_table(report.rows), ""]
    if len(report.rows) > 1:
        parts += [lost_table(report.rows[1:]), ""]
    if report.same_weights is not None and len(report.rows) > 1:
        parts.append(_weights(report.same_weights, report.reduce))
    parts += [*_crowded(most.processes, report.topology, most.threads), *_busy(report.topology)]
    threads = f"{most.threads} thread{'' if most.threads == 1 else 's'} a process"
    how = f"medians of {most.rounds} rounds by turns, {most.steps:,} steps each in all, {threads}"
    return Group(*parts, _note(f"{report.topology.sentence()}; {how}"))


def _weights(same: bool, reduce: str) -> Text:
    if same:
        return _note("the weights are the same bytes on every number of processes", "green")
    if reduce == "allreduce":
        return _note("the weights differ in bytes: --reduce allreduce is not exact", "yellow")
    return _note("the weights differ in bytes: does the task make the same data in every process?", "red")


def _scaling_sentence(report: scaled.ScalingReport) -> str:
    """What more processes bring, and what the most of the rest is."""
    base, most = report.rows[0], report.rows[-1]
    if most is base:
        return f"{_processes(base.processes)}: {rough(base.samples_per_second)} samples/s"
    lost = {
        "communication": most.lost.communication_share,
        "waiting for the slowest process": most.lost.imbalance_share,
        "waiting for samples": most.lost.input_share,
        "slower computing": most.lost.rest_share,
    }
    cause = max(lost, key=lost.__getitem__)
    rest = f"; most of the rest went into {cause}" if most.efficiency < 0.95 else ""
    faster = f"{most.speedup:.2f} times the speed of {_processes(base.processes)}"
    return f"{_processes(most.processes)}: {faster}, {percent(most.efficiency)} efficient ({report.mode} scaling){rest}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def scaling_table(report: scaled.ScalingReport) -> Table:
    """Samples per second on each number of processes."""
    link = "" if report.hosts is None else f", {report.hosts} hosts{f' at {report.rate}' if report.rate else ''}"
    first, last = report.rows[0], report.rows[-1]
    many = f"{first.workers} workers" if first.workers == last.workers else f"{first.workers} to {last.workers} workers"
    title = f"{report.task}, {report.mode} scaling, {many} of {first.worker_batch}{link}"
    table = small_table(title, "processes", "samples/s (95 %)", "", "speed", "efficiency")
    best = max(row.samples_per_second for row in report.rows)
    for row in report.rows:
        interval = f"{rough(row.samples_per_second_low)}–{rough(row.samples_per_second_high)}"
        spread = f" ({100 * row.efficiency_low:.0f}–{percent(row.efficiency_high)})" if row is not first else ""
        table.add_row(
            str(row.processes),
            f"{rough(row.samples_per_second)} ({interval})",
            Text(bar(row.samples_per_second / best, BAR_WIDTH), style="cyan", justify="left"),
            f"× {row.speedup:.2f}",
            f"{percent(row.efficiency)}{spread}",
        )
    return table


def parts_table(rows: Sequence[scaled.Row]) -> Table:
    """What a step consists of."""
    names = ("step", "compute", "communication", "imbalance", "input")
    table = small_table("a step, in the mean over processes", "processes", *names)
    for row in rows:
        table.add_row(str(row.processes), *(duration(getattr(row, f"{name}_seconds")) for name in names))
    return table


def lost_table(rows: Sequence[scaled.Row]) -> Table:
    """Shares of a step that ideal scaling would save."""
    columns = ("communication", "imbalance", "input", "slower computing", "in all")
    table = small_table("what ideal scaling would save of a step", "processes", *columns)
    for row in rows:
        lost = row.lost
        saved = (lost.communication_share, lost.imbalance_share, lost.input_share, lost.rest_share)
        table.add_row(str(row.processes), *map(percent, (*saved, sum(saved))))
    return table
