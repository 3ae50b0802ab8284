"""A plan on one screen: the answer in a sentence, the rows, the line to type, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scalewise.present.words import metrics, number, rough, seconds

if TYPE_CHECKING:
    from scalewise.plan.document import Plan
    from scalewise.plan.model import Row

WIDE = 92  # columns from which on there is room for the samples
UNITS, LARGEST = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0)), 100.0
LIMITS = {
    "noise": "limited by noise: beyond the critical batch more samples in a step bring less",
    "link": "limited by the link: summing the gradients takes longer than computing hides",
    "memory": "limited by memory: a worker batch goes through the model in parts",
    "input": "limited by input: samples are not read as fast as they are used",
}


def screen(plan: Plan, width: int) -> RenderableType:
    """Everything that a person needs to act on the plan."""
    parts: list[RenderableType] = ["", Text(sentence(plan), style="bold" if plan.choice.row else "bold yellow")]
    if plan.inputs.accuracy is not None:
        parts.append(Text(accuracy_line(plan)))
    parts += ["", rows_table(plan, width), Text(legend(plan), style="dim"), ""]
    if plan.command is not None:
        parts += [Text(plan.command, style="cyan", overflow="fold"), ""]
    parts += [Text(f"· {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def sentence(plan: Plan) -> str:
    """The answer: how many workers, what they bring, and what they cost."""
    row = plan.choice.row
    if row is None:
        return refusal(plan)
    one = plan.rows[0]
    if row.workers == 1:
        gain = f"1 worker, {seconds(row.seconds)}"
    else:
        gain = (
            f"{row.workers:,} workers: {seconds(row.seconds)} instead of {seconds(one.seconds)} with one "
            f"({one.seconds / row.seconds:.1f} times faster, efficiency {100 * row.efficiency:.0f} %)"
        )
    money = "" if row.cost is None else f", for {money_of(row.cost)} instead of {money_of(one.cost or 0.0)}"
    if row.workers == 1 and row.cost is not None:
        money = f", for {money_of(row.cost)}"
    return f"{gain}{money}; {plan.choice.reason}"


def refusal(plan: Plan) -> str:
    """Why no row is recommended, and what comes closest."""
    if plan.wish.impossible is not None:
        return plan.wish.impossible
    wishes = []
    if plan.wish.deadline is not None:
        wishes.append(f"--deadline {seconds(plan.wish.deadline)}")
    if plan.wish.budget is not None:
        wishes.append(f"--budget {plan.wish.budget:g}")
    closest = " or ".join(_close(row) for row in plan.choice.closest)
    return f"none of the numbers of workers keeps to {' and '.join(wishes)}: the closest possible is {closest}"


def _close(row: Row) -> str:
    cost = "" if row.cost is None else f" for {money_of(row.cost)}"
    return f"{row.workers:,} worker{'s' * (row.workers != 1)} with {seconds(row.seconds)}{cost}"


def money_of(amount: float) -> str:
    """Money with two digits behind the point, and more where it is little.

    >>> money_of(1234.567), money_of(0.00123)
    ('1,234.57', '0.0012')
    """
    return f"{amount:,.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def accuracy_line(plan: Plan) -> str:
    """What the metric is expected to be."""
    inputs, name = plan.inputs, plan.facts.metric
    assert inputs.accuracy is not None
    if plan.target is not None and plan.wish.impossible is None:
        steps = rough(inputs.single_steps)
        return f"to validation {metrics({name: plan.target})}, which one worker reaches in {steps} steps"
    low, high = inputs.accuracy_low, inputs.accuracy_high
    spread = "one run: its spread is not known" if low is None or high is None else f"{number(low)} to {number(high)}"
    expected = (
        f"test {metrics({name: inputs.accuracy})} ({spread}) as with one worker: every row trains until it is as far"
    )
    seen = [f"{count:,} workers {number(found.value or 0.0)} (n={found.runs})" for count, found in plan.seen.items()]
    return f"{expected}; really seen: {', '.join(seen)}" if seen else expected


def rows_table(plan: Plan, width: int) -> Table:
    """One line for each number of workers; the recommended one is bold, extrapolated ones are marked."""
    wide = width >= WIDE
    columns = ["workers", "global\nbatch", "peak\nLR", "steps", *(["samples"] if wide else []), "time", "80 %"]
    columns += [*(["cost"] if plan.inputs.price_per_hour is not None else []), "effi-\nciency", "limited\nby"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        left = column in ("80 %", columns[-1])
        table.add_column(column, justify="left" if left else "right", no_wrap=True, vertical="bottom")
    for place, row in enumerate(plan.rows):
        style = "bold green" if row == plan.choice.row else None
        table.add_row(*_cells(plan, place, row, wide), style=style)
    return table


def _cells(plan: Plan, place: int, row: Row, wide: bool) -> Sequence[str]:
    mark = ("▶ " if row == plan.choice.row else "") + ("~" if row.extrapolated else "")
    return [
        f"{mark}{row.workers:,}",
        f"{row.global_batch:,}",
        f"{row.lr:.3g}",
        f"{row.steps:,}",
        *([rough(row.samples)] if wide else []),
        seconds(row.seconds),
        between(*plan.interval(place, "seconds")),
        *([money_of(row.cost)] if row.cost is not None else []),
        f"{100 * row.efficiency:.0f} %" if row.efficiency >= 0.01 else "< 1 %",
        row.limit,
    ]


def between(low: float, high: float) -> str:
    """Two durations, in one unit.

    >>> between(3.04, 5.3), between(300, 5400)
    ('3.0–5.3 s', '5.0–90 min')
    """
    unit, size = next(((unit, size) for unit, size in UNITS if high < LARGEST * size), UNITS[-1])
    return f"{_short(low / size)}–{_short(high / size)} {unit}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def legend(plan: Plan) -> str:
    """What the marks and words of the table mean."""
    limits = dict.fromkeys(row.limit for row in plan.rows if row.limit != "compute")
    lines = [LIMITS[name] for name in limits]
    if any(row.extrapolated for row in plan.rows):
        lines.insert(0, f"~ extrapolated: no training was seen beyond a global batch of {_seen(plan)}")
    if len(plan.rows) > 1:
        rates = f"warm-up {plan.recipe.warmup_epochs:g} epochs, the rate by adascale, as train does by itself"
        lines.append(f"several workers: {rates}")
    return "\n".join(lines)


def _seen(plan: Plan) -> str:
    return f"{plan.inputs.measured_global_batch:,}"
