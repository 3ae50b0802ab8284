"""Curves of validation loss by step: where to look, and when a loss is reached.

Steps count on a logarithmic scale throughout: a tenth more steps means the same early and late, at a small and at a
large global batch, so that curves of very different lengths are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Between neighbouring evaluations where the target is expected. With 1.1, the same 40 curves of digits crossed at 34.3
# or at 37.4 steps depending on which steps were looked at: an error of a whole global batch that no seeds take away.
DENSE_RATIO = 1.05
SPARSE_RATIO = 1.5  # and before
DENSE_FROM = 0.25  # of the expected steps
WINDOW = 1.25  # ratio of the last to the first step that are averaged


@dataclass(frozen=True)
class Point:
    """A loss after some steps."""

    step: int
    loss: float


def evaluation_steps(expected: float, last: int) -> tuple[int, ...]:
    """After which steps to evaluate: densely from a quarter of the expected steps, and at the last one.

    >>> evaluation_steps(expected=32, last=10)
    (1, 2, 3, 5, 8, 9, 10)
    """
    steps, step = [], 1
    while step < last:
        steps.append(step)
        ratio = DENSE_RATIO if step >= DENSE_FROM * expected else SPARSE_RATIO
        step = max(step + 1, math.ceil(step * ratio))
    return (*steps, last)


def smoothed(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(log step, loss), each the mean over the evaluations of the last fifth of the steps.

    The mean of both, so that a steady fall in log step is not delayed by averaging.
    """
    found = []
    for number, point in enumerate(points):
        window = [other for other in points[: number + 1] if other.step * WINDOW >= point.step]
        count = len(window)
        found.append((sum(math.log(other.step) for other in window) / count, sum(o.loss for o in window) / count))
    return found


def crossing(points: Sequence[Point], target: float) -> float | None:
    """Steps at which the smoothed loss first reaches the target, between evaluations; None where it never does.

    >>> round(crossing([Point(100, 3.0), Point(200, 1.0)], 2.0), 2)  # half way in log step
    141.42
    """
    before: tuple[float, float] | None = None
    for position, loss in smoothed(points):
        if loss <= target:
            if before is None:
                return math.exp(position)
            share = (before[1] - target) / (before[1] - loss)
            return math.exp(before[0] + share * (position - before[0]))
        before = position, loss
    return None
