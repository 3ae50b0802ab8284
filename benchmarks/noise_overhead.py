"""What measuring the noise scale adds to a step: off and on by turns within one training.

Trainings beside each other differ by several percent by their places in memory alone, and a machine's speed changes
within seconds. So there is one training, whose measuring is turned on for some steps and off for the next, in an order
drawn anew for every cycle. A cycle has two turns without it; the second one is the control.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol, cast

import torch

import scalewise as sw
from cases import Case, data_folder
from rounds import Work, images, middle, spread
from scalewise import Placement
from scalewise.engine.loop import Training
from scalewise.engine.processes.memory import keep_freed_memory

CYCLES = 100
SETTLING_STEPS = 24  # before the first cycle: an accumulating loop is looked at more often at its start
LEADING_STEPS = 4  # of a turn, not counted: numbers are read a step late, and caches are those of the turn before
COUNTED_STEPS = 8  # both are multiples of the steps between two looks at an accumulating loop
SHARE_TURNS = 25
WITHOUT, CONTROL, WITH = "without", "without, again (control)", "with"


class Stopwatch:
    """Adds up the processor time inside of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object, **named: object) -> object:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.process_time() - began

        return timed


class Switched(Protocol):
    """A training that goes on for ever, and whose measuring can be turned off and on between steps."""

    def step(self) -> None:
        """Take a step."""

    def measure(self, on: bool) -> None:
        """From the next step on."""

    def time(self, inside: Stopwatch) -> None:
        """Note the seconds inside of the functions that measure."""


class Engine:
    """Two workers, one after another on this process."""

    def __init__(self, training: Training) -> None:
        self._training, self._records = training, training.records()
        self._strategy = cast(Any, training.strategy)

    def step(self) -> None:
        while not isinstance(next(self._records), sw.Step):
            pass

    def measure(self, on: bool) -> None:
        self._training.placement = Placement(device="cpu", noise=on)

    def time(self, inside: Stopwatch) -> None:
        self._strategy.workers._square_norm = inside.timed(self._strategy.workers._square_norm)
        self._strategy.squared_norm = inside.timed(self._strategy.squared_norm)
        self._training.noise.observe = inside.timed(self._training.noise.observe)  # type: ignore[method-assign]


@contextmanager
def engine(work: Work) -> Iterator[Switched]:
    steps = SETTLING_STEPS + 3 * (CYCLES + 1) * (LEADING_STEPS + COUNTED_STEPS)
    recipe = sw.Recipe(workers=2, worker_batch=work.batch // 2, steps=steps + 10, layout="channels_last", threads=1)
    with Training(work.task, recipe, Placement(device="cpu"), alone=True) as training:
        yield Engine(training)


class Accumulating:
    """A loop written by hand that adds up four micro batches."""

    def __init__(self, work: Work) -> None:
        self._model = work.model()
        self._meter = sw.NoiseScale().watch_accumulation(self._model, work.batch // 4)
        self._steps, self._on, self._looking = self._train(work), True, True

    def _train(self, work: Work) -> Iterator[None]:
        optimizer, (x, y) = work.optimizer(self._model), work.data
        while True:
            order = torch.randperm(len(x))
            for start in range(0, len(x) - work.batch + 1, work.batch):
                for part in order[start : start + work.batch].split(work.batch // 4):
                    (work.loss(self._model(images(x[part])), y[part]) / 4).backward()
                if self._on:
                    self._meter.step()
                optimizer.step()
                optimizer.zero_grad()
                yield

    def step(self) -> None:
        next(self._steps)

    def measure(self, on: bool) -> None:
        if self._on and not on:
            self._looking = bool(self._meter._handles)
            self._meter.close()
        elif on and not self._on and self._looking:
            self._meter._look()
        self._on = on

    def time(self, inside: Stopwatch) -> None:
        self.measure(False)
        self._meter._hooks = [inside.timed(hook) for hook in self._meter._hooks]
        self._meter.step = inside.timed(self._meter.step)  # type: ignore[method-assign]
        self.measure(True)


@contextmanager
def accumulating(work: Work) -> Iterator[Switched]:
    yield Accumulating(work)


KINDS = {"engine, 2 workers": engine, "own loop, 4 micro batches": accumulating}
CASES = [Case("fashion-mnist", 64), Case("cifar10-small", 64), Case("cifar10", 64)]


def rows() -> Iterator[dict[str, Any]]:
    keep_freed_memory()
    for case in CASES:
        work = Work(case.load(data_folder()), case.worker_batch, 1)
        for kind, ready in KINDS.items():
            torch.manual_seed(0)
            with ready(work) as training:
                seconds = turns(training)
            row: dict[str, Any] = {"case": case.title, "kind": kind}
            row["step_milliseconds"] = 1000 * spread(seconds[WITHOUT]).median
            without = list(zip(seconds[WITHOUT], seconds[CONTROL], strict=True))
            row[CONTROL] = asdict(middle([again / once for once, again in without]))
            row[WITH] = asdict(middle([2 * on / sum(off) for on, off in zip(seconds[WITH], without, strict=True)]))
            yield row


def turns(training: Switched) -> dict[str, list[float]]:
    """Processor seconds of a step, by kind of turn, in every cycle; the first cycle is not counted."""
    order, draw = [WITHOUT, CONTROL, WITH], random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(SETTLING_STEPS):
        training.step()
    for cycle in range(CYCLES + 1):
        draw.shuffle(order)
        for name in order:
            training.measure(name == WITH)
            for _ in range(LEADING_STEPS):
                training.step()
            began = time.process_time()
            for _ in range(COUNTED_STEPS):
                training.step()
            if cycle:
                found[name].append((time.process_time() - began) / COUNTED_STEPS)
    return found


def shares() -> Iterator[dict[str, Any]]:
    """The part of a step that passes inside of what measures: which does not depend on what else the machine does."""
    for case in CASES:
        work = Work(case.load(data_folder()), case.worker_batch, 1)
        for kind, ready in KINDS.items():
            with ready(work) as training:
                for _ in range(SETTLING_STEPS):
                    training.step()
                found = [*_spent(training)]
            share = asdict(middle([measuring / steps for measuring, steps in found]))
            milliseconds = 1000 * spread([steps / COUNTED_STEPS for _, steps in found]).median
            yield {"case": case.title, "kind": kind, "step_milliseconds": milliseconds, "share": share}


def _spent(training: Switched) -> Iterator[tuple[float, float]]:
    """Processor seconds inside of what measures and in all, for some steps at a time."""
    inside = Stopwatch()
    training.time(inside)
    for _ in range(SHARE_TURNS):
        inside.seconds, began = 0.0, time.process_time()
        for _ in range(COUNTED_STEPS):
            training.step()
        yield inside.seconds, time.process_time() - began
