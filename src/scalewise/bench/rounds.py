"""Rounds in which everything that is compared takes its turn, as many as time allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

LEAST = 3


def rounds(most: int, seconds: float, least: int = LEAST, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Round numbers: `most` of them, or fewer on a busy machine where `seconds` are spent sooner; `least` at least.

    >>> ticks = iter([0.0, 8.0, 12.0])
    >>> [*rounds(9, 10.0, clock=lambda: next(ticks))]
    [0, 1, 2, 3]
    """
    until = clock() + seconds
    for number in range(most):
        if number >= least and clock() >= until:
            return
        yield number
