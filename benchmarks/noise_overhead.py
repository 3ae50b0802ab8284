"""What measuring the noise scale adds to a step: with and without it by turns, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

import scalewise as sw
from cases import Case, data_folder
from contestants import scalewise
from rounds import Contestant, Ready, Round, Work, endless, images, interleave, ratios, spread
from scalewise import Placement
from scalewise.engine.loop import Training
from scalewise.engine.memory import keep_freed_memory

CYCLES = 15
SHARE_STEPS, WARM_UP_STEPS = 60, 10
QUIET, AGAIN, LOUD = "without", "without, again (control)", "with"


def accumulating(micro_batches: int, watched: bool) -> Ready:
    """A loop written by hand that adds up micro batches."""

    def steps(work: Work) -> Iterator[None]:
        model = work.model()
        optimizer = work.optimizer(model)
        x, y = work.data
        size = work.batch // micro_batches
        meter = sw.NoiseScale().watch_accumulation(model, size) if watched else None
        while True:
            order = torch.randperm(len(x))
            for start in range(0, len(x) - work.batch + 1, work.batch):
                for part in order[start : start + work.batch].split(size):
                    (work.loss(model(images(x[part])), y[part]) / micro_batches).backward()
                if meter is not None:
                    meter.step()
                optimizer.step()
                optimizer.zero_grad()
                yield

    return endless(steps)


def engine(noise: bool) -> Ready:
    """Two workers, one after another on this process."""

    @contextmanager
    def ready(work: Work) -> Iterator[Round]:
        inner = scalewise(2, work.batch // 2, Placement(device="cpu", noise=noise))
        with inner(work) as round:
            yield round

    return ready


KINDS: dict[str, list[Contestant]] = {
    "engine, 2 workers": [
        Contestant(QUIET, "two workers, noise off", engine(False)),
        Contestant(AGAIN, "the same once more", engine(False)),
        Contestant(LOUD, "two workers, noise on", engine(True)),
    ],
    "own loop, 4 micro batches": [
        Contestant(QUIET, "hand-written", accumulating(4, False)),
        Contestant(AGAIN, "the same once more", accumulating(4, False)),
        Contestant(LOUD, "hand-written, watch_accumulation", accumulating(4, True)),
    ],
}
CASES = [Case("fashion-mnist", 128), Case("cifar10-small", 128), Case("cifar10", 64)]


def rows() -> Iterator[dict[str, Any]]:
    keep_freed_memory()
    for case in CASES:
        work = Work(case.load(data_folder()), case.worker_batch, 1)
        for kind, contestants in KINDS.items():
            measured = interleave(contestants, work, CYCLES)
            row: dict[str, Any] = {"case": case.title, "kind": kind, "steps_a_round": measured.steps}
            row["step_milliseconds"] = 1000 * spread(measured.seconds[QUIET]).median
            for name in (AGAIN, LOUD):
                row[name] = asdict(spread(ratios(measured.seconds, name, QUIET)))
                row[f"{name}, CPU"] = asdict(spread(ratios(measured.cpu_seconds, name, QUIET)))
            row["failures"] = measured.failures
            yield row


def shares() -> Iterator[dict[str, Any]]:
    """The part of a step that passes inside of what measures: which does not depend on what else the machine does."""
    for case in CASES:
        work = Work(case.load(data_folder()), case.worker_batch, 1)
        recipe = sw.Recipe(
            workers=2, worker_batch=work.batch // 2, steps=SHARE_STEPS, layout="channels_last", threads=1
        )
        with Training(work.task, recipe, Placement(device="cpu"), alone=True) as training:
            spent = Stopwatch()
            strategy: Any = training.strategy
            strategy.workers._square_norm = spent.timed(strategy.workers._square_norm)
            strategy._clipped = spent.timed(strategy._clipped)  # the norm of the mean; nothing is clipped here
            training.noise.observe = spent.timed(training.noise.observe)  # type: ignore[method-assign]
            began, found = time.perf_counter(), []
            for record in training.records():
                if isinstance(record, sw.Step):
                    found.append((spent.seconds, time.perf_counter() - began))
                    spent.seconds, began = 0.0, time.perf_counter()
                if training.progress.step == SHARE_STEPS:
                    break
        each = [measuring / step for measuring, step in found[WARM_UP_STEPS:]]
        milliseconds = 1000 * spread([step for _, step in found[WARM_UP_STEPS:]]).median
        yield {"case": case.title, "step_milliseconds": milliseconds, "share": asdict(spread(each))}


class Stopwatch:
    """Adds up the time inside of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed
