"""A bench: rows of numbers with their units in the names, drawn against what they grow with."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.present.bars import Bar, bars
from scalewise.present.charts import LOOKS, Series, line_chart
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Figure, Key, Section, Story, Table
from scalewise.present.words import count, number, percent, seconds, size

MOST_ROWS = 400
# What rows of each kind are drawn against; of other kinds the first that they have.
AGAINST = {"collectives": "bytes", "devices": "size", "scaling": "processes"}
ACROSS = ("processes", "workers", "bytes", "worker_batch", "size")
UP = ("samples_per_second", "bus_bytes_per_second", "gflops", "gigabytes_per_second", "step_seconds", "seconds")
PARTS = ("compute", "communication", "imbalance", "input")  # that the seconds of a step are made of
QUESTIONS = {
    "devices": "Which operations are worth sending to the device?",
    "collectives": "What does the link carry?",
    "scaling": "How well does training scale over processes?",
    "parallelism": "Which kind of parallelism is fastest?",
}


def benching_story(document: Stored) -> Story:
    """The story of one bench."""
    rows = [row for row in document.parts("rows")[:MOST_ROWS] if row.is_object]
    kind = document.text("kind")
    sections = [scaling_section(rows), growth_section(kind, rows), rows_section(rows)]
    return Story(
        question=QUESTIONS.get(kind, f"What did bench {kind} find?"),
        answer=answer(document, rows),
        sections=tuple(section for section in sections if section is not None),
    )


def answer(document: Stored, rows: Sequence[Stored]) -> str:
    """What the bench says itself, or how far the last row is from ideal."""
    own = next((text for name in ("answer", "verdict", "advice", "sentence") if (text := document.text(name))), "")
    if own:
        return own
    link = document.part("link")
    if link.number("bytes_per_second") is not None:
        rate, latency = size(link.number("bytes_per_second")), seconds(link.number("latency_seconds"))
        return f"One process's link carries {rate} a second; a message takes {latency} to begin with."
    scaled = _efficiency(rows)
    if scaled:
        most, share = scaled[-1]
        return f"{number(most)} processes reach {percent(share)} of ideal scaling."
    return f"{number(len(rows))} rows were measured."


def _efficiency(rows: Sequence[Stored]) -> list[tuple[float, float]]:
    """The share of ideal speed by number of processes, as it was measured."""
    pairs = [(row.number("processes"), row.number("efficiency")) for row in rows]
    return sorted((count, share) for count, share in pairs if count and share is not None)


def scaling_section(rows: Sequence[Stored]) -> Section | None:
    """Scaling efficiency against ideal, and what a step's time is made of."""
    points = tuple(_efficiency(rows))
    ends = [[row.number(name) for name in ("processes", "efficiency_low", "efficiency_high")] for row in rows]
    band = tuple((a, low, high) for a, low, high in ends if a and low is not None and high is not None)
    across = Axis("processes", log=True, ticks=tuple(a for a, _ in points))
    up = Axis("of ideal", share=True, low=0.0, high=1.0)
    ideal = Series("ideal", tuple((count, 1.0) for count, _ in points))
    figures = [
        line_chart("Scaling efficiency", across, up, [Series("measured", points, band, "both"), ideal]),
        _parts(rows),
    ]
    found = tuple(figure for figure in figures if figure is not None)
    return Section("Scaling efficiency against ideal", found) if found and points else None


def _parts(rows: Sequence[Stored]) -> Figure | None:
    """The parts of a step's time by number of processes."""
    drawn, cells = [], []
    for row in rows:
        amounts = [max(0.0, row.number(f"{part}_seconds") or 0.0) for part in PARTS]
        starts = [sum(amounts[:place]) for place in range(len(amounts))]
        name = count(row.number("processes"), "process", "processes")
        looks = zip(starts, amounts, (0, 1, 2, 3), strict=True)
        parts = tuple((1e3 * start, 1e3 * amount, look) for start, amount, look in looks)
        drawn.append(Bar(name, seconds(sum(amounts)), parts))
        cells.append((name, *map(seconds, amounts)))
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
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_plain(value)))[:14]
    if not columns:
        return None
    words = frozenset(i for i, name in enumerate(columns) if any(isinstance(row.part(name).value, str) for row in rows))
    cells = tuple(tuple(_cell(name, row.part(name)) for name in columns) for row in rows)
    blocks: list[Block] = [Table(tuple(_words(name) for name in columns), cells, "All rows", words)]
    return Section("All rows", tuple(blocks))


def _is_plain(value: Stored) -> bool:
    return not isinstance(value.value, dict | list)


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
