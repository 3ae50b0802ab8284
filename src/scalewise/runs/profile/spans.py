"""Spans of time, recorded as cheaply as possible while a step runs and put together afterwards."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Result = TypeVar("Result")
Clock = Callable[[], float]  # seconds
LaneKind = Literal["step", "turns", "beside"]
END = None  # the name of an event that ends the span opened last
Event = tuple[float, "Label | None"]


@dataclass(frozen=True, slots=True)
class Label:
    """What a span is of.

    phase: one of the phases, or "" for what belongs to none of them.
    layer: the layer, in forward and backward.
    waits: whether the phase waits in it for another process or thread.
    hidden: whether its time belongs to no phase: another thread works in it, or the profiler itself.
    """

    phase: str
    layer: str | None = None
    waits: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A closed span; those within it are deeper."""

    label: Label
    start: float
    stop: float
    depth: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time that belongs to one span alone: to the innermost one."""

    label: Label
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.stop - self.start


@dataclass(frozen=True)
class Lane:
    """What one thread recorded.

    step: the thread of the step itself. turns: a worker's thread, of which one at a time runs in the step's stead.
    beside: a thread that reads ahead while the step runs.
    """

    kind: LaneKind
    events: list[Event]


class Recorder:
    """Records when spans open and close, in a lane for each thread that has one.

    Spans of other threads go to the lane of the step: they are torch's own threads, which run backward while it waits.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.on = True
        self.clock = clock
        self.forget()

    def open(self, label: Label) -> None:
        """A span begins in this thread."""
        self._lane().append((self.clock(), label))

    def close(self) -> None:
        """The span opened last in this thread ends."""
        self._lane().append((self.clock(), END))

    def around(self, label: Label, function: Callable[..., Result]) -> Callable[..., Result]:
        """The function with a span around every call."""

        @functools.wraps(function)
        def spanned(*arguments: Any, **named: Any) -> Result:  # noqa: ANN401
            if not self.on:
                return function(*arguments, **named)
            self.open(label)
            try:
                return function(*arguments, **named)
            finally:
                self.close()

        return spanned

    def own_lane(self, kind: LaneKind) -> None:
        """Give this thread a lane of its own, unless it is the thread of the step."""
        thread = threading.get_ident()
        if thread not in self._lanes or self._lanes[thread].kind not in ("step", kind):
            self._lanes[thread] = Lane(kind, [])

    def forget(self) -> None:
        """Start again, with this thread as that of the step; also after a fork in the middle of a span."""
        self._main = Lane("step", [])
        self._lanes = {threading.get_ident(): self._main}

    def take(self) -> list[Lane]:
        """What was recorded since the last time, that of the step first; to be called between steps.

        A thread beside the step may be within a span, which is then left for the next time.
        """
        taken = []
        for lane in self._lanes.values():
            count = _closed(lane.events)
            taken.append(Lane(lane.kind, lane.events[:count]))
            del lane.events[:count]
        return taken

    def _lane(self) -> list[Event]:
        return self._lanes.get(threading.get_ident(), self._main).events


def _closed(events: list[Event]) -> int:
    """How many of the events lie before the first span that is still open."""
    depth = closed = 0
    for place, (_, label) in enumerate([*events]):
        depth += 1 if label is not END else -1
        if depth <= 0:
            depth, closed = 0, place + 1
    return closed


def spans(events: Iterable[Event]) -> list[Span]:
    """The closed spans of a lane, in the order in which they opened."""
    found: list[Span | None] = []
    stack: list[tuple[int, float, Label]] = []
    for when, label in events:
        if label is not END:
            stack.append((len(found), when, label))
            found.append(None)
        elif stack:  # else it was opened before recording began
            place, start, opened = stack.pop()
            found[place] = Span(opened, start, when, len(stack))
    return [span for span in found if span is not None]


def segments(events: Iterable[Event]) -> list[Segment]:
    """The time of a lane cut up so that each piece belongs to the innermost span that was open; neighbours are one."""
    found: list[Segment] = []
    stack: list[Label] = []
    since = 0.0
    for when, label in events:
        if stack and when > since:
            _append(found, Segment(stack[-1], since, when))
        if label is not END:
            stack.append(label)
        elif stack:
            stack.pop()
        since = when
    return found


def _append(found: list[Segment], segment: Segment) -> None:
    if found and found[-1].label == segment.label and found[-1].stop == segment.start:
        found[-1] = Segment(segment.label, found[-1].start, segment.stop)
    else:
        found.append(segment)
