"""The search for the learning rate that takes the fewest steps: the same number of rates at every global batch.

Six rates: a grid of four, a factor 2 apart, around a suggestion; then two more, beside the best one if it lies inside
the grid, else beyond it. The rate that is chosen is the lowest point of a parabola through log steps against log rate,
so that it is not bound to the grid and does not hang on one noisy trial. A run that did not reach the target counts
with its budget, the least it can have taken, so that the parabola bends away from rates at the edge of what is stable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GRID = (0.5, 1.0, 2.0, 4.0)  # of the suggestion; more above, as rates grow with the global batch
FACTOR = 2.0
NEIGHBOURS = 2.1  # ratio to the best rate up to which rates shape the parabola


@dataclass(frozen=True)
class Tried:
    """A rate's steps, the geometric mean over seeds, and how many of them reached the target."""

    steps: float
    reached: int
    seeds: int

    @property
    def works(self) -> bool:
        """Whether most seeds reached the target."""
        return 2 * self.reached > self.seeds


def judged(steps: Sequence[float | None], budget: float) -> Tried:
    """A rate from its runs; one that did not reach the target counts with the budget.

    >>> judged([20.0, 45.0], budget=60), judged([20.0, None], budget=80)
    (Tried(steps=30.0, reached=2, seeds=2), Tried(steps=40.0, reached=1, seeds=2))
    """
    known = [budget if value is None else value for value in steps]
    mean = round(math.exp(sum(map(math.log, known)) / len(known)), 6)
    return Tried(mean, sum(value is not None for value in steps), len(steps))


def first_rates(suggested: float) -> list[float]:
    """The grid.

    >>> first_rates(0.02)
    [0.01, 0.02, 0.04, 0.08]
    """
    return [rounded(suggested * multiple) for multiple in GRID]


def next_rates(tried: Mapping[float, Tried]) -> list[float]:
    """Two more: on both sides of the best if it is inside, else beyond its end; below where nothing was reached."""
    best = fastest(tried)
    if best is None or best == min(tried):
        return [rounded(min(tried) / FACTOR**2), rounded(min(tried) / FACTOR)]
    if best == max(tried):
        return [rounded(max(tried) * FACTOR), rounded(max(tried) * FACTOR**2)]
    return [rounded(best / math.sqrt(FACTOR)), rounded(best * math.sqrt(FACTOR))]


def fastest(tried: Mapping[float, Tried]) -> float | None:
    """The rate with the fewest steps among those that work; None where none does."""
    working = [(result.steps, rate) for rate, result in tried.items() if result.works]
    return min(working)[1] if working else None


def chosen(tried: Mapping[float, Tried]) -> float | None:
    """The rate at the lowest point of a parabola through the best rate and its neighbours, between those tried."""
    best = fastest(tried)
    if best is None:
        return None
    near = {rate: result.steps for rate, result in tried.items() if max(rate / best, best / rate) <= NEIGHBOURS}
    if len(near) < 3 or best in (min(near), max(near)):
        return best
    square, slope, _ = np.polyfit(np.log([*near]), np.log([*near.values()]), 2)
    if square <= 0:
        return best
    lowest = -slope / (2 * square)
    return rounded(math.exp(min(max(lowest, math.log(min(near))), math.log(max(near)))))


def rounded(rate: float) -> float:
    """Four digits: enough, and the same number in a file's name."""
    return float(f"{rate:.4g}")
