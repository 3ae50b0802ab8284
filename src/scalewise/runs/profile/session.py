"""Steps of a training on this process, interleaved with and without the profiler, and what the machine did meanwhile.

A thread samples the processor time and the memory of this process while the profiled steps run.
"""

from __future__ import annotations

import functools
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
from scalewise.records import Record, Step
from scalewise.runs.measure.throughput import gpu_share, own_bytes
from scalewise.runs.profile.probes import Flight, Loader, Probes, device_clock, read_loaders
from scalewise.runs.profile.result import Point, Usage
from scalewise.runs.profile.spans import Lane, Recorder

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
    """Everything that one process recorded, the steps by round."""

    process: int
    host: str
    kinds: dict[str, str]  # the class of every layer
    profiled: list[list[StepRecording]] = field(default_factory=list)  # with the profiler
    plain: list[list[StepRecording]] = field(default_factory=list)  # without
    usage_samples: list[list[UsageSample]] = field(default_factory=list)  # what the machine did with the profiler
    loaders: list[Loader] = field(default_factory=list)

    @functools.cached_property
    def steps(self) -> list[StepRecording]:
        """All steps with the profiler."""
        return [step for one in self.profiled for step in one]


def observe(training: Training, steps: int | None) -> Generator[str, None, Recording]:
    """Record some steps of a training that was entered but not begun; by default enough for a steady picture."""
    device = training.team.device
    with tempfile.TemporaryDirectory(prefix="scalewise-") as folder:
        recorder = Recorder(device_clock(device, time.perf_counter))
        probes = Probes(training, recorder, Path(folder))
        recording = Recording(training.team.rank, platform.node(), probes.layers.kinds())
        step = functools.partial(_next_step, training, training.records(), recorder, probes)
        with probes.installed():  # and loader processes begin with the recorder on
            warm = [step().seconds for _ in range(WARM_UP_STEPS + probes.batches_ahead)]
        step_seconds = statistics.median(warm[-WARM_UP_STEPS:])
        agreed = [*_plan(step_seconds, steps)]
        if training.team.size > 1:
            dist.broadcast_object_list(agreed, 0)
        rounds, count = agreed
        expected = 2 * rounds * count * step_seconds
        yield (f"{rounds} rounds of {count} steps with the profiler and {count} without, about {expected:.0f} s")
        for number in range(rounds):
            for profiles in (False, True) if number % 2 else (True, False):  # none is always first
                if not profiles:
                    recording.plain.append([step() for _ in range(count)])
                    continue
                with probes.installed(), sampling(device) as usage_samples:
                    recording.profiled.append([step() for _ in range(count)])
                recording.usage_samples.append(usage_samples)
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


def _next_step(training: Training, records: Iterator[Record], recorder: Recorder, probes: Probes) -> StepRecording:
    """The next step; what happens between steps, as at an epoch's end, is left out."""
    progress = training.progress
    while True:
        recorder.take()
        before, processor, start = progress.step, time.process_time(), recorder.clock()
        record = next(records)
        stop, used = recorder.clock(), time.process_time() - processor
        if isinstance(record, Step) and progress.step == before + 1:  # the first record covers two steps
            return StepRecording(progress.step, start, stop, used, recorder.take(), probes.collectives.take())


SAMPLING_SECONDS = 0.1
SCHEDULER = Path("/proc/self/schedstat")


@dataclass(frozen=True)
class UsageSample:
    """What was seen at one moment."""

    seconds: float
    processor_seconds: float  # of all threads of this process since it began
    queued_seconds: float  # in which its main thread was ready, but had to wait for a core; 0 where Linux is silent
    memory_bytes: int  # its own in main memory
    device_bytes: int | None  # what torch holds on the device
    gpu_share: float | None  # the part of the last moments in which the device computed, where its driver reports it


def sample(device: torch.device) -> UsageSample:
    """Sample the process and its device now."""
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    busy = gpu_share(device) if device.type == "cuda" else None
    queued = int(SCHEDULER.read_text().split()[1]) if SCHEDULER.is_file() else 0  # nanoseconds on a run queue
    return UsageSample(time.perf_counter(), time.process_time(), queued / 1e9, own_bytes(), on_device, busy)


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
