"""A bench: a sentence to act on, tables with curves, figures against what they grow with, and how it was measured."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.present.charts import LOOKS, Axis, Bar, Series, bars, line_chart, series_of
from scalewise.present.stored import Stored
from scalewise.present.stories.bench_tables import (
    LOST,
    PARTS,
    POOR_FIT,
    collective_sections,
    device_sections,
    parallelism_sections,
    place_of,
    processes_of,
    scaling_sections,
)
from scalewise.present.story import Block, Cell, Figure, Key, Only, Section, Story, Table, kept
from scalewise.present.words import count, number, percent, rough, seconds, sentence, size

MOST_ROWS = 400
BUSY = 0.5  # running programs per core, before anything was timed, from which on a person should know
# What rows of each kind are drawn against; of other kinds the first that they have.
AGAINST = {"collectives": "bytes", "devices": "size", "scaling": "processes"}
ACROSS = ("processes", "workers", "bytes", "worker_batch", "size")
UP = ("samples_per_second", "bus_bytes_per_second", "gflops", "gigabytes_per_second", "step_seconds", "seconds")
KINDS = {  # the question of each, and its own sections
    "devices": ("Which operations are worth sending to the device?", device_sections),
    "collectives": ("What does the link carry?", collective_sections),
    "scaling": ("How well does training scale over processes?", scaling_sections),
    "parallelism": ("Which kind of parallelism is fastest?", parallelism_sections),
}


def benching_story(document: Stored) -> Story:
    """The story of one bench."""
    rows = [row for row in document.parts("rows")[:MOST_ROWS] if row.is_object]
    kind = document.text("kind")
    question, own = KINDS.get(kind, (f"What did bench {kind} find?", None))
    return Story(
        question=question,
        answer=document.text("advice") or sentence(_said(document, rows)),
        sections=kept(
            *(own(document, rows) if own and rows else []),
            scaling_section(rows),
            growth_section(kind, rows),
            rows_section(rows),
            measured_section(document, rows),
        ),
    )


def _said(document: Stored, rows: Sequence[Stored]) -> str:
    """What a bench without advice of its own comes to."""
    link, peaks = document.part("link"), document.parts("peaks")
    if link.number("bytes_per_second") is not None:
        rate, latency = size(link.number("bytes_per_second")), seconds(link.number("latency_seconds"))
        misfit = document.number("link_misfit") or 0.0
        off = f"; the timings are off by {percent(misfit)} in the middle" if misfit > POOR_FIT else ""
        return f"the link takes {latency} a message and carries {rate}/s each way, by the ordered reduction{off}"
    if peaks:
        best = (
            f"{place_of(peak)}: {rough(peak.number('gflops'))} GFLOP/s and "
            f"{rough(peak.number('gigabytes_per_second'))} GB/s"
            for peak in peaks
        )
        return f"at most: {'; '.join(best)}"
    scaled = [row for row in rows if row.number("processes") and row.number("efficiency") is not None]
    return _scaled(document, scaled) if scaled else f"{number(len(rows))} rows were measured"


def _scaled(document: Stored, rows: Sequence[Stored]) -> str:
    """What more processes bring, and what the most of the rest is."""
    base, most = rows[0], rows[-1]
    name = processes_of(most)
    if most is base:
        return f"{name}: {rough(base.number('samples_per_second'))} samples/s"
    efficiency = most.number("efficiency")
    if most.number("speedup") is None:
        return f"{name} reach {percent(efficiency)} of ideal scaling"
    lost = {said: most.number("lost", f"{part}_share") or 0.0 for part, said in LOST.items()}
    cause = max(lost, key=lambda said: lost[said])
    rest = f"; most of the rest went into {cause}" if (efficiency or 0.0) < 0.95 else ""
    faster = f"{most.number('speedup'):.2f} times the speed of {processes_of(base)}"
    mode = document.text("mode") or "strong"
    return f"{name}: {faster}, {percent(efficiency)} efficient ({mode} scaling){rest}"


def measured_section(document: Stored, rows: Sequence[Stored]) -> Section | None:
    """How it was measured, and what disturbed it."""
    machine = document.part("topology")
    if not machine.is_object or not rows:
        return None
    blocks: list[Block] = [Cell(sentence(line.text()), "warning") for line in document.parts("missing")]
    blocks += _weights(document, rows)
    most = rows[-1]
    processes, cores = most.number("processes") or 1.0, machine.number("cores") or 1.0
    threads = (most.number("threads") or 1.0) if document.text("kind") == "scaling" else 1.0
    if processes * threads > cores and document.text("kind") != "devices":
        each = "" if threads == 1 else f" of {number(threads)} threads"
        what = f"{processes_of(most)}{each} on {count(cores, 'core')}"
        blocks.append(Cell(f"{what}: they take turns, which shows in every figure of theirs.", "warning"))
    ordered = [row.number("bytes") or 0.0 for row in rows if row.text("collective") == "ordered"]
    if ordered and min(ordered) > min(row.number("bytes") or 0.0 for row in rows):
        blocks.append(Cell(f"ordered sums whole chunks of gradients, so {size(min(ordered))} at least.", "dim"))
    load, all_cores = machine.number("load"), machine.number("machine_cores") or 1.0
    if load is not None and load > BUSY * all_cores:
        told = f"Other programs were running (load {load:.1f} on {count(all_cores, 'core')})"
        blocks.append(Cell(f"{told}: the figures are of what they left.", "warning"))
    if machine.text("gpu_links"):
        blocks.append(Only("terminal", machine.text("gpu_links")))
    return Section(
        "How it was measured", (*blocks, Cell(f"{machine_words(machine)}; {rounds_words(document, most)}", "dim"))
    )


def _weights(document: Stored, rows: Sequence[Stored]) -> list[Block]:
    same = document.flag("same_weights")
    if same is None or len(rows) < 2:
        return []
    if same:
        return [Cell("The weights are the same bytes on every number of processes.", "good")]
    if document.text("reduce") == "allreduce":
        return [Cell("The weights differ in bytes: --reduce allreduce is not exact.", "warning")]
    return [Cell("The weights differ in bytes: does the task make the same data in every process?", "bad")]


def machine_words(machine: Stored) -> str:
    """What the timings depend on."""
    parts = [
        machine.text("processor"),
        f"{number(machine.number('cores'))} of {number(machine.number('machine_cores'))} cores",
    ]
    for name, word in (("sockets", "socket"), ("memory_nodes", "memory node")):
        parts += [count(machine.number(name), word)] if machine.number(name) else []
    load = machine.number("load")
    parts += [] if load is None else [f"load {load:.1f} before"]
    return ", ".join(parts)


def rounds_words(document: Stored, most: Stored) -> str:
    """How often it was timed."""
    rounds = f"medians of {count(most.number('rounds'), 'round')}, interleaved"
    kind, trained = document.text("kind"), document.parts("training")
    if kind == "collectives":
        rounds += ", of the slowest process"
    elif kind == "scaling":
        threads = f"{count(most.number('threads'), 'thread')} a process"
        rounds += f", {number(most.number('steps'))} steps each in all, {threads}"
    elif trained:
        rounds += f", training of {number(trained[0].number('rounds'))}"
    return rounds


def scaling_section(rows: Sequence[Stored]) -> Section | None:
    """Scaling efficiency against ideal, and what a step's time is made of."""
    known = sorted(rows, key=lambda row: row.number("processes") or 0.0)
    ends = (["efficiency_low"], ["efficiency_high"])
    measured = series_of("measured", known, "processes", ["efficiency"], ends, "both")
    counts = tuple(processes for processes, _ in measured.points)
    across = Axis("processes", log=True, ticks=counts)
    up = Axis("of ideal", share=True, low=0.0, high=1.0)
    ideal = Series("ideal", tuple((processes, 1.0) for processes in counts))
    found = kept(line_chart("Scaling efficiency", across, up, [measured, ideal]), _parts(rows))
    return Section("Scaling efficiency against ideal", found) if found and counts else None


def _parts(rows: Sequence[Stored]) -> Figure | None:
    """The parts of a step's time by number of processes."""
    drawn, cells = [], []
    for row in rows:
        amounts = [max(0.0, row.number(f"{part}_seconds") or 0.0) for part in PARTS]
        starts = [sum(amounts[:place]) for place in range(len(amounts))]
        parts = tuple(
            (1e3 * start, 1e3 * amount, look) for look, (start, amount) in enumerate(zip(starts, amounts, strict=True))
        )
        drawn.append(Bar(processes_of(row), seconds(sum(amounts)), parts))
        cells.append((processes_of(row), *map(seconds, amounts)))
    table = Table(("processes", *PARTS), tuple(cells), "What a step is made of")
    keys = [Key(part, look, "fill") for look, part in enumerate(PARTS)]
    return bars("What a step is made of", Axis("milliseconds"), drawn, table, keys)


def growth_section(kind: str, rows: Sequence[Stored]) -> Section | None:
    """Every kind of number against what it grows with."""
    names = [AGAINST[kind]] if kind in AGAINST else ACROSS
    across = next((name for name in names if len({row.number(name) for row in rows} - {None}) > 1), None)
    if across is None:
        return None
    figures = [figure for up in UP if (figure := _growth(rows, across, up)) is not None]
    return Section("How it grows", tuple(figures)) if figures else None


def _growth(rows: Sequence[Stored], across: str, up: str) -> Figure | None:
    groups: dict[str, list[tuple[float, float]]] = {}
    vary = [name for name in ("processes", "threads") if len({row.number(name) for row in rows}) > 1]
    for row in rows:
        a, b = row.number(across), row.number(up)
        if a and a > 0 and b is not None and b > 0:
            groups.setdefault(_group(row, vary if across != "processes" else []), []).append((a, b))
    series = [Series(name or "measured", tuple(sorted(points)), kind="both") for name, points in groups.items()]
    axes = Axis(_words(across), log=True), Axis(_words(up), log=True)
    note = f"The first {LOOKS} of {len(series)} kinds." if len(series) > LOOKS else ""
    return line_chart(f"{_words(up).capitalize()} by {_words(across)}", *axes, series[:LOOKS], note=note)


def _group(row: Stored, counts: Sequence[str]) -> str:
    """What tells the rows of one line from those of another: their texts and what else varies."""
    texts = [value.text() for _, value in row.items() if isinstance(value.value, str) and len(value.text()) <= 40]
    return ", ".join([*texts, *(f"{number(row.number(name))} {name}" for name in counts)])


def rows_section(rows: Sequence[Stored]) -> Section | None:
    """All rows."""
    plain = (name for row in rows for name, one in row.items() if not isinstance(one.value, dict | list))
    columns = list(dict.fromkeys(plain))[:14]
    if not columns:
        return None
    words = frozenset(i for i, name in enumerate(columns) if any(isinstance(row.part(name).value, str) for row in rows))
    cells = tuple(tuple(_cell(name, row.part(name)) for name in columns) for row in rows)
    table = Table(tuple(_words(name) for name in columns), cells, "All rows", words)
    return Section("All rows", (Only("page", table),))


def _cell(name: str, value: Stored) -> str:
    amount = value.number()
    if amount is None:
        return "–" if value.value is None else value.shown()
    if "bytes_per_second" in name:
        return f"{size(amount)}/s"
    if name.endswith("bytes"):
        return size(amount)
    return seconds(amount) if "seconds" in name else number(amount)


def _words(name: str) -> str:
    return name.replace("_per_second", " a second").replace("_", " ")
