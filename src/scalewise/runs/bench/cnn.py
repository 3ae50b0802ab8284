"""The training of a built-in CNN on each device here: a step, the time to an equal loss, and how busy the device is."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.recipe import Recipe
from scalewise.records import Epoch, Record, Step
from scalewise.runs.bench.operations import Place
from scalewise.runs.request import Notify
from scalewise.stats.interval import median_interval
from scalewise.stats.timing import rounds
from scalewise.tasks.digits import digits
from scalewise.tasks.task import Task

EPOCHS = 2.0  # whose mean loss is the one to reach
MOST_EPOCHS = 6.0
MOST_ROUNDS = 9
CLOSE = 1.01  # kernels differ between devices, so losses do in their last digits
SAMPLES = 12  # of the utilisation over time


@dataclass(frozen=True)
class Trained:
    """Trainings on one device; medians over rounds, intervals of 95 %.

    seconds_to_loss: until an epoch's training loss was no more than `target_loss`; None where it never was.
    utilisation: share of its threads' time in which this process computed or, on CUDA, of the time that the GPU worked;
        None where the device does not report it.
    utilisation_over_time: the same by parts of the last training.
    """

    task: str
    device: str
    threads: int
    worker_batch: int
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    samples_per_second: float
    target_loss: float
    seconds_to_loss: float | None
    steps_to_loss: int | None
    utilisation: float | None
    utilisation_over_time: tuple[float, ...]
    rounds: int


@dataclass(frozen=True)
class _Run:
    """One training: when it reached the loss, and the clock and the busy seconds at every step."""

    seconds_to_loss: float | None
    steps_to_loss: int | None
    clock: list[float]
    busy: list[float]

    @property
    def step_seconds(self) -> float:
        return statistics.median(after - before for before, after in itertools.pairwise(self.clock))

    def utilisation(self, parts: int) -> tuple[float, ...]:
        """Busy share by parts of the training."""
        marks = [round(part * (len(self.clock) - 1) / parts) for part in range(parts + 1)]
        pairs = [(first, last) for first, last in itertools.pairwise(marks) if last > first]
        return tuple(
            (self.busy[last] - self.busy[first]) / (self.clock[last] - self.clock[first]) for first, last in pairs
        )


def trained(found: Sequence[Place], seconds: float, notify: Notify) -> tuple[Trained, ...]:
    """Train on every device, in interleaved rounds; the loss to reach is that of the first one after a few epochs."""
    task = digits()
    target = _target(task, found[0])
    runs: dict[Place, list[_Run]] = {place: [] for place in found}
    for number in rounds(MOST_ROUNDS, seconds, least=1):
        notify(f"devices: training, round {number + 1}")
        for place in found:
            runs[place].append(_run(task, place, target))
    return tuple(_summary(task, place, runs[place], target) for place in found)


def _recipe(task: Task, place: Place, epochs: float) -> Recipe:
    return task.recipe.replace(threads=place.threads, epochs=epochs)


def _records(task: Task, place: Place, epochs: float) -> Iterator[Record]:
    with Training(task, _recipe(task, place, epochs), Placement(device=place.device), alone=True) as training:
        yield from training.records()


def _target(task: Task, place: Place) -> float:
    """The mean loss over the last epoch."""
    losses = [record.train["loss"] for record in _records(task, place, EPOCHS) if isinstance(record, Epoch)]
    return losses[-1]


def _run(task: Task, place: Place, target: float) -> _Run:
    """Train until the loss is reached."""
    clock, busy = [0.0], [0.0]
    began, worked = time.perf_counter(), time.process_time()
    gpu_seconds = 0.0
    for record in _records(task, place, MOST_EPOCHS):
        if isinstance(record, Step):
            now = time.perf_counter() - began
            if place.device == "cuda":
                gpu_seconds += _gpu_share() * (now - clock[-1])
            clock.append(now)
            busy.append(gpu_seconds if place.device == "cuda" else (time.process_time() - worked) / place.threads)
        elif isinstance(record, Epoch) and record.train["loss"] <= CLOSE * target:
            return _Run(clock[-1], record.step, clock, busy)
    return _Run(None, None, clock, busy)


def _gpu_share() -> float:
    """How busy the GPU is, as its driver reports; needs NVIDIA's Python bindings."""
    try:
        return torch.cuda.utilization() / 100
    except (ImportError, RuntimeError):
        return float("nan")


def _summary(task: Task, place: Place, runs: Sequence[_Run], target: float) -> Trained:
    steps = [run.step_seconds for run in runs]
    batch = task.recipe.worker_batch
    reached = [run.seconds_to_loss for run in runs if run.seconds_to_loss is not None]
    over_time = runs[-1].utilisation(SAMPLES) if place.device != "mps" else ()
    known = bool(over_time) and all(share == share for share in over_time)  # the driver's may be not-a-number
    whole = [run.utilisation(1)[0] for run in runs]
    return Trained(
        task=task.name,
        device=place.device,
        threads=place.threads,
        worker_batch=batch,
        step_seconds=statistics.median(steps),
        step_seconds_low=median_interval(steps)[0],
        step_seconds_high=median_interval(steps)[1],
        samples_per_second=batch / statistics.median(steps),
        target_loss=target,
        seconds_to_loss=statistics.median(reached) if len(reached) == len(runs) else None,
        steps_to_loss=runs[-1].steps_to_loss,
        utilisation=statistics.median(whole) if known else None,
        utilisation_over_time=over_time if known else (),
        rounds=len(runs),
    )
