"""A plan: how long each number of workers takes, what they cost, and the same under other assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace

from scalewise.plan.hardware import ETHERNET_LATENCY
from scalewise.plan.model import Inputs
from scalewise.present.charts import Axis, Mark, Series, line_chart, series_of
from scalewise.present.stored import Stored, number_of, text_of
from scalewise.present.story import Cell, Columns, Command, Fact, Planner, Section, Story, kept, table_of
from scalewise.present.words import (
    aligned,
    count,
    interval,
    listed,
    metric,
    money,
    number,
    percent,
    rough,
    seconds,
    seconds_span,
    sentence,
    spelled,
)
from scalewise.records import finite

MOST_ROWS = 64
LIMITS = {
    "noise": "Limited by noise: more samples in a step bring less.",
    "link": "Limited by the link: summing the gradients takes longer than computing hides.",
    "memory": "Limited by memory: a worker batch goes through the model in parts.",
    "input": "Limited by input: samples are not read as fast as they are used.",
}


def planning_story(document: Stored) -> Story:
    """The story of one plan."""
    rows = rows_of(document)
    chosen = recommended(document, rows)
    task, command = document.text("task"), document.text("command")
    return Story(
        question=f"How many workers are worth it{f' for {task}' if task else ''}?",
        answer=answer(document),
        facts=(*_facts(chosen), *accuracy_facts(document, rows)),
        sections=kept(
            rows_section(document, rows, chosen),
            Section("Run it", (Command(command),)) if command else None,
            charts_section(rows, chosen),
            planner_section(document, rows, chosen),
        ),
        notes=tuple(note.shown() for note in document.parts("notes")),
        tone="warning" if chosen is None else "strong",
    )


def recommended(document: Stored, rows: Sequence[Stored]) -> Stored | None:
    """The row that the plan recommends."""
    workers = document.number("recommended", "workers")
    return next((row for row in rows if row.number("workers") == workers), None)


def rows_of(document: Stored) -> list[Stored]:
    """The rows that are shown."""
    return [row for row in document.parts("rows")[:MOST_ROWS] if row.number("workers")]


def answer(document: Stored) -> str:
    """How many workers, what they bring, what they cost, and why; or why none."""
    rows = rows_of(document)
    chosen = recommended(document, rows)
    if chosen is None:
        return sentence(refusal(document))
    one = next((row for row in rows if row.number("workers") == 1 and row is not chosen), Stored())
    took, single = chosen.number("seconds"), one.number("seconds")
    said = f"{count(chosen.number('workers'), 'worker')}: {seconds(took)}"
    if took and single:
        faster = f"{rough(single / took)} times as fast, efficiency {percent(chosen.number('efficiency'))}"
        said += f" instead of {seconds(single)} with one ({faster})"
    if chosen.number("cost") is not None:
        before = "" if one.number("cost") is None else f" instead of {money(one.number('cost'))}"
        said += f", for {money(chosen.number('cost'))}{before}"
    reason = document.text("reason")
    return sentence(f"{said}; {reason}" if reason else said)


def refusal(document: Stored) -> str:
    """Why no row is recommended, and what comes closest."""
    closest = []
    for row in document.parts("closest"):
        cost = "" if row.number("cost") is None else f" for {money(row.number('cost'))}"
        closest.append(f"{count(row.number('workers'), 'worker')} with {seconds(row.number('seconds'))}{cost}")
    if not closest:
        return document.text("reason") or "no number of workers does what was asked for"
    deadline, budget = document.number("deadline_seconds"), document.number("budget")
    wishes = [] if deadline is None else [f"--deadline {seconds(deadline)}"]
    wishes += [] if budget is None else [f"--budget {budget:g}"]
    return f"no number of workers keeps to {listed(wishes)}: the closest possible is {' or '.join(closest)}"


def _facts(chosen: Stored | None) -> tuple[Fact, ...]:
    """The recommended row at a glance; a terminal has it in the answer."""
    if chosen is None:
        return ()
    cost = chosen.number("cost")
    found = (
        ("workers", number(chosen.number("workers")), f"global batch {number(chosen.number('global_batch'))}"),
        ("time", seconds(chosen.number("seconds")), f"{number(chosen.number('steps'))} steps"),
        *([] if cost is None else [("cost", money(cost), "")]),
        ("efficiency", percent(chosen.number("efficiency")), "against one worker"),
        ("learning rate", number(chosen.number("lr")), ""),
        *([("limited by", chosen.text("limit"), "")] if chosen.text("limit") else []),
    )
    return tuple(Fact(*fact, place="page") for fact in found)


def accuracy_facts(document: Stored, rows: Sequence[Stored]) -> list[Fact]:
    """What the metric is expected to be, and what several workers came to."""
    inputs, name = document.part("inputs"), document.text("metric", "name") or "accuracy"
    expected = inputs.number("accuracy")
    target = document.number("target")
    if expected is None:
        return []
    if target is not None and (recommended(document, rows) is not None or document.parts("closest")):
        steps = f"one worker reaches it in {rough(inputs.number('single_steps'))} steps"
        return [Fact(f"validation {spelled(name)}", metric(name, target), steps)]
    low, high = inputs.number("accuracy_low"), inputs.number("accuracy_high")
    spread = ", from one run: its spread is not known" if low is None or high is None else ""
    value = interval(expected, low, high, lambda one: metric(name, one))
    found = [Fact(f"test {spelled(name)}", value, f"each row trains as far as one worker{spread}")]
    trained = [row for row in rows if row.number("accuracy_runs") and row.number("workers") != 1]
    seen = [
        f"{count(row.number('workers'), 'worker')} {metric(name, row.number('accuracy'))} "
        f"(n={number(row.number('accuracy_runs'))})"
        for row in trained
    ]
    return [*found, *([Fact("seen", listed(seen))] if seen else [])]


def rows_section(document: Stored, rows: Sequence[Stored], chosen: Stored | None) -> Section | None:
    """Every number of workers."""
    if not rows:
        return None
    name = document.text("metric", "name") or "accuracy"
    marks = [f"{'▶ ' * (row is chosen)}{'~' if row.flag('extrapolated') else ''}" for row in rows]
    names = aligned([f"{mark}{number(row.number('workers'))}" for mark, row in zip(marks, rows, strict=True)])
    columns: Columns[Stored] = {
        "workers": lambda row: names[rows.index(row)],
        "global batch": number_of("global_batch"),
        "peak LR": number_of("lr", shown=rough),
        "steps": number_of("steps"),
        "samples": number_of("samples", shown=rough),
        "time": number_of("seconds", shown=seconds),
        "80 % interval": lambda row: seconds_span(*row.ranged("seconds")[1:]),
        "cost": number_of("cost", shown=money) if any(row.number("cost") is not None for row in rows) else None,
        spelled(name): number_of("accuracy", shown=lambda value: metric(name, value)),
        "efficient": number_of("efficiency", shown=lambda one: "< 1 %" if 0 < (one or 0) < 0.01 else percent(one)),
        "limited by": text_of("limit"),
    }
    own = next((place for place, row in enumerate(rows) if row is chosen), None)
    spare, legend = (spelled(name), "samples", "steps"), _legend(document, rows, chosen)
    table = table_of(rows, columns, "Every number of workers", ["limited by"], spare, own, legend)
    cells = [
        tuple(Cell(cell, "good") if isinstance(cell, str) else cell for cell in row) if place == own else row
        for place, row in enumerate(table.rows)
    ]
    return Section("The plan", (replace(table, rows=tuple(cells)),))


def _legend(document: Stored, rows: Sequence[Stored], chosen: Stored | None) -> str:
    """What the marks and words of the table mean."""
    said = ["▶ recommended."] if chosen is not None else []
    if any(row.flag("extrapolated") for row in rows):
        seen = number(document.number("inputs", "measured_global_batch"))
        said.append(f"~ extrapolated: no training was seen beyond a global batch of {seen}.")
    limits = dict.fromkeys(row.text("limit") for row in rows)
    said += [LIMITS[name] for name in limits if name in LIMITS]
    several = next((row for row in rows if (row.number("workers") or 0) > 1 and row.text("rule")), None)
    if several is not None and several.text("rule") == "muon":
        race = number(document.number("inputs", "race_steps"))
        said.append(
            f"Several workers: Muon, as train's auto does after a race of {race} steps, which measures the rate (here "
            f"its usual one) and how many samples the task needs: the interval holds the fewest and the most."
        )
    elif several is not None and several.text("rule") == "adascale":
        warmup = number(several.number("warmup_epochs") or 0.0)
        said.append(f"Several workers: the rate by {several.text('rule')}, warm-up {warmup} epochs (train --search 0).")
    return "\n".join(said)


def charts_section(rows: Sequence[Stored], chosen: Stored | None) -> Section | None:
    """Time and efficiency against ideal scaling."""
    counts = tuple(count for row in rows if (count := row.number("workers")))
    axis = Axis("workers", log=True, ticks=counts)
    first = next((row.number("seconds") for row in rows if row.number("workers") == 1), None)
    marks = [Mark("x", chosen.number("workers") or 1.0, "recommended")] if chosen is not None else []
    time, worth = (
        [series_of("planned", rows, "workers", [name], ([f"{name}_low"], [f"{name}_high"]))]
        for name in ("seconds", "efficiency")
    )
    if first:
        time.append(Series("ideal", tuple((workers, first / workers) for workers in counts)))
    worth.append(Series("ideal", tuple((workers, 1.0) for workers in counts)))
    share = Axis("of ideal", share=True, low=0.0, high=1.0)
    found = kept(
        line_chart("Time by workers", axis, Axis("seconds", log=True), time, marks),
        line_chart("Scaling efficiency", axis, share, worth, marks),
    )
    return Section("Time and efficiency against ideal", found) if found and len(counts) > 1 else None


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
