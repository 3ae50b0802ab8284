"""A profile: where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.present.bars import Bar, bars
from scalewise.present.charts import Series, line_chart, thinned
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Fact, Key, Section, Story, Table
from scalewise.present.words import count, number, percent, seconds

WAITING = 7  # the look of time that is waited
MOST_SPANS, MOST_LANES, MOST_POINTS = 2_000, 24, 240


def profiling_story(document: Stored) -> Story:
    """The story of one profile."""
    task = document.text("task")
    sections = [phases_section(document), timeline_section(document), usage_section(document)]
    advice = [part.shown() for part in document.parts("advice")] or [document.text("advice")]
    bottleneck = document.text("bottleneck") or document.text("bottleneck", "name")
    said = bottleneck if bottleneck.endswith(".") else f"Most of it goes into {bottleneck}."
    return Story(
        question=f"Where does the time of a step go{f' in {task}' if task else ''}?",
        answer=" ".join([said, *(line for line in advice if line)]) if bottleneck else "There are no phases yet.",
        facts=_facts(document),
        sections=tuple(section for section in sections if section is not None),
    )


def _facts(document: Stored) -> tuple[Fact, ...]:
    found = []
    if document.number("step_seconds") is not None:
        found.append(Fact("a step", seconds(document.number("step_seconds"))))
    if document.number("processes") is not None:
        found.append(Fact("processes", number(document.number("processes"))))
    return tuple(found)


def phases_section(document: Stored) -> Section | None:
    """Worked and waited time by phase."""
    rows, cells = [], []
    for phase in document.parts("phases")[:MOST_LANES]:
        worked, waited = (max(0.0, phase.number(name) or 0.0) for name in ("worked_seconds", "waited_seconds"))
        share = percent(phase.number("share"))
        rows.append(
            Bar(
                phase.text("name"),
                f"{seconds(worked + waited)}, {share}",
                ((0.0, 1e3 * worked, 0), (1e3 * worked, 1e3 * waited, WAITING)),
            )
        )
        cells.append((phase.text("name"), seconds(worked), seconds(waited), share))
    table = Table(("phase", "worked", "waited", "share"), tuple(cells), "Phases of a step")
    keys = [Key("worked", 0, "fill"), Key("waited", WAITING, "fill")]
    figure = bars("Phases of a step", Axis("milliseconds"), rows, table, keys)
    return None if figure is None else Section("Phases of a step", (figure,))


def usage_section(document: Stored) -> Section | None:
    """How each process used its machine over time."""
    figures = []
    titles = {"processor_over_time": ("Processor", "cores used", 1.0), "memory_over_time": ("Memory", "MB", 1e-6)}
    for key, (title, unit, factor) in titles.items():
        series = []
        for row in document.parts("over_time")[:MOST_LANES]:
            pairs = [(point.number("seconds"), point.number("value")) for point in row.parts(key)]
            points = [(a, factor * b) for a, b in pairs if a is not None and b is not None]
            thin, _ = thinned(points, MOST_POINTS)
            series.append(Series(f"process {row.part('process').shown()}", thin.points))
        figures.append(line_chart(title, Axis("seconds"), Axis(unit, low=0.0), series))
    found = tuple(figure for figure in figures if figure is not None)
    return Section("How the machine was used", found) if found else None


def timeline_section(document: Stored) -> Section | None:
    """The spans of one step, a lane for each process."""
    spans = [span for span in document.parts("timeline")[:MOST_SPANS] if span.number("start_seconds") is not None]
    if not spans:
        return None
    names = list(dict.fromkeys(span.text("name") for span in spans))
    looks = {name: order % WAITING for order, name in enumerate(names)}
    begin = min(span.number("start_seconds") or 0.0 for span in spans)
    lanes: dict[str, list[Stored]] = {}
    for span in spans:
        lanes.setdefault(f"process {span.part('process').shown()}", []).append(span)
    rows = [_lane(name, own, looks, begin) for name, own in [*lanes.items()][:MOST_LANES]]
    keys = [*(Key(name, looks[name], "fill") for name in names), Key("waited", WAITING, "fill")]
    figure = bars("Timeline of a step", Axis("milliseconds"), rows, _table(spans, begin), keys)
    blocks: list[Block] = [figure] if figure is not None else []
    return (
        Section("Timeline of a step", tuple(blocks), count(len(lanes), "process", "processes") + ".")
        if blocks
        else None
    )


def _lane(name: str, spans: Sequence[Stored], looks: dict[str, int], begin: float) -> Bar:
    """The spans of one process: what was worked in the phase's look, what was waited after it in grey."""
    parts, names = [], []
    total = 0.0
    for span in spans:
        start = 1e3 * ((span.number("start_seconds") or 0.0) - begin)
        worked, waited = (1e3 * max(0.0, span.number(one) or 0.0) for one in ("worked_seconds", "waited_seconds"))
        parts.append((start, worked, looks[span.text("name")]))
        names.append(span.text("name"))
        if waited > 0:
            parts.append((start + worked, waited, WAITING))
            names.append(f"{span.text('name')}, waiting")
        total = max(total, start + worked + waited)
    return Bar(name, seconds(total / 1e3), tuple(parts), tuple(names))


def _table(spans: Sequence[Stored], begin: float) -> Table:
    cells = []
    for span in spans[:100]:
        start = (span.number("start_seconds") or 0.0) - begin
        times = (start, span.number("worked_seconds"), span.number("waited_seconds"))
        cells.append((span.part("process").shown(), span.text("name"), *map(seconds, times)))
    return Table(("process", "phase", "from", "worked", "waited"), tuple(cells), "Spans", frozenset({1}))
