"""A trace for Perfetto (ui.perfetto.dev) or chrome://tracing: every span that was noted, as Chrome's trace events.

Processes are training processes, threads within them the step, what it had under way, and its loaders. Times are in
microseconds from the first step. Spans on one thread nest; operations under way may overlap, so they are async events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scalewise.runs.profile.session import Notes
from scalewise.runs.profile.spans import Label, spans

MOST_EVENTS = 60_000  # of one process: about 10 MB, which viewers open at once
STEP_THREAD, BESIDE_THREAD, LOADER_THREADS = 0, 50, 100
TraceEvent = dict[str, Any]


def trace(processes: Sequence[Notes]) -> dict[str, Any]:
    """The whole document."""
    begin = min(notes.steps[0].start for notes in processes)
    one_clock = len({notes.host for notes in processes}) == 1
    events: list[TraceEvent] = []
    for notes in processes:
        zero = begin if one_clock else notes.steps[0].start
        events += _names(notes)
        events += _of_process(notes, zero)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(notes: Notes) -> Iterator[TraceEvent]:
    threads = {STEP_THREAD: "step", BESIDE_THREAD: "reading ahead"}
    threads |= {LOADER_THREADS + loader.number: f"loader {loader.number}" for loader in notes.loaders}
    yield {"ph": "M", "name": "process_name", "pid": notes.process, "args": {"name": f"process {notes.process}"}}
    for thread, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": notes.process, "tid": thread, "args": {"name": name}}


def _of_process(notes: Notes, zero: float) -> list[TraceEvent]:
    """Steps from the first on until there are enough; then counters and loaders of the same time."""
    events: list[TraceEvent] = []
    until = zero
    for step in notes.steps:
        if len(events) > MOST_EVENTS:
            break
        until = step.stop
        events.append(_complete(notes.process, STEP_THREAD, f"step {step.number}", step.start, step.stop, zero))
        for thread, lane in enumerate(step.lanes):
            row = BESIDE_THREAD if lane.kind == "beside" else STEP_THREAD + thread
            events += [
                _complete(notes.process, row, _name(span.label), span.start, span.stop, zero, _details(span.label))
                for span in spans(lane.events)
            ]
        for flight in step.flights:
            assert flight.stop is not None
            common = {"cat": "communication", "id": len(events), "name": flight.name, "pid": notes.process, "tid": 0}
            events += [
                {"ph": phase, "ts": _nanoseconds(when, zero) / 1000, **common}
                for phase, when in (("b", flight.start), ("e", flight.stop))
            ]
    return events + list(_loaders(notes, zero, until)) + list(_counters(notes, zero, until))


def _loaders(notes: Notes, zero: float, until: float) -> Iterator[TraceEvent]:
    for loader in notes.loaders:
        for piece in loader.between(zero, until):
            thread = LOADER_THREADS + loader.number
            yield _complete(notes.process, thread, piece.label.phase, piece.start, piece.stop, zero)


def _counters(notes: Notes, zero: float, until: float) -> Iterator[TraceEvent]:
    for look in (look for one in notes.looks for look in one):
        if zero <= look.seconds <= until:
            values = {"memory": look.memory_bytes / 1e6}
            if look.device_bytes is not None:
                values["device"] = look.device_bytes / 1e6
            yield {
                "ph": "C",
                "name": "memory (MB)",
                "pid": notes.process,
                "ts": _nanoseconds(look.seconds, zero) / 1000,
                "args": values,
            }


def _name(label: Label) -> str:
    if label.hidden:
        return "profiler" if not label.phase else label.phase
    name = label.phase if label.layer is None else f"{label.phase} {label.layer or 'model'}"
    return f"{name} (waiting)" if label.waits else name


def _details(label: Label) -> dict[str, Any]:
    return {"phase": label.phase, "layer": label.layer, "waits": label.waits}


def _complete(
    process: int, thread: int, name: str, start: float, stop: float, zero: float, details: dict[str, Any] | None = None
) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": _nanoseconds(start, zero) / 1000,
        "dur": (_nanoseconds(stop, zero) - _nanoseconds(start, zero)) / 1000,
        "args": details or {},
    }


def _nanoseconds(when: float, zero: float) -> int:
    """Whole ones, so that what lies within a span still does when rounded."""
    return max(0, round((when - zero) * 1e9))
