"""From looks at the machine to its use: processor shares, memory, and both over time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from scalewise.profiling.machine import Look
from scalewise.profiling.profile import Point, Usage

MOST_POINTS = 200
Rounds = Sequence[Sequence[Look]]


def usage(rounds: Rounds) -> Usage:
    """The use of the machine in some rounds of steps."""
    looks = [look for one in rounds for look in one]
    on_device = [look.device_bytes for look in looks if look.device_bytes is not None]
    shares = [look.gpu_share for look in looks if look.gpu_share is not None]
    used = sum(one[-1].processor_seconds - one[0].processor_seconds for one in rounds)
    passed = sum(one[-1].seconds - one[0].seconds for one in rounds)
    begin = looks[0].seconds
    queued = [one[-1].queued_seconds - one[0].queued_seconds for one in rounds]
    memory = [Point(look.seconds - begin, look.device_bytes or look.memory_bytes) for look in looks]
    return Usage(
        processor_share=used / passed,
        queued_share=sum(queued) / passed,
        device_share=statistics.fmean(shares) if shares else None,
        memory_bytes=max(look.memory_bytes for look in looks),
        device_bytes=max(on_device) if on_device else None,
        processor_over_time=_thinned([*_processor_shares(rounds, begin)]),
        memory_over_time=_thinned(memory),
    )


def _processor_shares(rounds: Rounds, begin: float) -> Iterator[Point]:
    """Processor time ÷ wall time from look to look."""
    for one in rounds:
        for before, after in itertools.pairwise(one):
            passed = after.seconds - before.seconds
            if passed > 0:
                yield Point(after.seconds - begin, (after.processor_seconds - before.processor_seconds) / passed)


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most so many of them, evenly."""
    stride = -(-len(points) // MOST_POINTS)
    return tuple(points[:: max(1, stride)])
