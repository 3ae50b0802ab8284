"""Contestants by turns in short rounds, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scalewise import Task
from scalewise.engine.processes.memory import keep_freed_memory
from scalewise.stats.interval import median_interval

ROUND_SECONDS = 0.3
LEAST_STEPS = 3
CALIBRATING_ROUNDS = 4
WARM_UP_STEPS = 3  # at the start of every round, not timed: caches are cold after another contestant's round
WARM_UP_CYCLES = 2
LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Work:
    """What every contestant does per step and process: SGD with momentum on `batch` samples held in memory."""

    task: Task
    batch: int
    threads: int

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Images as bytes, (sample, channel, row, column), and labels."""
        return self.task.train

    def model(self) -> nn.Module:
        """The task's model, in the memory format in which convolutions are fast on CPUs."""
        torch.manual_seed(0)
        return self.task.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The task's loss."""
        assert self.task.loss is not None
        return self.task.loss(output, target)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The same for all."""
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Seconds(NamedTuple):
    """By the clock on the wall, and those in which this process was computing."""

    wall: float
    cpu: float


def now() -> Seconds:
    """Since some moment in the past."""
    return Seconds(time.perf_counter(), time.process_time())


def per_step(started: Seconds, ended: Seconds, steps: int) -> Seconds:
    """What one of the steps between two moments took."""
    return Seconds(*((end - start) / steps for start, end in zip(started, ended, strict=True)))


def images(batch: Tensor) -> Tensor:
    """A batch in the model's memory format."""
    return batch.to(memory_format=torch.channels_last)


Round = Callable[[int], Seconds]  # takes so many steps, says how long one took
Ready = Callable[[Work], AbstractContextManager[Round]]


@dataclass(frozen=True)
class Contestant:
    """A way to train: its name, what it does in one line, how to get ready for rounds, and the module it needs."""

    name: str
    what: str
    ready: Ready
    needs: str = "torch"


@dataclass
class Measured:
    """Seconds per step of every contestant's rounds, or why it has none."""

    steps: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, seconds: Seconds) -> None:
        """Note a round."""
        self.seconds.setdefault(name, []).append(seconds.wall)
        self.cpu_seconds.setdefault(name, []).append(seconds.cpu)


def ratios(seconds: Mapping[str, list[float]], name: str, baseline: str) -> list[float]:
    """Round by round, what a step took relative to the baseline's in the same cycle."""
    return [mine / its for mine, its in zip(seconds[name], seconds[baseline], strict=True)]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([1.0, 2.0, 4.0])
    Spread(median=2.0, low=1.5, high=3.0, n=3)
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def middle(values: Sequence[float]) -> Spread:
    """The median and its 95 % interval.

    >>> middle([float(value) for value in range(1, 12)])
    Spread(median=6.0, low=2.0, high=10.0, n=11)
    """
    return Spread(statistics.median(values), *median_interval(values), len(values))


def endless(steps: Callable[[Work], Iterator[None]]) -> Ready:
    """Rounds of a loop written as a generator that trains for ever and yields after each step."""

    @contextmanager
    def ready(work: Work) -> Iterator[Round]:
        running = steps(work)

        def round(count: int) -> Seconds:
            for _ in range(WARM_UP_STEPS):
                next(running)
            started = now()
            for _ in range(count):
                next(running)
            return per_step(started, now(), count)

        yield round
        running.close()  # type: ignore[attr-defined]

    return ready


def interleave(
    contestants: Sequence[Contestant], work: Work, cycles: int, slowest: Callable[[float], float] = lambda own: own
) -> Measured:
    """All contestants by turns: each cycle starts one place further on, so that none is always first.

    Arguments:
        contestants: the first one decides how many steps make a round, for all.
        work: what they do.
        cycles: how many count, after some that do not.
        slowest: the largest of all processes' values; called by all, so that rounds start together.
    """
    keep_freed_memory()  # scalewise does; here it helps all alike, and nobody pays for how the shared heap lies
    with ExitStack() as stack:
        failures: dict[str, str] = {}
        rounds: dict[str, Round] = {}
        for contestant in contestants:
            with noting(failures, contestant.name):
                rounds[contestant.name] = stack.enter_context(contestant.ready(work))
        measured = Measured(_steps(rounds, contestants[0].name, work.threads, slowest, failures), failures=failures)
        gc.collect()
        gc.freeze()  # what is here stays: collecting between rounds then takes no time
        stack.callback(gc.unfreeze)
        for cycle in range(WARM_UP_CYCLES + cycles):
            for name in _turned([contestant.name for contestant in contestants], cycle):
                if name in failures:
                    continue
                with noting(failures, name):
                    seconds = _round(rounds[name], measured.steps, work.threads, slowest)
                    if cycle >= WARM_UP_CYCLES:
                        measured.add(name, seconds)
    return measured


def _steps(
    rounds: Mapping[str, Round], first: str, threads: int, slowest: Callable[[float], float], failures: dict[str, str]
) -> int:
    if first in failures:
        raise RuntimeError(f"{first} failed, and nothing can be compared without it: {failures[first]}")
    tries = [_round(rounds[first], LEAST_STEPS, threads, slowest).wall for _ in range(CALIBRATING_ROUNDS)]
    return max(LEAST_STEPS, round(ROUND_SECONDS / min(tries)))


def _round(round: Round, steps: int, threads: int, slowest: Callable[[float], float]) -> Seconds:
    gc.collect()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)  # as it is unless somebody asks; scalewise does, in its own rounds
    slowest(0.0)
    seconds = round(steps)
    return Seconds(slowest(seconds.wall), seconds.cpu)


def _turned(names: list[str], cycle: int) -> list[str]:
    start = cycle % len(names)
    return names[start:] + names[:start]


def pooled(parts: Sequence[Measured]) -> Measured:
    """All rounds of several measurements, in which everything was built anew and lay elsewhere in memory."""
    whole = Measured(parts[0].steps)
    for part in parts:
        whole.failures |= part.failures
        for name, seconds in part.seconds.items():
            whole.seconds.setdefault(name, []).extend(seconds)
            whole.cpu_seconds.setdefault(name, []).extend(part.cpu_seconds[name])
    for name in whole.failures:
        whole.seconds.pop(name, None)
    return whole


@contextmanager
def noting(failures: dict[str, str], name: str) -> Iterator[None]:
    """Go on after a failure, with its reason on record."""
    try:
        yield
    except ModuleNotFoundError as error:
        failures[name] = f"not installed ({error.name})"
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        failures[name] = f"{type(error).__name__}: {line}"[:200]
