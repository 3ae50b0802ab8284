"""The tables of a bench: operations and devices, collectives, scaling, kinds of parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.present.stored import Stored, number_of, text_of
from scalewise.present.story import Block, Cell, Columns, Meter, Section, Sparkline, Table, table_of
from scalewise.present.words import (
    RATES,
    TIMES,
    count,
    in_unit,
    interval,
    magnitude,
    number,
    percent,
    rough,
    seconds,
    size,
)

POOR_FIT = 0.3
METER_WIDTH = 14
PARTS = ("compute", "communication", "imbalance", "input")  # that the seconds of a step are made of
LOST = {
    "communication": "communication",
    "imbalance": "waiting for the slowest process",
    "input": "waiting for samples",
    "rest": "slower computing",
}
MOVED = (
    "Bytes of gradients, parameters and activations (with their gradients) that the busiest process moves in a step, "
    "one way. Held: parameters, gradients and optimizer state between steps; peak: all of the process. Idle: the share "
    "of a step in which it does not compute, and the pipeline's by theory. Loss: against one process."
)
DRAWS = "its stages draw random numbers of their own (as for dropout): the loss is another sample, not a worse one"


def place_of(row: Stored) -> str:
    """A device, with its threads."""
    device = row.text("device")
    return f"cpu, {count(row.number('threads'), 'thread')}" if device == "cpu" else device


def processes_of(row: Stored) -> str:
    """How many processes."""
    return count(row.number("processes"), "process", "processes")


def hosts_of(document: Stored, before: str) -> str:
    """How many hosts, if that was asked for."""
    hosts, rate = document.number("hosts"), document.text("rate")
    return "" if hosts is None else f"{before}{number(hosts)} hosts{f' at {rate}' if rate else ''}"


def device_sections(document: Stored, rows: Sequence[Stored]) -> list[Section]:
    """Operations, what is worth sending, and the training."""
    groups: dict[tuple[str, str], list[Stored]] = {}
    for row in rows:
        groups.setdefault((row.text("operation"), place_of(row)), []).append(row)
    cells = tuple(_operation(name, place, own) for (name, place), own in groups.items())
    columns = ("operation", "device", "sizes", "curve", "fastest", "of peak")
    found = [Section("Operations: speed over sizes", (Table(columns, cells, "Operations", frozenset({1})),))]
    worth, trained = document.parts("break_even"), document.parts("training")
    found += [Section("Faster from this size on", (_worth(worth),))] if worth else []
    if trained:
        first = trained[0]
        network = f"CNN, worker batch {number(first.number('worker_batch'))}"
        title = f"Training {first.text('task')} ({network}) to loss {rough(first.number('target_loss'))}"
        found.append(Section(title, (_training(trained),)))
    return found


def _operation(name: str, place: str, rows: Sequence[Stored]) -> tuple[str | Sparkline, ...]:
    """Its speed over sizes as a curve, and the best of it."""
    key, unit = ("gflops", "GFLOP/s") if rows[0].text("bound") == "compute" else ("gigabytes_per_second", "GB/s")
    speeds = [row.number(key) or 0.0 for row in rows]
    best = max(range(len(rows)), key=speeds.__getitem__)
    sizes = f"{magnitude(rows[0].number('size'))} to {magnitude(rows[-1].number('size'))} {rows[0].text('unit')}"
    curve = Sparkline(tuple(speeds), log=True)
    return name, place, sizes, curve, f"{rough(speeds[best])} {unit}", percent(rows[best].number("peak_share"))


def _worth(rows: Sequence[Stored]) -> Table:
    """From which size on another device is faster."""
    pairs = list(dict.fromkeys((row.text("host"), row.text("device")) for row in rows))
    cells: list[tuple[str | Cell, ...]] = []
    for name, unit in dict.fromkeys((row.text("operation"), row.text("unit")) for row in rows):
        own = {(row.text("host"), row.text("device")): row for row in rows if row.text("operation") == name}
        cells.append((name, *(_from_size(own.get(pair, Stored())) for pair in pairs), unit))
    columns = ("operation", *(f"{device} against {host}" for host, device in pairs), "of")
    return Table(columns, tuple(cells), "Worth sending", frozenset({len(columns) - 1}))


def _from_size(row: Stored) -> Cell:
    doubt = ", but the timings scatter" if (row.number("misfit") or 0.0) > POOR_FIT else ""
    start = row.number("from_size")
    if start is None:
        return Cell(f"never up to {number(row.number('looked_to_size'))}{doubt}", "dim")
    outside = " (extrapolated)" if row.flag("extrapolated") and start > 1 else ""
    return Cell(f"{'any' if start == 1 else number(start)}{outside}{doubt}")


def _training(rows: Sequence[Stored]) -> Table:
    """The built-in CNN on each device."""
    columns: Columns[Stored] = {
        "device": place_of,
        "step (95 %)": lambda row: in_unit(*row.ranged("step_seconds"), units=TIMES),
        "samples/s": number_of("samples_per_second", shown=rough),
        "to loss": number_of("seconds_to_loss", shown=lambda value: "not reached" if value is None else seconds(value)),
        "busy": number_of("utilisation", shown=lambda value: "?" if value is None else percent(value)),
        "over time": lambda row: Sparkline(tuple(row.numbers("utilisation_over_time")), top=1.0),
    }
    return table_of(rows, columns, "Training")


def collective_sections(document: Stored, rows: Sequence[Stored]) -> list[Section]:
    """Every collective over sizes, and the fits."""
    found = []
    for processes in sorted({row.number("processes") or 0.0 for row in rows}):
        own = [row for row in rows if row.number("processes") == processes]
        where = count(processes, "process", "processes")
        title = f"{where}{hosts_of(document, ' over ')}: time, and bus bandwidth as a curve"
        found.append(Section(title, (_collectives(own),)))
        fits = [line for line in document.parts("fits") if line.number("processes") == processes]
        if fits:
            found.append(Section(f"{where}: seconds = latency + bytes ÷ bandwidth (95 %)", (_fits(fits),)))
    return found


def _collectives(rows: Sequence[Stored]) -> Table:
    """Times by size, and the bus bandwidth over sizes as a curve."""
    sizes = sorted({row.number("bytes") or 0.0 for row in rows if row.text("collective") != "ordered"})
    cells: list[tuple[str | Sparkline, ...]] = []
    for name in dict.fromkeys(row.text("collective") for row in rows):
        own = [row for row in rows if row.text("collective") == name]
        times = [seconds(row.number("seconds")) for row in own][: len(sizes)]
        curve = Sparkline(tuple(row.number("bus_bytes_per_second") or 0.0 for row in own), log=True)
        cells.append((name, *times, *[""] * (len(sizes) - len(times)), curve))
    return Table(("collective", *map(size, sizes), "bus"), tuple(cells), "Times by size")


def _fits(lines: Sequence[Stored]) -> Table:
    """What each collective costs."""
    columns: Columns[Stored] = {
        "collective": text_of("collective"),
        "latency": lambda line: in_unit(*line.estimate("latency_seconds"), units=TIMES),
        "bandwidth": lambda line: in_unit(*line.estimate("algorithm_bytes_per_second"), units=RATES),
        "bus bandwidth": lambda line: f"{size(line.number('bus_bytes_per_second', 'value'))}/s",
        "off by": number_of("misfit", shown=percent),
    }
    return table_of(lines, columns, "Fits")


def scaling_sections(document: Stored, rows: Sequence[Stored]) -> list[Section]:
    """Speed, efficiency, and where the rest went."""
    first, last = rows[0], rows[-1]
    if first.number("samples_per_second") is None:
        return []
    workers = dict.fromkeys(number(row.number("workers")) for row in (first, last))
    many = f"{' to '.join(workers)} workers of {number(first.number('worker_batch'))}"
    title = f"{document.text('task')}, {document.text('mode')} scaling, {many}{hosts_of(document, ', ')}"
    parts = {name: number_of(f"{name}_seconds", shown=seconds) for name in ("step", *PARTS)}
    times = table_of(rows, {"processes": number_of("processes"), **parts}, "A step")
    found = [Section(title, (_speeds(rows),)), Section("A step, in the mean over processes", (times,))]
    if len(rows) > 1:
        found.append(Section("What ideal scaling would save of a step", (_lost(rows[1:]),)))
    return found


def _speeds(rows: Sequence[Stored]) -> Table:
    """Samples per second on each number of processes."""
    best = max(row.number("samples_per_second") or 0.0 for row in rows) or 1.0

    def efficiency(row: Stored) -> str:
        share = row.ranged("efficiency")
        return percent(share[0]) if row is rows[0] else interval(*share, shown=percent)

    columns: Columns[Stored] = {
        "processes": number_of("processes"),
        "samples/s (95 %)": lambda row: interval(*row.ranged("samples_per_second"), shown=rough),
        "": lambda row: Meter((((row.number("samples_per_second") or 0.0) / best, 0),), METER_WIDTH),
        "speed": lambda row: f"× {row.number('speedup') or 0.0:.2f}",
        "efficiency": efficiency,
    }
    return table_of(rows, columns, "Speed")


def _lost(rows: Sequence[Stored]) -> Table:
    """Shares of a step that ideal scaling would save."""
    cells = []
    for row in rows:
        saved = [row.number("lost", f"{part}_share") or 0.0 for part in LOST]
        cells.append((number(row.number("processes")), *map(percent, (*saved, sum(saved)))))
    columns = ("processes", "communication", "imbalance", "input", "slower computing", "in all")
    return Table(columns, tuple(cells), "What ideal scaling would save")


def parallelism_sections(document: Stored, rows: Sequence[Stored]) -> list[Section]:
    """One line for each way, and what is to be said of some."""
    moved = ("gradi\u00adents", "para\u00admeters", "activa\u00adtions")
    columns = ("way", *moved, "held", "peak", "step ms", "idle", "by theory", "loss")
    table = Table(columns, tuple(map(_way, rows)), "Ways", spare=("peak",), legend=MOVED)
    blocks: list[Block] = [table]
    for row in rows:
        if row.text("reason"):
            blocks.append(Cell(f"{row.text('name')}: {row.text('reason')}", "warning"))
        elif row.text("name") == "pipeline" and row.flag("exact") is False:
            blocks.append(Cell(f"pipeline: {DRAWS}", "warning"))
    workers = f"{count(document.number('workers'), 'worker')} × {number(document.number('worker_batch'))}"
    parts = f"{workers} in {count(document.number('micro_batches'), 'micro batch', 'micro batches')}"
    return [Section(f"{document.text('task')}: {parts}, {processes_of(document)}", tuple(blocks))]


def _way(row: Stored) -> tuple[str, ...]:
    sent, received = (row.part(f"{way}_by_kind_bytes_per_step") for way in ("sent", "received"))
    if row.text("reason") or not sent.is_object or not received.is_object:
        return (row.text("name"), *["–"] * 9)
    moved = {kind: max(sent.number(kind) or 0.0, received.number(kind) or 0.0) for kind, _ in sent.items()}
    activations = moved.get("activations", 0.0) + moved.get("activation_gradients", 0.0)
    bubble, difference = row.number("bubble_share"), row.number("loss_difference")
    return (
        row.text("name"),
        *(size(amount) if amount else "–" for amount in (moved.get("gradients"), moved.get("parameters"), activations)),
        size(sum(row.number(f"{part}_bytes") or 0.0 for part in ("parameter", "gradient", "optimizer"))),
        size(row.number("peak_rss_bytes")),
        rough(1e3 * (row.number("step_seconds") or 0.0)),
        percent(row.number("idle_share")),
        "" if bubble is None else percent(bubble),
        "exact" if row.flag("exact") and not difference else magnitude(difference),
    )
