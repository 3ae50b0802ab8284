"""A plan as one document: what `plan --json` prints, and what the page recomputes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from scalewise.errors import UsageError
from scalewise.plan import model
from scalewise.plan.assemble import Metric
from scalewise.plan.model import Inputs, Row
from scalewise.plan.records import TaskFacts
from scalewise.recipe import Recipe
from scalewise.stats.critical_batch import CriticalBatch

INTERVALS = ("steps", "samples", "seconds", "cost", "efficiency")


@dataclass(frozen=True)
class Plan:
    """Rows over workers with the ends of their intervals, the choice among them, and how it is started."""

    facts: TaskFacts
    recipe: Recipe
    inputs: Inputs
    rows: tuple[Row, ...]
    low: tuple[Row, ...]  # the same rows where time is shortest
    high: tuple[Row, ...]  # and longest
    wish: Wish
    choice: Choice
    notes: tuple[str, ...]
    target: float | None = None
    command: str | None = None
    curve: tuple[tuple[int, float], ...] = ()  # one worker's validation metric by step
    seen: Mapping[int, Metric] = field(default_factory=dict)  # what several workers really came to, by their number
    critical: CriticalBatch | None = None  # with its 95 % interval

    def interval(self, place: int, name: str) -> tuple[Any, Any]:
        """Both ends of a number of a row, the smaller one first."""
        ends = getattr(self.low[place], name), getattr(self.high[place], name)
        return ends if ends[0] is None or ends[0] <= ends[1] else (ends[1], ends[0])

    def to_json(self) -> dict[str, Any]:
        """Every key of the contract, and what the rows follow from."""
        rows = [self._row(place) for place in range(len(self.rows))]
        recommended = None if self.choice.row is None else rows[self.rows.index(self.choice.row)]
        return {
            "task": self.facts.name,
            "settings": [*self.facts.settings],
            "metric": {"name": self.facts.metric, "higher_is_better": self.facts.higher_is_better},
            "rows": rows,
            "recommended": recommended,
            "command": self.command,
            "critical_batch": None if self.critical is None else self.critical.to_json(),
            "reason": self.choice.reason,
            "closest": [asdict(row) for row in self.choice.closest],
            "target": self.target,
            "deadline_seconds": self.wish.deadline,
            "budget": self.wish.budget,
            "inputs": asdict(self.inputs),
            "curve": [{"step": step, "value": value} for step, value in self.curve],
            "recipe": self.recipe.model_dump(),
            "notes": [*self.notes],
        }

    def _row(self, place: int) -> dict[str, Any]:
        row = self.rows[place]
        rules = {True: "muon", False: "adascale" if self.inputs.race_samples is None else "the recipe"}
        several = rules[self.inputs.race_steps > 0]  # that auto trains with
        rule = "none" if row.workers == 1 else several
        found = asdict(row) | {"rule": rule, "warmup_epochs": self.recipe.warmup_epochs}
        for name in INTERVALS:
            found[f"{name}_low"], found[f"{name}_high"] = self.interval(place, name)
        one = Metric(self.inputs.accuracy, self.inputs.accuracy_low, self.inputs.accuracy_high, 0)
        expected = self.seen.get(row.workers, one)  # where none were seen, what one worker reached, of no runs
        ends = {"accuracy_low": expected.low, "accuracy_high": expected.high, "accuracy_runs": expected.runs}
        return found | {"accuracy": expected.value} | ends


def rows_with_ends(inputs: Inputs, workers: Sequence[int]) -> tuple[tuple[Row, ...], tuple[Row, ...], tuple[Row, ...]]:
    """The rows, and the same rows at the two ends of the inputs' intervals."""
    shortest, longest = model.ends(inputs)
    middle, low, high = (tuple(model.rows(one, workers)) for one in (inputs, shortest, longest))
    return middle, low, high


LEAST_EFFICIENCY = 0.5  # as at the critical batch: beyond, most of what is paid for is lost


@dataclass(frozen=True)
class Wish:
    """What the plan must keep to: seconds, money; and why no row can be right, where something else rules all out."""

    deadline: float | None = None
    budget: float | None = None
    impossible: str | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not 0 < self.budget < float("inf"):
            raise UsageError(f"--budget must be above 0, got {self.budget:g}")

    def allows(self, row: Row) -> bool:
        """Whether a row keeps to it."""
        in_time = self.deadline is None or row.seconds <= self.deadline
        return in_time and (self.budget is None or (row.cost is not None and row.cost <= self.budget))


@dataclass(frozen=True)
class Choice:
    """The recommended row, or None and the rows that come closest; and why."""

    row: Row | None
    closest: tuple[Row, ...]
    reason: str


def choose(rows: Sequence[Row], wish: Wish) -> Choice:
    """The cheapest row in time, the fastest one within the budget, or the fastest one that is half efficient.

    With a deadline and a budget it is the cheapest row that keeps to both. Ties go to fewer workers.
    """
    if wish.budget is not None and any(row.cost is None for row in rows):
        raise UsageError(f"--budget {wish.budget:g} needs the price of a device; add --price 2.50/h")
    possible = [row for row in rows if wish.allows(row)]
    if wish.impossible is not None:
        return Choice(None, (), wish.impossible)
    if not possible:
        closest = [] if wish.deadline is None else [_least(rows, _seconds)]
        closest += [] if wish.budget is None else [_least(rows, _expense)]
        return Choice(None, tuple(dict.fromkeys(closest)), "no number of workers keeps to it")
    if wish.deadline is not None:
        words = "the cheapest within the deadline" + (" and the budget" if wish.budget is not None else "")
        return Choice(_least(possible, _expense), (), words)
    if wish.budget is not None:
        return Choice(_least(possible, _seconds), (), "the fastest within the budget")
    worth = [row for row in rows if row.efficiency >= LEAST_EFFICIENCY] or [_least(rows, _expense)]
    return Choice(_least(worth, _seconds), (), "the fastest with at least half of one worker's efficiency")


_seconds = attrgetter("seconds")


def _least(rows: Sequence[Row], key: Callable[[Row], float]) -> Row:
    return min(rows, key=lambda row: (key(row), row.workers))


def _expense(row: Row) -> float:
    """Money, or device seconds where nothing is paid."""
    return row.seconds * row.workers if not row.cost else row.cost
