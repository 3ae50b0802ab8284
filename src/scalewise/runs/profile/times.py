"""From what processes recorded to seconds per phase and layer of an average step, and to a trace.

The trace is for Perfetto (ui.perfetto.dev) or chrome://tracing: every recorded span as one of Chrome's trace events.
Processes are training processes; their threads are the step, what it had in flight, and its loaders. Times are in
microseconds from the first step. Spans on one thread nest; operations in flight may overlap, so they are async events.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scalewise.runs.profile.probes import Loader
from scalewise.runs.profile.result import OTHER, PHASES, Communication, InFlight, LayerRow, PhaseRow, Piece
from scalewise.runs.profile.session import Recording, StepRecording
from scalewise.runs.profile.spans import Label, Segment, segments, spans

Seconds = defaultdict[str, float]  # by phase
Interval = tuple[float, float]
FINEST = 400  # pieces of the drawn step that are shorter than this part of it join their neighbour


def middle_steps(walls: dict[int, float]) -> list[int]:
    """The half of the steps around the median: neither the disturbed ones nor the lucky ones."""
    ordered = sorted(walls, key=lambda number: walls[number])
    cut = len(ordered) // 4
    return sorted(ordered[cut : len(ordered) - cut])


def within(step: StepRecording) -> list[Segment]:
    """What the step did itself, in order: its own thread, or those that took turns in its stead."""
    found = [piece for lane in step.lanes if lane.kind != "beside" for piece in segments(lane.events)]
    return sorted((piece for piece in found if not piece.label.hidden), key=lambda piece: piece.start)


def hidden_seconds(step: StepRecording) -> float:
    """What the profiler took for itself on the step's own thread."""
    return sum(piece.seconds for lane in step.lanes[:1] for piece in segments(lane.events) if piece.label.hidden)


def phase_rows(steps: Sequence[StepRecording], beside: Seconds) -> tuple[float, tuple[PhaseRow, ...]]:
    """The wall time of an average step without the profiler's own, and its phases, with what was worked beside them."""
    worked: Seconds = defaultdict(float)
    waited: Seconds = defaultdict(float)
    for step in steps:
        for piece in within(step):
            (waited if piece.label.waits else worked)[piece.label.phase] += piece.seconds / len(steps)
    wall = statistics.fmean(step.seconds - hidden_seconds(step) for step in steps)
    worked[OTHER] = max(0.0, wall - sum(worked.values()) - sum(waited.values()))
    return wall, tuple(
        PhaseRow(
            name=name,
            worked_seconds=worked[name] + beside[name],
            waited_seconds=waited[name],
            beside_seconds=beside[name],
            share=(worked[name] + waited[name]) / wall,
        )
        for name in (*PHASES, OTHER)
    )


def beside_steps(recording: Recording) -> Seconds:
    """Seconds per step that were worked beside the steps, by phase: in loader processes and reading threads.

    Loaders read ahead, so what they do during a step may be for a later one: the average batch counts, as often as a
    step asks for one.
    """
    found: Seconds = defaultdict(float)
    labels = [label for step in recording.steps for lane in step.lanes for _, label in lane.events]
    asked = sum(label is not None and label.phase == "queue" for label in labels) / len(recording.steps)
    batches = [batch for loader in recording.loaders for batch in loader.batches]
    for piece in (piece for batch in batches for piece in batch):
        found[piece.label.phase] += asked * piece.seconds / len(batches)
    for step in recording.steps:
        for lane in step.lanes:
            for piece in segments(lane.events) if lane.kind == "beside" else ():
                found[piece.label.phase] += piece.seconds / len(recording.steps)
    return found


def busy_share(loader: Loader, recording: Recording) -> float:
    """The part of the profiled rounds in which a loader process read."""
    rounds = [(steps[0].start, steps[-1].stop) for steps in recording.profiled]
    return sum(piece.seconds for ends in rounds for piece in loader.between(*ends)) / _length(rounds)


def mean_phases(rows: Sequence[Sequence[PhaseRow]], wall: float) -> tuple[PhaseRow, ...]:
    """The phases of the processes' average."""
    return tuple(
        PhaseRow(
            name=same[0].name,
            worked_seconds=statistics.fmean(row.worked_seconds for row in same),
            waited_seconds=statistics.fmean(row.waited_seconds for row in same),
            beside_seconds=statistics.fmean(row.beside_seconds for row in same),
            share=statistics.fmean(row.step_seconds for row in same) / wall,
        )
        for same in zip(*rows, strict=True)
    )


def layer_rows(steps: Sequence[StepRecording], kinds: dict[str, str], wall: float) -> tuple[LayerRow, ...]:
    """The layers that have time of their own, in the model's order, averaged over steps of all processes."""
    found: dict[str, Seconds] = {}
    for step in steps:
        for piece in within(step):
            if piece.label.layer is not None:
                found.setdefault(piece.label.layer, defaultdict(float))[piece.label.phase] += piece.seconds / len(steps)
    return tuple(
        LayerRow(name or "model", kind, total := sum(times.values()), times["forward"], times["backward"], total / wall)
        for name, kind in kinds.items()
        if (times := found.get(name)) is not None
    )


def communication(steps: Sequence[StepRecording]) -> Communication:
    """What was in flight in an average step, and how much of it was hidden."""
    rows = [_communication_of(step) for step in steps]
    return Communication(*(statistics.fmean(column) for column in zip(*rows, strict=True)))


def _communication_of(step: StepRecording) -> tuple[float, ...]:
    in_flight = union([(start, stop) for _, start, stop in flights_within(step)])
    pieces = within(step)
    communicating = [piece for piece in pieces if piece.label.phase == "communication"]
    visible = union([(piece.start, piece.stop) for piece in communicating])
    backward = union([(piece.start, piece.stop) for piece in pieces if piece.label.phase == "backward"])
    flying = _length(in_flight)
    return (
        len(step.flights),
        flying,
        sum(piece.seconds for piece in communicating if piece.label.waits),
        flying - _length(overlap(in_flight, visible)),
        _length(overlap(in_flight, backward)),
    )


def flights_within(step: StepRecording) -> list[tuple[str, float, float]]:
    """What was in flight in the step, and from when to when: a step's numbers, for one, are read in the next one."""
    found = [(flight.name, flight.start, flight.stop) for flight in step.flights if flight.stop is not None]
    cut = [(name, max(start, step.start), min(stop, step.stop)) for name, start, stop in found]
    return [(name, start, stop) for name, start, stop in cut if start < stop]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that do not overlap and cover the same.

    >>> union([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common.

    >>> overlap([(0, 3), (5, 6)], [(2, 5.5)])
    [(2, 3), (5, 5.5)]
    """
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, stop) for start, stop in pairs if start < stop]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def drawn_step(processes: Sequence[Recording], chosen: Sequence[int]) -> tuple[tuple[Piece, ...], tuple[InFlight, ...]]:
    """The most usual of the chosen steps, on every process, with what its loaders did meanwhile."""
    number = most_usual(processes, chosen)
    same = [next(step for step in recording.steps if step.number == number) for recording in processes]
    one_clock = len({recording.host for recording in processes}) == 1
    begin = min(step.start for step in same)
    pieces: list[Piece] = []
    flights: list[InFlight] = []
    for recording, step in zip(processes, same, strict=True):
        zero = begin if one_clock else step.start
        lane = str(recording.process)
        shortest = step.seconds / FINEST
        pieces += [_piece(lane, piece, zero) for piece in coalesced(within(step), shortest)]
        for loader in recording.loaders:
            done = coalesced(loader.between(step.start, step.stop), shortest)
            pieces += [_piece(f"{lane} loader {loader.number}", piece, zero) for piece in done]
        flights += [InFlight(lane, name, start - zero, stop - start) for name, start, stop in flights_within(step)]
    return tuple(pieces), tuple(flights)


def most_usual(processes: Sequence[Recording], chosen: Sequence[int]) -> int:
    """The step whose seconds by process and phase are nearest to the average ones."""
    seconds: dict[int, Seconds] = {number: defaultdict(float) for number in chosen}
    mean: Seconds = defaultdict(float)
    for recording in processes:
        for step in recording.steps:
            for piece in within(step) if step.number in seconds else ():
                key = f"{recording.process} {piece.label.phase}"
                seconds[step.number][key] += piece.seconds
                mean[key] += piece.seconds / len(chosen)

    def distance(number: int) -> float:
        return sum(abs(seconds[number][key] - value) for key, value in mean.items())

    return min(chosen, key=distance)


def coalesced(pieces: Iterable[Segment], shortest: float) -> list[Segment]:
    """The same pieces, those too short to be seen joined to the one before."""
    found: list[Segment] = []
    for piece in pieces:
        near = bool(found) and piece.start - found[-1].stop < shortest
        if near and (piece.label == found[-1].label or piece.seconds < shortest):
            found[-1] = Segment(found[-1].label, found[-1].start, piece.stop)
        elif near and found[-1].seconds < shortest:
            found[-1] = Segment(piece.label, found[-1].start, piece.stop)
        else:
            found.append(piece)
    return found


def _piece(lane: str, piece: Segment, zero: float) -> Piece:
    label = piece.label
    worked, waited = (0.0, piece.seconds) if label.waits else (piece.seconds, 0.0)
    layer = "model" if label.layer == "" else label.layer
    return Piece(lane, label.phase, layer, piece.start - zero, worked, waited)


MOST_EVENTS = 60_000  # of one process: about 10 MB, which viewers open at once
STEP_THREAD, BESIDE_THREAD, LOADER_THREADS = 0, 50, 100
TraceEvent = dict[str, Any]


def trace(processes: Sequence[Recording]) -> dict[str, Any]:
    """The whole document."""
    begin = min(recording.steps[0].start for recording in processes)
    one_clock = len({recording.host for recording in processes}) == 1
    events: list[TraceEvent] = []
    for recording in processes:
        zero = begin if one_clock else recording.steps[0].start
        own = [*_names(recording), *_of_process(recording, zero)]
        events += [{**event, "pid": recording.process} for event in own]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(recording: Recording) -> Iterator[TraceEvent]:
    threads = {STEP_THREAD: "step", BESIDE_THREAD: "reading ahead"}
    threads |= {LOADER_THREADS + loader.number: f"loader {loader.number}" for loader in recording.loaders}
    yield {"ph": "M", "name": "process_name", "args": {"name": f"process {recording.process}"}}
    for thread, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}


def _of_process(recording: Recording, zero: float) -> list[TraceEvent]:
    """Steps from the first on until there are enough; then counters and loaders of the same time."""
    events: list[TraceEvent] = []
    until = zero
    for step in recording.steps:
        if len(events) > MOST_EVENTS:
            break
        until = step.stop
        events.append(_complete(STEP_THREAD, f"step {step.number}", step.start, step.stop, zero))
        for thread, lane in enumerate(step.lanes):
            row = BESIDE_THREAD if lane.kind == "beside" else STEP_THREAD + thread
            for span in spans(lane.events):
                details = {name: getattr(span.label, name) for name in ("phase", "layer", "waits")}
                events.append(_complete(row, _name(span.label), span.start, span.stop, zero, details))
        for flight in step.flights:
            assert flight.stop is not None
            common = {"cat": "communication", "id": len(events), "name": flight.name, "tid": STEP_THREAD}
            events += [
                {"ph": phase, "ts": _nanoseconds(when, zero) / 1000, **common}
                for phase, when in (("b", flight.start), ("e", flight.stop))
            ]
    for loader in recording.loaders:
        thread = LOADER_THREADS + loader.number
        for piece in loader.between(zero, until):
            events.append(_complete(thread, piece.label.phase, piece.start, piece.stop, zero))
    return [*events, *_counters(recording, zero, until)]


def _counters(recording: Recording, zero: float, until: float) -> Iterator[TraceEvent]:
    for sample in (sample for one in recording.usage_samples for sample in one):
        if zero <= sample.seconds <= until:
            values = {"memory": sample.memory_bytes / 1e6}
            if sample.device_bytes is not None:
                values["device"] = sample.device_bytes / 1e6
            yield {"ph": "C", "name": "memory (MB)", "ts": _nanoseconds(sample.seconds, zero) / 1000, "args": values}


def _name(label: Label) -> str:
    if label.hidden:
        return "profiler" if not label.phase else label.phase
    name = label.phase if label.layer is None else f"{label.phase} {label.layer or 'model'}"
    return f"{name} (waiting)" if label.waits else name


def _complete(
    thread: int, name: str, start: float, stop: float, zero: float, details: dict[str, Any] | None = None
) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "tid": thread,
        "ts": _nanoseconds(start, zero) / 1000,
        "dur": (_nanoseconds(stop, zero) - _nanoseconds(start, zero)) / 1000,
        "args": details or {},
    }


def _nanoseconds(when: float, zero: float) -> int:
    """Whole ones, so that what lies within a span still does when rounded."""
    return max(0, round((when - zero) * 1e9))
