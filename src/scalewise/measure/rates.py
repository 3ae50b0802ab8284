"""The search for the learning rate that takes the fewest steps: the same number of rates at every global batch.

Six rates: a grid of four, a factor 2 apart, around a suggestion; then two more, beside the best one if it lies inside
the grid, else beyond it. The rate that is chosen is the lowest point of a parabola through log steps against log rate,
so that it is not bound to the grid and does not hang on one noisy trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scalewise.recipe import ADAPTIVE, Recipe

Tried = Mapping[float, float | None]  # steps by rate; None where the target was not reached in the trial's budget

GRID = (0.5, 1.0, 2.0, 4.0)  # of the suggestion; more above, as the rule grows less than the best rate may
FACTOR = 2.0
NEIGHBOURS = 2.1  # ratio to the best rate up to which rates shape the parabola


def first_rates(suggested: float) -> list[float]:
    """The grid.

    >>> first_rates(0.02)
    [0.01, 0.02, 0.04, 0.08]
    """
    return [rounded(suggested * multiple) for multiple in GRID]


def next_rates(tried: Tried) -> list[float]:
    """Two more: on both sides of the best if it is inside, else beyond its end; below where nothing was reached.

    >>> next_rates({0.01: 90.0, 0.02: 60.0, 0.04: 70.0, 0.08: None})
    [0.01414, 0.02828]
    >>> next_rates({0.01: 90.0, 0.02: 60.0, 0.04: 50.0, 0.08: 45.0})
    [0.16, 0.32]
    """
    best = fastest(tried)
    if best is None or best == min(tried):
        return [rounded(min(tried) / FACTOR**2), rounded(min(tried) / FACTOR)]
    if best == max(tried):
        return [rounded(max(tried) * FACTOR), rounded(max(tried) * FACTOR**2)]
    return [rounded(best / math.sqrt(FACTOR)), rounded(best * math.sqrt(FACTOR))]


def fastest(tried: Tried) -> float | None:
    """The rate with the fewest steps; None where none reached the target."""
    reached = [(steps, rate) for rate, steps in tried.items() if steps is not None]
    return min(reached)[1] if reached else None


def chosen(tried: Tried) -> float | None:
    """The rate at the lowest point of a parabola through the best rate and its neighbours, between those tried."""
    best = fastest(tried)
    if best is None:
        return None
    near = {rate: steps for rate, steps in tried.items()
            if steps is not None and max(rate / best, best / rate) <= NEIGHBOURS}  # fmt: skip
    if len(near) < 3 or best in (min(near), max(near)):
        return best
    square, slope, _ = np.polyfit(np.log([*near]), np.log([*near.values()]), 2)
    if square <= 0:
        return best
    lowest = -slope / (2 * square)
    return rounded(math.exp(min(max(lowest, math.log(min(near))), math.log(max(near)))))


def at_end(tried: Tried, rate: float) -> bool:
    """Whether the best rate is the least or the largest of those tried, so that one beyond may be better."""
    return rate in (min(tried), max(tried))


def rule_factor(recipe: Recipe, ratio: float) -> float:
    """What the rule of an optimizer multiplies its rate by when the global batch grows by `ratio`."""
    return math.sqrt(ratio) if recipe.optimizer in ADAPTIVE else ratio


def rounded(rate: float) -> float:
    """Four digits: enough, and the same number in a file's name."""
    return float(f"{rate:.4g}")
