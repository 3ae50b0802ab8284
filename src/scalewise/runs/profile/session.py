"""Steps of a training on this process, interleaved with and without the profiler, and what the machine did meanwhile.

A thread samples the processor time and the memory of this process while the profiled steps run.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from scalewise.engine.loop import Training
from scalewise.engine.processes.memory import STATUS, held
from scalewise.records import Record, Step
from scalewise.runs.profile.probes import Flight, Loader, Probes, device_clock, read_loaders
from scalewise.runs.profile.result import Point, Usage
from scalewise.runs.profile.spans import Lane, Recorder

Times = list[tuple[float, float]]  # (wall, processor) seconds of steps
WARM_UP_STEPS = 3
ROUNDS, FEWEST_ROUNDS = 10, 3  # of each kind
ROUND_SECONDS = 0.25
MOST_STEPS_A_ROUND = 40
TOTAL_SECONDS = 20.0  # fewer rounds where they would take longer


@dataclass(frozen=True)
class StepRecording:
    """One step: its number, begin and end, the processor time of this process, and what each thread recorded."""

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
class Recording:
    """Everything that one process recorded.

    profiled, plain: wall and processor seconds of the steps of each round, with the profiler and without.
    intervals, usage_samples: from when to when each round with the profiler went, and what the machine did in it.
    """

    process: int
    host: str
    steps: list[StepRecording] = field(default_factory=list)
    profiled: list[Times] = field(default_factory=list)
    plain: list[Times] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    usage_samples: list[list[UsageSample]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)


def observe(training: Training, steps: int | None) -> Generator[str, None, Recording]:
    """Train some steps and note them.

    Arguments:
        training: entered, and not begun.
        steps: how many to look at; by default enough for a steady picture.
    """
    device = training.team.device
    with tempfile.TemporaryDirectory(prefix="scalewise-") as folder:
        recorder = Recorder(device_clock(device, time.perf_counter))
        probes = Probes(training, recorder, Path(folder))
        recording = Recording(training.team.rank, platform.node(), kinds=probes.layers.kinds())
        stepper = _Stepper(training, recorder, probes)
        with probes.installed():  # and loader processes begin with the recorder on
            warm = [stepper.step().seconds for _ in range(WARM_UP_STEPS + probes.batches_ahead)]
        step_seconds = statistics.median(warm[-WARM_UP_STEPS:])
        rounds, count = _agreed(training, *_plan(step_seconds, steps))
        expected = 2 * rounds * count * step_seconds
        yield (f"{rounds} rounds of {count} steps with the profiler and {count} without, about {expected:.0f} s")
        for number in range(rounds):
            kinds = (_plain_round, _profiled_round)
            for kind in kinds if number % 2 else reversed(kinds):  # none is always first
                kind(stepper, recording, count)
        training.strategy.feed.close()
        recording.loaders.extend(read_loaders(Path(folder)))
    return recording


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


class _Stepper:
    """Step after step of a training."""

    def __init__(self, training: Training, recorder: Recorder, probes: Probes) -> None:
        self.training, self.probes = training, probes
        self._recorder = recorder
        self._records: Iterator[Record] = training.records()

    def step(self) -> StepRecording:
        """The next step; what happens between steps, as at an epoch's end, is left out."""
        progress = self.training.progress
        while True:
            self._recorder.take()
            before, processor, start = progress.step, time.process_time(), self._recorder.clock()
            record = next(self._records)
            stop, used = self._recorder.clock(), time.process_time() - processor
            if isinstance(record, Step) and progress.step == before + 1:  # the first record covers two steps
                return StepRecording(
                    progress.step, start, stop, used, self._recorder.take(), self.probes.collectives.take()
                )


def _plain_round(stepper: _Stepper, recording: Recording, count: int) -> None:
    recording.plain.append(_times([stepper.step() for _ in range(count)]))


def _profiled_round(stepper: _Stepper, recording: Recording, count: int) -> None:
    with stepper.probes.installed(), sampling(stepper.training.team.device) as usage_samples:
        began = time.perf_counter()
        steps = [stepper.step() for _ in range(count)]
        recording.intervals.append((began, time.perf_counter()))
    recording.steps.extend(steps)
    recording.usage_samples.append(usage_samples)
    recording.profiled.append(_times(steps))


def _times(steps: list[StepRecording]) -> Times:
    return [(step.seconds, step.processor_seconds) for step in steps]


SAMPLING_SECONDS = 0.1
SCHEDULER = Path("/proc/self/schedstat")


@dataclass(frozen=True)
class UsageSample:
    """What was seen at one moment.

    processor_seconds: of all threads of this process since it began.
    queued_seconds: in which its main thread could have continued, but had to wait for a core; 0 where Linux is silent.
    memory_bytes: its own in main memory, and what torch holds on the device.
    gpu_share: the part of the last moments in which the device computed, where its driver reports it.
    """

    seconds: float
    processor_seconds: float
    queued_seconds: float
    memory_bytes: int
    device_bytes: int | None
    gpu_share: float | None


def sample(device: torch.device) -> UsageSample:
    """Sample the process and its device now."""
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    own = held().own if STATUS.is_file() else 0
    return UsageSample(time.perf_counter(), time.process_time(), _queued(), own, on_device, _gpu_share(device))


def _queued() -> float:
    """The second number of schedstat: nanoseconds on a run queue."""
    return int(SCHEDULER.read_text().split()[1]) / 1e9 if SCHEDULER.is_file() else 0.0


def _gpu_share(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):  # NVIDIA's management library is missing
        return None


@contextmanager
def sampling(device: torch.device) -> Iterator[list[UsageSample]]:
    """The context in which a thread adds what it sees to the list, which begins and ends with the context."""
    ended = threading.Event()
    usage_samples = [sample(device)]

    def keep_sampling() -> None:
        while not ended.wait(SAMPLING_SECONDS):
            usage_samples.append(sample(device))

    thread = threading.Thread(target=keep_sampling, daemon=True)
    thread.start()
    try:
        yield usage_samples
    finally:
        ended.set()
        thread.join()
        usage_samples.append(sample(device))


MOST_POINTS = 200
Rounds = Sequence[Sequence[UsageSample]]


def usage(rounds: Rounds) -> Usage:
    """The use of the machine in some rounds of steps."""
    usage_samples = [sample for one in rounds for sample in one]
    on_device = [sample.device_bytes for sample in usage_samples if sample.device_bytes is not None]
    shares = [sample.gpu_share for sample in usage_samples if sample.gpu_share is not None]
    used = sum(one[-1].processor_seconds - one[0].processor_seconds for one in rounds)
    passed = sum(one[-1].seconds - one[0].seconds for one in rounds)
    begin = usage_samples[0].seconds
    queued = [one[-1].queued_seconds - one[0].queued_seconds for one in rounds]
    memory = [Point(sample.seconds - begin, sample.device_bytes or sample.memory_bytes) for sample in usage_samples]
    return Usage(
        processor_share=used / passed,
        queued_share=sum(queued) / passed,
        device_share=statistics.fmean(shares) if shares else None,
        memory_bytes=max(sample.memory_bytes for sample in usage_samples),
        device_bytes=max(on_device) if on_device else None,
        processor_over_time=_thinned([*_processor_shares(rounds, begin)]),
        memory_over_time=_thinned(memory),
    )


def _processor_shares(rounds: Rounds, begin: float) -> Iterator[Point]:
    """Processor time ÷ wall time from sample to sample."""
    for one in rounds:
        for before, after in itertools.pairwise(one):
            passed = after.seconds - before.seconds
            if passed > 0:
                yield Point(after.seconds - begin, (after.processor_seconds - before.processor_seconds) / passed)


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS of them, evenly."""
    stride = -(-len(points) // MOST_POINTS)
    return tuple(points[:: max(1, stride)])
