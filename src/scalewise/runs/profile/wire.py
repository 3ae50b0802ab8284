"""Communication as a phase: torch's collectives with spans around them, and how long each was under way.

What was under way while the process did something else is hidden; what it waited for is not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from scalewise.runs.profile.spans import Label, Recorder

STARTS, WAITS = Label("communication"), Label("communication", waits=True)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce",
    "broadcast",
    "barrier",
)
BETWEEN_TWO = ("isend", "irecv")  # which never wait, and do not tell when they are done


@dataclass
class Flight:
    """One operation under way: from its start to its end."""

    name: str
    start: float
    stop: float | None = None


class _Watched:
    """torch's handle of an operation, with a span around waiting for it."""

    def __init__(self, work: dist.Work, flight: Flight, recorder: Recorder) -> None:
        self._work, self._flight = work, flight
        self._wait = recorder.around(WAITS, work.wait)
        if flight.name not in BETWEEN_TWO:
            work.get_future().add_done_callback(self._land)

    def _land(self, future: object) -> None:
        self._flight.stop = self._flight.stop or time.perf_counter()

    def wait(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Until it is done."""
        done = self._wait(*arguments)
        self._land(None)
        return done

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._work, name)


class Wire:
    """The operations of this process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._flights: list[Flight] = []

    def take(self) -> list[Flight]:
        """Those that have ended since the last time."""
        ended = [flight for flight in self._flights if flight.stop is not None]
        self._flights = [flight for flight in self._flights if flight.stop is None]
        return ended

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """The context in which every operation of torch.distributed is noted."""
        names = [name for name in (*COLLECTIVES, *BETWEEN_TWO) if hasattr(dist, name)]
        before = {name: getattr(dist, name) for name in names}
        for name, function in before.items():
            setattr(dist, name, self._noted(name, function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(dist, name, function)

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            flight = Flight(name, time.perf_counter())
            self._flights.append(flight)
            goes_on = name in BETWEEN_TWO or named.get("async_op", False)
            work = self._recorder.around(STARTS if goes_on else WAITS, function)(*arguments, **named)
            if goes_on and work is not None:
                return _Watched(work, flight, self._recorder)
            flight.stop = time.perf_counter()
            return work

        return noted
