"""A plan: what so many workers take and cost, and the same under other assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields

from scalewise.plan.model import Inputs
from scalewise.plan.words import ETHERNET_LATENCY
from scalewise.present.charts import Mark, Series, line_chart
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Cell, Command, Fact, Planner, Section, Story, Table
from scalewise.present.words import NOTHING, count, metric, money, number, percent, rough, seconds
from scalewise.records import finite

MOST_ROWS = 64


def planning_story(document: Stored) -> Story:
    """The story of one plan."""
    rows = rows_of(document)
    chosen = recommended(document, rows)
    sections = [
        rows_section(document, rows, chosen),
        charts_section(rows, chosen),
        planner_section(document, rows, chosen),
    ]
    task = document.text("task")
    return Story(
        question=f"How many workers are worth it{f' for {task}' if task else ''}?",
        answer=answer(document),
        facts=_facts(chosen, rows),
        sections=tuple(section for section in sections if section is not None),
    )


def recommended(document: Stored, rows: Sequence[Stored]) -> Stored | None:
    """The row that the plan recommends, given as a row or by its number of workers."""
    workers = document.number("recommended", "workers") or document.number("recommended")
    return next((row for row in rows if row.number("workers") == workers), None)


def rows_of(document: Stored) -> list[Stored]:
    """The rows that are shown."""
    return [row for row in document.parts("rows")[:MOST_ROWS] if row.number("workers")]


def answer(document: Stored) -> str:
    """What is recommended, and why."""
    rows = rows_of(document)
    chosen = recommended(document, rows)
    if chosen is None:
        return document.text("reason") or "No number of workers does what was asked for."
    time = seconds(chosen.number("seconds"))
    cost = "" if chosen.number("cost") is None else f" and costs {money(chosen.number('cost'))}"
    first = next((row.number("seconds") for row in rows if row.number("workers") == 1), None)
    several = chosen.number("workers") != 1
    own = chosen.number("seconds")
    faster = f", {rough(first / own)} times as fast as one" if several and first and own else ""
    reason = document.text("reason")
    why = f"; it is {reason}" if reason else ""
    said = f"{count(chosen.number('workers'), 'worker')}: training takes {time}{cost}{faster}{why}."
    return f"{said} Limited by {chosen.text('limit')}." if chosen.text("limit") else said


def _facts(chosen: Stored | None, rows: Sequence[Stored]) -> tuple[Fact, ...]:
    if chosen is None:
        return ()
    cost = chosen.number("cost")
    return (
        Fact("workers", number(chosen.number("workers")), f"global batch {number(chosen.number('global_batch'))}"),
        Fact("time", seconds(chosen.number("seconds")), f"{number(chosen.number('steps'))} steps"),
        *([] if cost is None else [Fact("cost", money(cost))]),
        Fact("efficiency", percent(chosen.number("efficiency")), "against one worker"),
        Fact("learning rate", number(chosen.number("lr"))),
    )


def rows_section(document: Stored, rows: Sequence[Stored], chosen: Stored | None) -> Section | None:
    """The plan as it was printed, with the command that carries it out."""
    if not rows:
        return None
    name = document.text("metric", "name") or "accuracy"
    priced = any(row.number("cost") is not None for row in rows)
    costs = ("cost",) if priced else ()
    before = ("workers", "global batch", "LR", "steps", "samples", "time", "80 % interval")
    columns = (*before, *costs, name, "efficiency", "limited by")
    cells = tuple(_cells(row, row is chosen, name, priced) for row in rows)
    table = Table(columns, cells, "Every number of workers", frozenset({len(columns) - 1}))
    blocks: list[Block] = [table, *([legend] if (legend := _legend(rows, chosen)) else [])]
    if document.text("command"):
        blocks.append(Command(document.text("command")))
    blocks += [note.shown() for note in document.parts("notes")]
    return Section("The plan", tuple(blocks))


def _legend(rows: Sequence[Stored], chosen: Stored | None) -> str:
    """What the marks mean, and how several workers are trained."""
    said = ["▶ recommended."] if chosen is not None else []
    if any(row.flag("extrapolated") for row in rows):
        said.append("* beyond the largest global batch that was really trained.")
    several = next((row for row in rows if (row.number("workers") or 0) > 1 and row.text("rule")), None)
    if several is not None:
        warmup = number(several.number("warmup_epochs") or 0.0)
        said.append(f"Several workers: the rate by {several.text('rule')}, warm-up {warmup} epochs.")
    return " ".join(said)


def _cells(row: Stored, chosen: bool, name: str, priced: bool) -> tuple[str | Cell, ...]:
    low, high = row.number("seconds_low"), row.number("seconds_high")
    cells = (
        ("▶ " if chosen else "") + number(row.number("workers")) + (" *" if row.flag("extrapolated") else ""),
        number(row.number("global_batch")),
        number(row.number("lr")),
        number(row.number("steps")),
        number(row.number("samples")),
        seconds(row.number("seconds")),
        NOTHING if low is None or high is None else f"{seconds(low)} to {seconds(high)}",
        *([money(row.number("cost"))] if priced else []),
        metric(name, row.number("accuracy")),
        percent(row.number("efficiency")),
        row.text("limit"),
    )
    return tuple(Cell(cell, "good") for cell in cells) if chosen else cells


def charts_section(rows: Sequence[Stored], chosen: Stored | None) -> Section | None:
    """Time and efficiency against ideal scaling."""
    counts = tuple(count for row in rows if (count := row.number("workers")))
    axis = Axis("workers", log=True, ticks=counts)
    first = next((row.number("seconds") for row in rows if row.number("workers") == 1), None)
    marks = [Mark("x", chosen.number("workers") or 1.0, "recommended")] if chosen is not None else []
    time = [Series("planned", _points(rows, "seconds"), _band(rows, "seconds"), "line")]
    if first:
        time.append(Series("ideal", tuple((workers, first / workers) for workers in counts)))
    worth = [
        Series("planned", _points(rows, "efficiency"), _band(rows, "efficiency"), "line"),
        Series("ideal", tuple((one, 1.0) for one in counts)),
    ]
    figures = [
        line_chart("Time by workers", axis, Axis("seconds", log=True), time, marks),
        line_chart("Scaling efficiency", axis, Axis("of ideal", share=True, low=0.0, high=1.0), worth, marks),
    ]
    found = tuple(figure for figure in figures if figure is not None)
    return Section("Time and efficiency against ideal", found) if found and len(counts) > 1 else None


def _points(rows: Sequence[Stored], name: str) -> tuple[tuple[float, float], ...]:
    pairs = [(row.number("workers"), row.number(name)) for row in rows]
    return tuple((a, b) for a, b in pairs if a and b is not None)


def _band(rows: Sequence[Stored], name: str) -> tuple[tuple[float, float, float], ...]:
    ends = [(row.number("workers"), row.number(f"{name}_low"), row.number(f"{name}_high")) for row in rows]
    return tuple((a, *sorted((low, high))) for a, low, high in ends if a and low is not None and high is not None)  # type: ignore[misc]


def planner_section(document: Stored, rows: Sequence[Stored], chosen: Stored | None) -> Section | None:
    """Sliders over the model: what other workers, prices, links and targets would give."""
    inputs = model_inputs(document.part("inputs"))
    counts = sorted({int(count) for row in rows if (count := row.number("workers")) and 1 <= count <= 10**7})
    if inputs is None or not counts:
        return None
    start = int(chosen.number("workers") or 0) if chosen is not None else counts[0]
    curve = [(one.number("step"), one.number("value")) for one in document.parts("curve")]
    known = [[step, value] for step, value in curve if step is not None and value is not None]
    data = {
        "inputs": inputs,
        "workers": counts,
        "chosen": start if start in counts else counts[0],
        "curve": known,
        "metric": document.text("metric", "name"),
        "higher": document.flag("metric", "higher_is_better") is not False,
        "target": document.number("target"),
        "rate_latency_seconds": ETHERNET_LATENCY,
    }
    lead = "Move a slider: every number follows, by the formulas of scalewise plan."
    if len(known) < 2:
        lead += " A slider for the target needs validation data: plan with --target."
    return Section("What if?", (Planner(finite(data)),), lead)


def model_inputs(stored: Stored) -> dict[str, float | None] | None:
    """The inputs of the planning model; None where a number that it needs is missing or absurd."""
    found: dict[str, float | None] = {}
    for field in fields(Inputs):
        value = stored.number(field.name)
        if value is None and field.name not in dict(stored.items()):
            if field.default is MISSING:
                return None
            value = field.default
        found[field.name] = value
    needed = (
        "worker_batch",
        "single_steps",
        "bytes_per_second",
        "device_speed",
        "node_devices",
        "node_bytes_per_second",
    )
    return found if all((found[name] or 0) > 0 for name in needed) else None
