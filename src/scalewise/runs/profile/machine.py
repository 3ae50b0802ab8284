"""The processor time and the memory of this process as a profile goes on, looked at by a thread from time to time."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from scalewise.engine.processes.memory import STATUS, held
from scalewise.runs.profile.profile import Point, Usage

LOOK_SECONDS = 0.1
SCHEDULER = Path("/proc/self/schedstat")


@dataclass(frozen=True)
class Look:
    """What was seen at one moment.

    processor_seconds: of all threads of this process since it began.
    queued_seconds: in which its main thread could have gone on, but had to wait for a core; 0 where Linux is silent.
    memory_bytes: its own in main memory, and what torch holds on the device.
    gpu_share: the part of the last moments in which the device computed, where its driver tells.
    """

    seconds: float
    processor_seconds: float
    queued_seconds: float
    memory_bytes: int
    device_bytes: int | None
    gpu_share: float | None


def look(device: torch.device) -> Look:
    """See what there is to see now."""
    on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    own = held().own if STATUS.is_file() else 0
    return Look(time.perf_counter(), time.process_time(), _queued(), own, on_device, _gpu_share(device))


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
def looking(device: torch.device) -> Iterator[list[Look]]:
    """The context in which a thread adds what it sees to the list, which begins and ends with the context."""
    ended = threading.Event()
    looks = [look(device)]

    def keep_looking() -> None:
        while not ended.wait(LOOK_SECONDS):
            looks.append(look(device))

    thread = threading.Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        ended.set()
        thread.join()
        looks.append(look(device))


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
