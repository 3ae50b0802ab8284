"""Spans around the engine's own seams: installed for some steps, then removed without a trace.

Communication: torch's collectives with spans around them, and how long each was in flight. What was in flight while the
process did something else is hidden; what it waited for is not.
Reading: samples record how long they took to fetch, here or in a loader process. A loader process has its own memory,
so it appends what it recorded to a file of its own, batch by batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.data import loaders
from scalewise.engine.data.feed import AHEAD
from scalewise.engine.data.samples import Augmented, DatasetSamples, Samples, Subset
from scalewise.engine.loop import Training
from scalewise.engine.parallel.data import DataParallel
from scalewise.engine.parallel.workers import Workers
from scalewise.runs.measure.throughput import finish
from scalewise.runs.profile.spans import AFTER_THE_MODEL, HIDDEN, Clock, Label, Layers, Recorder, Segment, segments
from scalewise.tasks.task import Batch, Loss, MeanLoss

BACKWARD = Label("backward"), Label("backward", AFTER_THE_MODEL)


class Probes:
    """What is recorded of one training."""

    def __init__(self, training: Training, recorder: Recorder, folder: Path) -> None:
        """From now on its samples are timed; loader processes write to `folder`."""
        strategy = training.strategy
        assert isinstance(strategy, DataParallel)
        self._training, self._strategy, self._recorder = training, strategy, recorder
        self.layers = Layers(strategy.model.call, recorder, training.recipe.compile)
        self.collectives = Collectives(recorder)
        feed = strategy.feed
        feed._samples = TimedSamples(feed._samples, recorder, folder)
        loads = not feed._samples.in_memory and feed._loaders > 0
        # batches that are ready before they are needed, so that the first steps do not wait for them
        self.batches_ahead = (loaders.AHEAD * feed._loaders + AHEAD) if loads else 0
        self._reads_ahead = loads or training.team.device.type != "cpu"  # where a thread copies batches to the device

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The context in which everything is recorded."""
        with ExitStack() as stack:
            self.collectives.install(stack)
            self._recorder.on = True
            stack.callback(setattr, self._recorder, "on", False)
            self.layers.install(stack)
            for owner, name, label in self._seams():
                _replace(stack, owner, name, self._recorder.around(label, getattr(owner, name)))
            self._wrap_workers(stack, self._strategy.workers)
            self._wrap_lockstep(stack)
            yield

    def _seams(self) -> list[tuple[object, str, Label]]:
        """Methods that are a phase as they are; what they call may be another one."""
        training, strategy = self._training, self._strategy
        workers, reduction = strategy.workers, strategy._reduction
        return [
            (strategy.feed, "batch", Label("queue", waits=self._reads_ahead)),
            (strategy.feed, "_placed", Label("transport to device")),
            (workers, "_forward", Label("loss")),
            (workers, "_numbers", Label("output")),
            (workers, "_square_norm", Label("norms")),
            (strategy._fold, "put", Label("sum")),
            (strategy._fold, "put_one", Label("sum")),
            (strategy, "_reduced", Label("return")),
            (reduction, "finish", Label("sum")),
            (strategy, "squared_norm", Label("norms")),
            (training.pace, "advance", Label("optimizer")),
            (strategy._optimizer, "step", Label("optimizer")),
            (strategy, "update", Label("update")),
            (training, "_step_record", Label("return")),
        ]

    def _wrap_workers(self, stack: ExitStack, workers: Workers) -> None:
        metrics = {
            name: self._recorder.around(Label("output"), metric) for name, metric in workers._task.metrics.items()
        }
        _replace(stack, workers, "_task", dataclasses.replace(workers._task, metrics=metrics))
        for name in ("_backward", "_gradients_alone"):
            _replace(stack, workers, name, self._followed(getattr(workers, name)))

    def _followed(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """A backward pass that marks the layer it is in: a span for the whole, and one after another within it."""

        def followed(loss: Loss | MeanLoss, *others: object) -> object:
            self.layers.follow(loss.total if isinstance(loss, Loss) else loss.mean)
            for label in BACKWARD:
                self._recorder.open(label)
            try:
                return backward(loss, *others)
            finally:
                for _ in BACKWARD:
                    self._recorder.close()

        return followed

    def _wrap_lockstep(self, stack: ExitStack) -> None:
        """Workers in lockstep have threads of their own, of which one at a time runs."""
        lockstep = self._strategy._lockstep
        if lockstep is None:
            return
        wait = self._recorder.around(HIDDEN, lockstep._wait_for_turn)

        def wait_in_own_lane() -> None:
            self._recorder.own_lane("turns")
            wait()

        _replace(stack, lockstep, "_wait_for_turn", wait_in_own_lane)


def device_clock(device: torch.device, clock: Clock) -> Clock:
    """A clock that first waits for the device, so that what it computes belongs to the span that asked for it."""
    if device.type == "cpu":
        return clock

    def after_the_device() -> float:
        finish(device)
        return clock()

    return after_the_device


def _replace(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute of an object until the stack closes."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


STARTS, WAITS = Label("communication"), Label("communication", waits=True)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce",
    "broadcast",
    "barrier",
)
BETWEEN_TWO = ("isend", "irecv")  # which never wait, and do not report when they are done


@dataclass
class Flight:
    """One operation in flight: from its start to its end."""

    name: str
    start: float
    stop: float | None = None


class _Watched:
    """torch's handle of an operation, with a span around waiting for it."""

    def __init__(self, work: dist.Work, flight: Flight, recorder: Recorder) -> None:
        self._work, self._flight = work, flight
        self._wait = recorder.around(WAITS, work.wait)
        if flight.name not in BETWEEN_TWO:
            work.get_future().add_done_callback(self._land)

    def _land(self, future: object) -> None:
        self._flight.stop = self._flight.stop or time.perf_counter()

    def wait(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Until it is done."""
        done = self._wait(*arguments)
        self._land(None)
        return done

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._work, name)


class Collectives:
    """The operations of this process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._flights: list[Flight] = []

    def take(self) -> list[Flight]:
        """Those that have ended since the last time."""
        ended = [flight for flight in self._flights if flight.stop is not None]
        self._flights = [flight for flight in self._flights if flight.stop is None]
        return ended

    def install(self, stack: ExitStack) -> None:
        """Record every operation of torch.distributed until the stack closes."""
        for name in (*COLLECTIVES, *BETWEEN_TWO):
            if hasattr(dist, name):
                _replace(stack, dist, name, self._recorded(name, getattr(dist, name)))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            flight = Flight(name, time.perf_counter())
            self._flights.append(flight)
            continues = name in BETWEEN_TWO or named.get("async_op", False)
            work = self._recorder.around(STARTS if continues else WAITS, function)(*arguments, **named)
            if continues and work is not None:
                return _Watched(work, flight, self._recorder)
            flight.stop = time.perf_counter()
            return work

        return recorded


READ, TO_MEMORY, PREPROCESS = Label("read"), Label("transport to memory"), Label("preprocess")


class TimedSamples:
    """The same samples, with a span around each part of a fetch."""

    def __init__(self, samples: Samples, recorder: Recorder, folder: Path) -> None:
        """Files of loader processes go to `folder`."""
        self.in_memory = samples.in_memory
        self._samples = timed(samples, recorder)
        self._recorder, self._folder = recorder, folder
        self._owner = self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._samples)

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """The samples; what a loader process recorded is written there."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._recorder.forget()
        loads = self._process != self._owner
        if not loads:
            self._recorder.own_lane("beside")  # where it is not the thread of the step
        batch = self._samples.fetch(indices, epochs)
        if loads:
            pieces = segments(self._recorder.take()[0].events)
            with (self._folder / f"{self._process}.jsonl").open("a") as out:
                out.write(json.dumps([[piece.label.phase, piece.start, piece.stop] for piece in pieces]) + "\n")
        return batch

    def describe(self, index: int) -> str:
        """A sample in words."""
        return self._samples.describe(index)


def timed(samples: Samples, recorder: Recorder) -> Samples:
    """Samples whose reading, collating and augmenting are spans: the same code, with its parts wrapped."""
    samples = copy.copy(samples)
    if isinstance(samples, Augmented):
        samples.samples = timed(samples.samples, recorder)
        samples._augment = recorder.around(PREPROCESS, samples._augment)
    elif isinstance(samples, Subset):
        samples.samples = timed(samples.samples, recorder)
    elif isinstance(samples, DatasetSamples):
        samples.dataset = _TimedDataset(samples.dataset, recorder)
        samples.fetch = recorder.around(TO_MEMORY, samples.fetch)  # type: ignore[method-assign]
    else:
        samples.fetch = recorder.around(READ, samples.fetch)  # type: ignore[method-assign]
    return samples


class _TimedDataset:
    """A user's data set with a span around `__getitem__`."""

    def __init__(self, dataset: Any, recorder: Recorder) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._get = recorder.around(READ, dataset.__getitem__)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._get(index)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever else it offers, as `describe`)
        return getattr(self._dataset, name)


@dataclass(frozen=True)
class Loader:
    """A loader process and what it did when, batch by batch."""

    number: int
    batches: list[list[Segment]]

    def between(self, start: float, stop: float) -> Iterator[Segment]:
        """What it did in a stretch of time, cut off at its ends."""
        for piece in (piece for batch in self.batches for piece in batch):
            if piece.start < stop and piece.stop > start:
                yield Segment(piece.label, max(piece.start, start), min(piece.stop, stop))


def read_loaders(folder: Path) -> list[Loader]:
    """All loader processes that wrote into the folder, by process number."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    return [Loader(number, list(_read(file))) for number, file in enumerate(files)]


def _read(file: Path) -> Iterator[list[Segment]]:
    for line in file.read_text().splitlines():
        if line.endswith("]]"):  # else its process ended while it wrote
            yield [Segment(Label(phase), start, stop) for phase, start, stop in json.loads(line)]
