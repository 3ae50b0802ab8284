"""From which size on sending an operation to a device pays, the way there and back included.

fixed_host + unit_host · work(n)  ≥  fixed_device + unit_device · work(n) + fixed_copy + unit_copy · bytes(n)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scalewise.bench.fits import Cost

POINTS = 400
REACH = 64  # a break-even beyond so many times the largest size that was timed is none


@dataclass(frozen=True)
class BreakEven:
    """The smallest size from which on sending pays; None where it does not pay up to `looked_to`."""

    size: int | None
    extrapolated: bool  # whether it lies outside the sizes that were timed
    looked_to: int


def break_even(
    host: Cost,
    device: Cost,
    copies: Cost | None,
    work: Callable[[int], float],
    moved: Callable[[int], float],
    timed: tuple[int, int],
) -> BreakEven:
    """Where the device begins to be faster for good.

    Arguments:
        host, device: what the operation costs, by its work.
        copies: what carrying costs, by bytes; None where nothing has to be carried.
        work, moved: an operation's work and the bytes to carry, by its size; both rise with it.
        timed: the smallest and the largest size that were timed.
    """

    def gain(size: int) -> float:
        carried = copies.seconds(moved(size)) if copies is not None else 0.0
        return host.seconds(work(size)) - device.seconds(work(size)) - carried

    last = REACH * timed[1]
    sizes = sorted({round(float(size)) for size in np.geomspace(1, last, POINTS)})
    losing = [place for place, size in enumerate(sizes) if gain(size) < 0]
    if not losing:
        return BreakEven(1, timed[0] > 1, last)
    if losing[-1] == len(sizes) - 1:
        return BreakEven(None, False, last)
    low, high = sizes[losing[-1]], sizes[losing[-1] + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return BreakEven(high, not timed[0] <= high <= timed[1], last)
