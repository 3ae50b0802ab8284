"""The largest worker batch that fits: predicted by part, then confirmed by really taking the engine's step.

On a CPU the budget is what all processes of this machine may hold of their own together: Python, torch, the task's
data, weights, gradients, optimizer state, activations and workspace; each process gets an equal share. Trials run in
processes of their own under that limit, in which malloc gives back what is freed, as it does in training that has no
room to keep it (engine/processes/memory.py). On CUDA the budget is that of one device, and every process has one.

    peak above the baseline = weights + gradients + optimizer state + saved activations × samples + workspace

The first four are counted or traced; the workspace (the batch itself, gradients of activations, scratch of the kernels,
gaps that the allocator cannot use) is what measured peaks at small worker batches show beyond them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalewise.engine.data.samples import open_samples
from scalewise.engine.placement import Placement, available_cores, check_processes, loader_processes
from scalewise.engine.processes.memory import Free, free_memory
from scalewise.engine.processes.team import choose_device
from scalewise.errors import PlacementError, TooLittleMemory
from scalewise.plan.records import MemoryLine
from scalewise.recipe import Recipe, resolve
from scalewise.runs.measure.memory import show_bytes
from scalewise.runs.measure.memory.steps import Job, Note, Parts
from scalewise.runs.measure.memory.trials import Children, OnDevice, free_on_device
from scalewise.runs.request import Notify, silent
from scalewise.tasks.task import Task

SPARE = 0.02  # of the room on a CPU: the same training needs now a little more, now a little less
COUNTS = {
    "cpu": "what a process holds of its own: Python, torch, the data, weights, gradients, optimizer state, activations",
    "cuda": "what a process holds on its device: weights, gradients, optimizer state, activations",
}


@dataclass(frozen=True)
class Trial:
    """One worker batch that was tried, whether it fitted with room to spare, and its peak if it came to the end."""

    worker_batch: int
    fits: bool
    peak_bytes: int | None


@dataclass(frozen=True)
class Part:
    """A part of the predicted peak at the largest worker batch."""

    name: str
    bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """The largest worker batch that fits, and where the memory goes. Peaks are above the baseline of one process.

    loaders: loader processes that each process has by default in training, for data that are not in memory. What they
        hold is not counted: the report is that of --loaders 0.
    """

    largest_worker_batch: int  # samples of one worker that fit through the model at once; more need --micro-batch
    limited_by: Literal["memory", "data"]  # data when all training samples fit at once
    device: str
    budget_bytes: int  # for all processes (CPU) or one device (CUDA)
    budget_source: str  # where it comes from
    processes: int
    process_bytes: int  # the share of each process
    counts: str  # what the budget counts
    baseline_bytes: int  # what a process holds before training
    bytes_per_sample: float
    parts: tuple[Part, ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    smallest_that_does_not_fit: int | None  # of the worker batches tried; None when all fitted
    trials: tuple[Trial, ...]
    loaders: int = 0


def largest_worker_batch(
    task: Task,
    recipe: Recipe,
    *,
    budget: int | None = None,
    processes: int = 1,
    placement: Placement | None = None,
    notify: Notify = silent,
) -> MemoryReport:
    """Find the largest worker batch that trains within the budget in bytes, by default what is free, exact to 3 %.

    On a CPU the task is trained in processes of its own, which load or unpickle it, and 2 % of what is left to training
    are spared, since the same training needs now more, now less. The recipe's worker batch does not matter.
    """
    complete, _ = resolve(recipe, {}, "plain", available_cores())
    where = placement or Placement()
    check_processes(processes, complete, where)
    device = choose_device(where.device, 0).type
    if device == "mps" or (device == "cpu" and sys.platform != "linux"):
        raise PlacementError(
            f"the largest worker batch is measured on CUDA or, with Linux's limits, on a CPU, got {device} on "
            f"{sys.platform}; leave it out with --skip memory, or measure on such a machine"
        )
    given = None if budget is None else Free(budget, "given")
    opened = open_samples(task.train, complete.seed, "training")
    samples = len(opened)
    if device == "cuda":
        free = given or Free(free_on_device(), "free memory of the device")
        share = free.bytes
        shared_out = complete.replace(workers=-(-complete.workers // processes))
        job = Job(b"", shared_out, replace(where, device="cuda", loaders=0), 1, share, None, samples)
        trials: Children | OnDevice = OnDevice(task, job)
    else:
        free = given or free_memory()
        share = free.bytes // processes
        trials = Children(task, complete, where, processes, share, samples)
    loaders = 0 if opened.in_memory else loader_processes(where, processes)
    return replace(_search(trials, free, share, processes, samples, device, notify), loaders=loaders)


def _search(
    trials: Children | OnDevice, free: Free, share: int, processes: int, samples: int, device: str, notify: Notify
) -> MemoryReport:
    """Trace, predict, confirm."""
    spare = SPARE if device == "cpu" else 0.0
    notify("memory: tracing how it grows with the worker batch")
    trace = trials.run(None)
    if not trace.points or trace.parts is None:
        raise _too_little(share, trace)
    line = fit_line(trace.points, trace.parts.saved_per_sample)
    notes: dict[int, Note] = {}

    def fits(batch: int) -> bool:
        notify(f"memory: trying worker batch {batch:,}")
        note = notes[batch] = trials.run(batch, line.peak(batch))
        return _fits(note, share, spare)

    largest = largest_fitting(line.largest((1 - spare) * (share - trace.baseline)), fits, trace.smallest, samples)
    if largest == 0:
        raise _too_little(share, trace)
    tried = tuple(
        Trial(batch, _fits(note, share, spare), note.points[0][1] if note.points else None)
        for batch, note in sorted(notes.items())
    )
    failed = [trial.worker_batch for trial in tried if not trial.fits]
    return MemoryReport(
        largest_worker_batch=largest,
        limited_by="memory" if failed else "data",
        device=device,
        budget_bytes=free.bytes,
        budget_source=free.source,
        processes=processes,
        process_bytes=share,
        counts=COUNTS[device],
        baseline_bytes=notes[largest].baseline,
        bytes_per_sample=line.per_sample,
        parts=predicted_parts(line, trace.parts, largest),
        predicted_peak_bytes=round(line.peak(largest)),
        measured_peak_bytes=notes[largest].points[0][1],
        smallest_that_does_not_fit=min(failed, default=None),
        trials=tried,
    )


def predicted_parts(line: MemoryLine, parts: Parts, batch: int) -> tuple[Part, ...]:
    """The predicted peak by part; what the others do not explain is workspace."""
    saved = round(parts.saved_per_sample * batch)
    workspace = round(line.peak(batch)) - parts.weights - parts.gradients - parts.optimizer - saved
    return (
        Part("weights", parts.weights),
        Part("gradients", parts.gradients),
        Part("optimizer state", parts.optimizer),
        Part("activations", saved),
        Part("workspace", workspace),
    )


def _fits(note: Note, share: int, spare: float) -> bool:
    """Whether a trial was done, and left what must be spared."""
    return note.ended == "done" and note.points[0][1] <= (1 - spare) * (share - note.baseline)


def _too_little(share: int, trace: Note) -> TooLittleMemory:
    alone = f"{show_bytes(trace.baseline)} are held before training begins" if trace.baseline else "it could not start"
    samples = "1 sample" if trace.smallest == 1 else f"{trace.smallest} samples (the fewest it can)"
    return TooLittleMemory(
        f"training {samples} at once must fit into {show_bytes(share)} per process, and does not: {alone}; raise "
        f"--memory or use a smaller model"
    )


TOLERANCE = 0.03


def fit_line(points: Sequence[Sequence[int]], per_sample: float = 0.0) -> MemoryLine:
    """Bytes above the baseline: the line through points (samples, bytes) with the least relative errors, squared.

    Arguments:
        points: at least one.
        per_sample: the slope to assume when there is only one.

    >>> round(fit_line([(1, 1_000), (2, 1_500), (4, 2_500)]).largest(10_500), 6)
    20.0
    """
    samples, peaks = np.array(points, float).T
    if len(samples) == 1:
        return MemoryLine(float(peaks[0] - per_sample * samples[0]), per_sample)
    scaled = np.stack([1 / peaks, samples / peaks], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(scaled, np.ones(len(peaks)), rcond=None)
    return MemoryLine(float(fixed), float(slope)) if slope > 0 else MemoryLine(float(peaks.max()), 0.0)


def largest_fitting(start: float, fits: Callable[[int], bool], smallest: int, most: int) -> int:
    """The largest number of samples that fits, to within 3 %; 0 when not even the fewest do.

    Goes from the start in steps that double until one number fits and another does not, then halves the distance.

    Arguments:
        start: where to begin: the prediction.
        fits: whether this number of samples fits; must not become true again for more.
        smallest: the fewest, and the unit: numbers are multiples of it.
        most: the most samples of interest.

    >>> largest_fitting(70, lambda batch: batch <= 30, smallest=1, most=100_000)
    30
    """
    limit = max(1, most // smallest)  # counted in units of the smallest
    low, high = 0, limit + 1  # fits (nothing does), does not fit (or is of no interest)
    candidate = int(min(max(start / smallest, 1), limit))
    stride = max(1, int(TOLERANCE * candidate))
    while high - low > max(1, TOLERANCE * low):
        if fits(candidate * smallest):
            low = candidate
        else:
            high = candidate
        candidate = _next(low, high, limit, stride)
        stride *= 2
    return low * smallest


def _next(low: int, high: int, limit: int, stride: int) -> int:
    """Upwards while nothing has failed, downwards while nothing has fitted, else the middle."""
    if high > limit:
        return min(low + stride, limit)
    if low == 0:
        return max(high - stride, 1)
    return (low + high) // 2
