"""A plan as one document: what `plan --json` prints, and what the page recomputes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scalewise.plan import model
from scalewise.plan.assemble import Metric
from scalewise.plan.choice import Choice, Wish
from scalewise.plan.model import Inputs, Row
from scalewise.plan.records import TaskFacts
from scalewise.recipe import Recipe

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

    def interval(self, place: int, name: str) -> tuple[Any, Any]:
        """Both ends of a number of a row, the smaller one first."""
        ends = getattr(self.low[place], name), getattr(self.high[place], name)
        return ends if ends[0] is None or ends[0] <= ends[1] else (ends[1], ends[0])

    def rule(self, workers: int) -> str:
        """The LR rule that auto trains with."""
        return "none" if workers == 1 else "adascale"

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
            "reason": self.choice.reason,
            "closest": [row.to_json() for row in self.choice.closest],
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
        found = row.to_json() | {"rule": self.rule(row.workers), "warmup_epochs": self.recipe.warmup_epochs}
        for name in INTERVALS:
            found[f"{name}_low"], found[f"{name}_high"] = self.interval(place, name)
        expected = self.metric(row.workers)
        ends = {"accuracy_low": expected.low, "accuracy_high": expected.high, "accuracy_runs": expected.runs}
        return found | {"accuracy": expected.value} | ends

    def metric(self, workers: int) -> Metric:
        """What so many workers came to; where they were not seen, what one worker did, of no runs of theirs."""
        inputs = self.inputs
        return self.seen.get(workers, Metric(inputs.accuracy, inputs.accuracy_low, inputs.accuracy_high, 0))


def rows_with_ends(inputs: Inputs, workers: Sequence[int]) -> tuple[tuple[Row, ...], tuple[Row, ...], tuple[Row, ...]]:
    """The rows, and the same rows at the two ends of the inputs' intervals."""
    shortest, longest = model.ends(inputs)
    middle, low, high = (tuple(model.rows(one, workers)) for one in (inputs, shortest, longest))
    return middle, low, high
