"""A profile: where a step's time goes, phase by phase, layer by layer, process by process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalewise.present.charts import Axis, Bar, Series, bars, line_chart, series_of, thinned
from scalewise.present.stored import Stored, number_of, text_of
from scalewise.present.story import (
    Block,
    Cell,
    Columns,
    Fact,
    Key,
    Lanes,
    Meter,
    Only,
    Section,
    Sparkline,
    Story,
    Table,
    Tone,
    kept,
    table_of,
)
from scalewise.present.words import count, number, percent, seconds, size, span
from scalewise.runs.profile.result import COMPUTING, INPUT, MEANING, OTHER, PHASES, UPDATING

WAITING = 7  # the look of time that is waited
MOST_SPANS, MOST_LANES, MOST_POINTS, MOST_LAYERS = 2_000, 24, 240, 16
LONGEST_NAME, CURVE_POINTS, METER_WIDTH = 32, 16, 20
# In a terminal phases of a kind have one colour, and each its letter.
LOOKS = (
    dict.fromkeys(INPUT, 1)
    | dict.fromkeys(COMPUTING, 0)
    | {"backward": 4, "communication": 2, "return": 6, OTHER: 6}
    | dict.fromkeys(UPDATING, 3)
)
LETTERS = dict(zip((*PHASES, OTHER), "rmpqtflobscnwue·", strict=True))


def profiling_story(document: Stored) -> Story:
    """The story of one profile."""
    task = document.text("task")
    bottleneck, advice = document.text("bottleneck"), document.text("advice")
    said = bottleneck if bottleneck.endswith(".") else f"Most of it goes into {bottleneck}."
    return Story(
        question=f"Where does the time of a step go{f' in {task}' if task else ''}?",
        answer=said if bottleneck else "There are no phases yet.",
        facts=_facts(document),
        sections=kept(
            Section("What to try", (advice,)) if advice else None,
            phases_section(document),
            layers_section(document),
            timeline_section(document),
            usage_section(document),
        ),
        notes=tuple(overhead(document)),
        tone="warning",
    )


def _facts(document: Stored) -> tuple[Fact, ...]:
    found = []
    if document.number("step_seconds") is not None:
        speed = f"{number(document.number('samples_per_second'))} samples a second"
        found.append(Fact("a step", seconds(document.number("step_seconds")), speed))
    if document.number("workers") is not None:
        workers = f"{number(document.number('workers'))} × {number(document.number('worker_batch'))}"
        found.append(Fact("workers", workers))
    if document.number("processes") is not None:
        place = f"{count(document.number('threads'), 'thread')} each, {document.text('device')}"
        found.append(Fact("processes", number(document.number("processes")), place))
    return tuple(found)


def phases_section(document: Stored) -> Section | None:
    """Worked and waited time by phase."""
    phases = document.parts("phases")[:MOST_LANES]
    rows, cells = [], []
    for phase in phases:
        worked, waited = _times(phase)
        share = percent(phase.number("share"))
        parts = (0.0, 1e3 * worked, 0), (1e3 * worked, 1e3 * waited, WAITING)
        rows.append(Bar(phase.text("name"), f"{seconds(worked + waited)}, {share}", parts))
        cells.append((phase.text("name"), seconds(worked), seconds(waited), share))
    table = Table(("phase", "worked", "waited", "share"), tuple(cells), "Phases of a step")
    keys = [Key("worked", 0, "fill"), Key("waited", WAITING, "fill")]
    figure = bars("Phases of a step", Axis("milliseconds"), rows, table, keys)
    if figure is None:
        return None
    return Section("Where the time of a step goes", (figure, Only("terminal", _phases_table(phases))))


def _times(phase: Stored) -> tuple[float, float]:
    worked, waited = (max(0.0, phase.number(name) or 0.0) for name in ("worked_seconds", "waited_seconds"))
    return worked, waited


def _phases_table(phases: Sequence[Stored]) -> Table:
    """The phases with a bar each, worked solid and waited shaded; some work is done beside the step."""
    beside = any(phase.number("beside_seconds") for phase in phases)
    longest = max((phase.number("share") or 0.0 for phase in phases), default=0.0) or 1.0
    rows: list[tuple[str | Cell | Meter, ...]] = []
    for phase in phases:
        name, share = phase.text("name"), phase.number("share") or 0.0
        worked, waited = _times(phase)
        own = max(0.0, worked - (phase.number("beside_seconds") or 0.0))
        pieces = [own, waited] if waited else [own]
        parts = tuple((share / longest * part / (own + waited or 1.0), LOOKS.get(name, 6)) for part in pieces)
        bar = Meter(parts, 10 if beside else METER_WIDTH, frozenset({1} if waited else ()))
        times = [_time(worked), _time(waited), *([_time(phase.number("beside_seconds"))] if beside else [])]
        texts = (*times, percent(share) if worked + waited else "")
        tone: Tone = "plain" if worked + waited else "dim"
        rows.append((Cell(name, tone), *(Cell(text, tone) for text in texts), bar, Cell(MEANING.get(name, ""), "dim")))
    columns = ("phase", "worked", "waited", *(["beside"] if beside else []), "share", "", "what it is")
    words = frozenset({len(columns) - 1})
    return Table(columns, tuple(rows), "Phases of a step", words, spare=("what it is",))


def _time(value: float | None) -> str:
    return seconds(value) if value and value >= 5e-8 else ""


def layers_section(document: Stored) -> Section | None:
    """The layers that take the most time, in the model's order."""
    layers = document.parts("layers")[:MOST_SPANS]
    if document.flag("compiled"):
        return Section("Layer by layer", ("torch.compile makes one of all layers: they cannot be seen one by one.",))
    if not layers:
        return None
    largest = sorted(layers, key=lambda row: -(row.number("worked_seconds") or 0.0))[:MOST_LAYERS]
    shown = [row for row in layers if any(row is one for one in largest)]
    longest = max(row.number("worked_seconds") or 0.0 for row in shown) or 1.0
    rows: list[tuple[str | Cell | Meter, ...]] = []
    for row in shown:
        times = [row.number(name) or 0.0 for name in ("forward_seconds", "backward_seconds")]
        kind = "" if row.text("kind") == "loss" else row.text("kind")[:LONGEST_NAME]
        bar = Meter(((times[0] / longest, 0), (times[1] / longest, 4)), METER_WIDTH)
        name = row.text("name")
        name = name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
        rows.append((name, Cell(kind, "dim"), *map(_time, times), percent(row.number("share")), bar))
    rest = sum(row.number("share") or 0.0 for row in layers) - sum(row.number("share") or 0.0 for row in shown)
    more = len(layers) - len(shown)
    legend = f"And {number(more)} more, {percent(rest)} together." if more else ""
    columns = ("layer", "kind", "forward", "backward", "share", "")
    return Section("Layer by layer", (Table(columns, tuple(rows), "Layers", frozenset({1}), legend=legend),))


def timeline_section(document: Stored) -> Section | None:
    """The spans of one step, a lane for each process."""
    spans = [one for one in document.parts("timeline")[:MOST_SPANS] if one.number("start_seconds") is not None]
    if not spans:
        return None
    names = list(dict.fromkeys(one.text("name") for one in spans))
    looks = {name: order % WAITING for order, name in enumerate(names)}
    begin = min(one.number("start_seconds") or 0.0 for one in spans)
    lanes: dict[str, list[Stored]] = {}
    for one in spans:
        lanes.setdefault(f"process {one.part('process').shown()}", []).append(one)
    rows = [_lane(name, own, looks, begin) for name, own in [*lanes.items()][:MOST_LANES]]
    keys = [*(Key(name, looks[name], "fill") for name in names), Key("waited", WAITING, "fill")]
    figure = bars("Timeline of a step", Axis("milliseconds"), rows, _table(spans, begin), keys)
    if figure is None:
        return None
    blocks: list[Block] = [replace(figure, plot=_drawn_lanes(document, lanes, begin))]
    if len(lanes) > 1 and document.part("communication").is_object and document.number("processes") != 1:
        blocks.append(communication(document.part("communication")))
    return Section("Timeline of a step", tuple(blocks))


def _drawn_lanes(document: Stored, lanes: dict[str, list[Stored]], begin: float) -> Lanes:
    """The same for a terminal: letters for phases, and a line while an operation between processes is under way."""
    rows: list[tuple[str, tuple[tuple[float, float, str, int], ...]]] = []
    flights = document.parts("flights")[:MOST_SPANS]
    stop, waits = 0.0, False
    for name, spans in [*lanes.items()][:MOST_LANES]:
        stretches = []
        for one in spans:
            start, look = (one.number("start_seconds") or 0.0) - begin, LOOKS.get(one.text("name"), 6)
            worked, waited = _times(one)
            letter = "░" if waited else LETTERS.get(one.text("name"), "·")
            stretches.append((start, worked + waited, letter, look))
            stop, waits = max(stop, start + worked + waited), waits or waited > 0
        rows.append((name, tuple(stretches)))
        own = [flight for flight in flights if f"process {flight.part('process').shown()}" == name]
        under = [((one.number("start_seconds") or 0.0) - begin, one.number("seconds") or 0.0, "━", 2) for one in own]
        if under:
            rows.append(("  under way", tuple(under)))
    seen = {one.text("name") for spans in lanes.values() for one in spans}
    keys = [(letter, name, LOOKS[name]) for name, letter in LETTERS.items() if name in seen]
    return Lanes(
        f"one step, {seconds(stop)} from left to right", tuple(rows), (*keys, *([("░", "waiting", 1)] if waits else []))
    )


def communication(found: Stored) -> Cell:
    """How much was under way, and how much of it cost time."""
    flight, waited, hidden, behind = (
        seconds(found.number(f"{name}_seconds")) for name in ("in_flight", "waited", "hidden", "behind_backward")
    )
    return Cell(
        f"Communication: {number(round(found.number('operations') or 0.0))} operations a step, {flight} under way: "
        f"{waited} waited for, {hidden} hidden behind work ({behind} of it behind backward)."
    )


def _lane(name: str, spans: Sequence[Stored], looks: dict[str, int], begin: float) -> Bar:
    """The spans of one process: what was worked in the phase's look, what was waited after it in grey."""
    parts, names = [], []
    total = 0.0
    for one in spans:
        start = 1e3 * ((one.number("start_seconds") or 0.0) - begin)
        worked, waited = (1e3 * part for part in _times(one))
        parts.append((start, worked, looks[one.text("name")]))
        names.append(one.text("name"))
        if waited > 0:
            parts.append((start + worked, waited, WAITING))
            names.append(f"{one.text('name')}, waiting")
        total = max(total, start + worked + waited)
    return Bar(name, seconds(total / 1e3), tuple(parts), tuple(names))


def _table(spans: Sequence[Stored], begin: float) -> Table:
    columns: Columns[Stored] = {
        "process": lambda one: one.part("process").shown(),
        "phase": text_of("name"),
        "from": lambda one: seconds((one.number("start_seconds") or 0.0) - begin),
        "worked": number_of("worked_seconds", shown=seconds),
        "waited": number_of("waited_seconds", shown=seconds),
    }
    return table_of(spans[:100], columns, "Spans", ["phase"])


def usage_section(document: Stored) -> Section | None:
    """How each process used its machine, in all and over time."""
    blocks: list[Block] = []
    titles = {"processor_over_time": ("Processor", "cores used", 1.0), "memory_over_time": ("Memory", "MB", 1e-6)}
    for key, (title, unit, factor) in titles.items():
        series = []
        for row in document.parts("over_time")[:MOST_LANES]:
            points = [(a, factor * b) for a, b in _points(row, key)]
            series.append(Series(f"process {row.part('process').shown()}", thinned(points, MOST_POINTS).points))
        blocks += kept(line_chart(title, Axis("seconds"), Axis(unit, low=0.0), series))
    blocks += kept(_usage_table(document))
    return Section("The machine meanwhile", tuple(blocks)) if blocks else None


def _points(row: Stored, key: str) -> tuple[tuple[float, float], ...]:
    return series_of(key, row.parts(key), "seconds", ["value"]).points


def _usage_table(document: Stored) -> Table | None:
    rows: list[tuple[str | Sparkline, ...]] = []
    memory = {row.number("process"): row for row in document.parts("memory")}
    over_time = {row.number("process"): row for row in document.parts("over_time")}
    for row in document.parts("utilisation")[:MOST_LANES]:
        process = row.number("process")
        used, curves = memory.get(process, Stored()), over_time.get(process, Stored())
        share = row.number("processor_share") if row.number("device_share") is None else row.number("device_share")
        held = used.number("memory_bytes") if used.number("device_bytes") is None else used.number("device_bytes")
        curve = [_curve(curves, key, look) for key, look in (("processor_over_time", 0), ("memory_over_time", 4))]
        rows.append((number(process), percent(share), curve[0], size(held), curve[1]))
        for loader in row.parts("loaders"):
            name = f"  loader {number(loader.number('number'))}, busy"
            rows.append((name, percent(loader.number("busy_share")), Sparkline(()), "", Sparkline(())))
    columns = ("process", "processor", "", "memory", "")
    return Table(columns, tuple(rows), "How much each process used") if rows else None


def _curve(row: Stored, key: str, look: int) -> Sparkline:
    points = thinned(_points(row, key), CURVE_POINTS).points
    return Sparkline(tuple(value for _, value in points), look=look)


def overhead(document: Stored) -> list[str]:
    """What looking costs."""
    cost = document.part("overhead")
    low, high = cost.number("low"), cost.number("high")
    if low is None or high is None:
        return []
    ends = f"95 %: {span(low, high, lambda share: percent(share, 1))}"
    both = f"{seconds(cost.number('profiled_seconds'))} against {seconds(cost.number('plain_seconds'))}"
    told = f"profiling makes a step {percent(cost.number('share'), 1)} longer ({ends}; {both})"
    if low <= 0 <= high:
        told = f"what profiling costs cannot be told from the noise of this machine ({ends}; {both})"
    steps, rounds = number(document.number("steps")), count(cost.number("rounds"), "round")
    more = f"it takes {percent(cost.number('processor_share'), 1)} more processor time"
    return [f"{steps} steps profiled in {rounds}, interleaved with as many plain ones: {told}; {more}"]
