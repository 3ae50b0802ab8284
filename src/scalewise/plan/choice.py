"""Which row is recommended: the wish that was said, or half of one worker's efficiency where none was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalewise.errors import UsageError
from scalewise.plan.model import Row

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
    if wish.impossible is not None or not possible:
        return _impossible(rows, wish)
    if wish.deadline is not None:
        words = "the cheapest within the deadline" + (" and the budget" if wish.budget is not None else "")
        return Choice(_least(possible, _expense), (), words)
    if wish.budget is not None:
        return Choice(_least(possible, _seconds), (), "the fastest within the budget")
    worth = [row for row in rows if row.efficiency >= LEAST_EFFICIENCY] or [_least(rows, _expense)]
    return Choice(_least(worth, _seconds), (), "the fastest with at least half of one worker's efficiency")


def _impossible(rows: Sequence[Row], wish: Wish) -> Choice:
    if wish.impossible is not None:
        return Choice(None, (), wish.impossible)
    closest: dict[int, Row] = {}
    if wish.deadline is not None:
        fastest = _least(rows, _seconds)
        closest[fastest.workers] = fastest
    if wish.budget is not None:
        cheapest = _least(rows, _expense)
        closest[cheapest.workers] = cheapest
    return Choice(None, tuple(closest.values()), "no number of workers keeps to it")


def _least(rows: Sequence[Row], key: Callable[[Row], float]) -> Row:
    return min(rows, key=lambda row: (key(row), row.workers))


def _seconds(row: Row) -> float:
    return row.seconds


def _expense(row: Row) -> float:
    """Money, or device seconds where nothing is paid."""
    return row.seconds * row.workers if not row.cost else row.cost
