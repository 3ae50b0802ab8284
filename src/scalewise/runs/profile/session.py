"""Steps of a training on this process, by turns with and without the profiler: what was noted, and what that cost."""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from scalewise.engine.loop import Training
from scalewise.records import Record, Step
from scalewise.runs.profile.machine import Look, looking
from scalewise.runs.profile.probes import Probes, device_clock
from scalewise.runs.profile.reading import Loader, read_loaders
from scalewise.runs.profile.spans import Lane, Recorder
from scalewise.runs.profile.wire import Flight

Times = list[tuple[float, float]]  # (wall, processor) seconds of steps
Notify = Callable[[str], None]
WARM_UP_STEPS = 3
ROUNDS, FEWEST_ROUNDS = 10, 3  # of each kind
ROUND_SECONDS = 0.25
MOST_STEPS_A_ROUND = 40
TOTAL_SECONDS = 20.0  # fewer rounds where they would take longer


@dataclass(frozen=True)
class StepNotes:
    """One step: its number, its beginning and end, the processor time of this process, and what each thread noted."""

    number: int
    start: float
    stop: float
    processor_seconds: float
    lanes: list[Lane]
    flights: list[Flight]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


@dataclass(frozen=True)
class Notes:
    """Everything that one process noted.

    profiled, plain: wall and processor seconds of the steps of each round, with the profiler and without.
    stretches, looks: from when to when each round with the profiler went, and what the machine did in it.
    """

    process: int
    host: str
    steps: list[StepNotes] = field(default_factory=list)
    profiled: list[Times] = field(default_factory=list)
    plain: list[Times] = field(default_factory=list)
    stretches: list[tuple[float, float]] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    looks: list[list[Look]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)


def observe(training: Training, steps: int | None, notify: Notify) -> Notes:
    """Train some steps and note them.

    Arguments:
        training: entered, and not begun.
        steps: how many to look at; by default as many as give a steady picture.
        notify: told what will be done.
    """
    device = training.team.device
    with tempfile.TemporaryDirectory(prefix="scalewise-") as folder:
        recorder = Recorder(device_clock(device, time.perf_counter))
        probes = Probes(training, recorder, Path(folder))
        notes = Notes(training.team.rank, platform.node(), kinds=probes.layers.kinds())
        walk = _Walk(training, recorder, probes)
        with probes.installed():  # and loader processes begin with the recorder on
            warm = [walk.step().seconds for _ in range(WARM_UP_STEPS + probes.batches_ahead)]
        step_seconds = statistics.median(warm[-WARM_UP_STEPS:])
        rounds, count = _agreed(training, *_plan(step_seconds, steps))
        expected = 2 * rounds * count * step_seconds
        notify(f"{rounds} rounds of {count} steps with the profiler and {count} without, about {expected:.0f} s")
        for number in range(rounds):
            kinds = (_plain_round, _profiled_round)
            for kind in kinds if number % 2 else reversed(kinds):  # none is always first
                kind(walk, notes, count)
        training.strategy.close()
        notes.loaders.extend(read_loaders(Path(folder)))
    return notes


def _plan(step_seconds: float, steps: int | None) -> tuple[int, int]:
    """How many rounds of each kind, and how many steps in each."""
    if steps is not None:
        count = -(-steps // ROUNDS)
        return -(-steps // count), count
    count = min(max(1, round(ROUND_SECONDS / step_seconds)), MOST_STEPS_A_ROUND)
    fitting = int(TOTAL_SECONDS / (2 * count * step_seconds))
    return min(max(fitting, FEWEST_ROUNDS), ROUNDS), count


def _agreed(training: Training, *numbers: int) -> list[int]:
    """The first process's numbers, on all of them."""
    agreed = list(numbers)
    if training.team.size > 1:
        dist.broadcast_object_list(agreed, 0)
    return agreed


class _Walk:
    """Step after step of a training."""

    def __init__(self, training: Training, recorder: Recorder, probes: Probes) -> None:
        self.training, self.probes = training, probes
        self._recorder = recorder
        self._records: Iterator[Record] = training.records()

    def step(self) -> StepNotes:
        """The next step; what happens between steps, as at an epoch's end, is left out."""
        progress = self.training.progress
        while True:
            self._recorder.take()
            before, processor, start = progress.step, time.process_time(), self._recorder.clock()
            record = next(self._records)
            stop, used = self._recorder.clock(), time.process_time() - processor
            if isinstance(record, Step) and progress.step == before + 1:  # the first record tells of two steps
                return StepNotes(progress.step, start, stop, used, self._recorder.take(), self.probes.wire.take())


def _plain_round(walk: _Walk, notes: Notes, count: int) -> None:
    notes.plain.append(_times([walk.step() for _ in range(count)]))


def _profiled_round(walk: _Walk, notes: Notes, count: int) -> None:
    with walk.probes.installed(), looking(walk.training.team.device) as looks:
        began = time.perf_counter()
        steps = [walk.step() for _ in range(count)]
        notes.stretches.append((began, time.perf_counter()))
    notes.steps.extend(steps)
    notes.looks.append(looks)
    notes.profiled.append(_times(steps))


def _times(steps: list[StepNotes]) -> Times:
    return [(step.seconds, step.processor_seconds) for step in steps]
