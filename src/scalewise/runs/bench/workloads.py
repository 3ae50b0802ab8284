"""What is timed on each device: operations that training is made of, at any size, and the training of a built-in CNN.

A training gives a step's time, the time to an equal loss, and how busy the device is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.engine.loop import Training
from scalewise.engine.placement import DeviceName, Placement, available_cores
from scalewise.records import Epoch, Record, Step
from scalewise.runs.measure.throughput import gpu_share
from scalewise.runs.request import Notify
from scalewise.stats.interval import median_interval
from scalewise.stats.timing import rounds
from scalewise.tasks.digits import digits
from scalewise.tasks.task import Task

ELEMENT_BYTES = 4
CHANNELS, SIDE, KERNEL = 32, 32, 3
Bound = Literal["compute", "memory"]
Run = Callable[[], object]


@dataclass(frozen=True)
class Operation:
    """One operation as a function of its size."""

    name: str
    unit: str  # what the size counts
    bound: Bound  # what limits it at large sizes, so what its speed is held against
    sizes: tuple[int, ...]
    flops: Callable[[int], int]  # floating-point operations, an addition and a multiplication being two
    inputs: Callable[[int], int]  # elements that come in: what would have to be carried to a device …
    outputs: Callable[[int], int]  # … and that go out: what would have to be carried back
    prepare: Callable[[int, torch.device], Run]  # makes the data; the function does the operation once

    def moved_bytes(self, size: int) -> int:
        """Bytes of what comes in and goes out."""
        return ELEMENT_BYTES * (self.inputs(size) + self.outputs(size))

    def work(self, size: int) -> int:
        """What its time grows with: its arithmetic or its bytes."""
        return self.flops(size) if self.bound == "compute" else self.moved_bytes(size)


def _square(side: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randn(side, side, generator=generator).to(device)


def _product(side: int, device: torch.device) -> Run:
    left, right = _square(side, device), _square(side, device)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _inverse(side: int, device: torch.device) -> Run:
    matrix = _square(side, device) + side * torch.eye(side, device=device)  # far from singular
    return lambda: torch.linalg.inv(matrix)


def _convolution(images: int, device: torch.device) -> Run:
    x = torch.randn(images, CHANNELS, SIDE, SIDE, device=device)
    weight = torch.randn(CHANNELS, CHANNELS, KERNEL, KERNEL, device=device)
    return lambda: F.conv2d(x, weight, padding=KERNEL // 2)


def _elementwise(elements: int, device: torch.device) -> Run:
    x, y = torch.randn(elements, device=device), torch.randn(elements, device=device)
    out = torch.empty_like(x)
    return lambda: torch.add(x, y, out=out)


def _reduction(elements: int, device: torch.device) -> Run:
    x = torch.randn(elements, device=device)
    return lambda: x.sum()


def _copy(elements: int, source: torch.device, target: torch.device | None = None) -> Run:
    x = torch.randn(elements, device=source)
    out = torch.empty(elements, device=target or source)
    return lambda: out.copy_(x)


_SIDES = (32, 64, 128, 256, 512, 1024)
_ELEMENTS = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_IMAGE = CHANNELS * SIDE * SIDE

OPERATIONS = (
    Operation(
        "matrix product", "side", "compute", _SIDES,
        lambda n: 2 * n**3, lambda n: 2 * n**2, lambda n: n**2, _product,
    ),
    Operation(
        "matrix inverse", "side", "compute", _SIDES[:-1],
        lambda n: 2 * n**3, lambda n: n**2, lambda n: n**2, _inverse,
    ),
    Operation(
        f"convolution {KERNEL}×{KERNEL}", "images", "compute", (1, 4, 16, 64),
        lambda n: 2 * n * _IMAGE * CHANNELS * KERNEL**2, lambda n: n * _IMAGE, lambda n: n * _IMAGE, _convolution,
    ),
    Operation("elementwise", "elements", "memory", _ELEMENTS, lambda n: n, lambda n: 2 * n, lambda n: n, _elementwise),
    Operation("reduction", "elements", "memory", _ELEMENTS, lambda n: n, lambda n: n, lambda n: 1, _reduction),
    Operation("copy in memory", "elements", "memory", _ELEMENTS, lambda n: 0, lambda n: n, lambda n: n, _copy),
)  # fmt: skip


# Only where host and device have memories of their own. Carried in one direction at a time, from and to ordinary
# (not pinned) memory, as `tensor.to(device)` does; `outputs` counts nothing, so that the bytes are those carried.
TRANSFERS = tuple(
    Operation(name, "elements", "memory", _ELEMENTS, lambda n: 0, lambda n: n, lambda n: 0, prepare)
    for name, prepare in (
        ("copy to device", lambda elements, device: _copy(elements, torch.device("cpu"), device)),
        ("copy from device", lambda elements, device: _copy(elements, device, torch.device("cpu"))),
    )
)


@dataclass(frozen=True)
class Place:
    """A device, and the CPU threads that compute or, for an accelerator, feed it."""

    device: DeviceName
    threads: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return self.device if self.device != "cpu" else f"cpu, {self.threads} thread{'' if self.threads == 1 else 's'}"

    @contextmanager
    def used(self) -> Iterator[torch.device]:
        """The context in which torch computes there."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield torch.device(self.device)
        finally:
            torch.set_num_threads(before)


def places(cores: int | None = None) -> list[Place]:
    """The CPU on 1, 2, 4, … and all cores, then what accelerators there are."""
    most = cores or available_cores()
    powers = [1 << power for power in range(most.bit_length())]
    found = [Place("cpu", threads) for threads in sorted({*powers, most}) if threads <= most]
    if torch.cuda.is_available():
        found.append(Place("cuda", most))
    if torch.backends.mps.is_available():
        found.append(Place("mps", most))
    return found


def missing(found: list[Place]) -> list[str]:
    """What could not be measured here, and why."""
    notes = []
    if all(place.device == "cpu" for place in found):
        notes.append("no CUDA or MPS device here: copies to a device and what is worth sending there were not measured")
    if len(found) == 1:
        notes.append("one core here: what more threads bring was not measured")
    return notes


EPOCHS = 2.0  # whose mean loss is the one to reach
MOST_EPOCHS = 6.0
MOST_ROUNDS = 9
CLOSE = 1.01  # kernels differ between devices, so losses do in their last digits
SAMPLES = 12  # of the utilisation over time


@dataclass(frozen=True)
class Trained:
    """Trainings on one device; medians over rounds, intervals of 95 %.

    utilisation: share of its threads' time in which this process computed or, on CUDA, of the time that the GPU worked;
        None where the device does not report it.
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
    seconds_to_loss: float | None  # until an epoch's training loss was no more than that; None where it never was
    steps_to_loss: int | None
    utilisation: float | None
    utilisation_over_time: tuple[float, ...]  # by parts of the last training
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
    losses = [record.train["loss"] for record in _records(task, found[0], EPOCHS) if isinstance(record, Epoch)]
    target = losses[-1]
    runs: dict[Place, list[_Run]] = {place: [] for place in found}
    for number in rounds(MOST_ROUNDS, seconds, least=1):
        notify(f"devices: training, round {number + 1}")
        for place in found:
            runs[place].append(_run(task, place, target))
    return tuple(_summary(task, place, runs[place], target) for place in found)


def _records(task: Task, place: Place, epochs: float) -> Iterator[Record]:
    recipe = task.recipe.replace(threads=place.threads, epochs=epochs)
    with Training(task, recipe, Placement(device=place.device), alone=True) as training:
        yield from training.records()


def _run(task: Task, place: Place, target: float) -> _Run:
    """Train until the loss is reached."""
    clock, busy = [0.0], [0.0]
    began, worked = time.perf_counter(), time.process_time()
    gpu_seconds = 0.0
    for record in _records(task, place, MOST_EPOCHS):
        if isinstance(record, Step):
            now = time.perf_counter() - began
            if place.device == "cuda":
                share = gpu_share(torch.device("cuda"))
                gpu_seconds += (float("nan") if share is None else share) * (now - clock[-1])
            clock.append(now)
            busy.append(gpu_seconds if place.device == "cuda" else (time.process_time() - worked) / place.threads)
        elif isinstance(record, Epoch) and record.train["loss"] <= CLOSE * target:
            return _Run(clock[-1], record.step, clock, busy)
    return _Run(None, None, clock, busy)


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
