"""The engine with spans around its seams: put in place for some steps, and taken away without a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from scalewise.engine.data import loaders
from scalewise.engine.data.feed import AHEAD
from scalewise.engine.loop import Training
from scalewise.engine.parallel.data import DataParallel
from scalewise.engine.parallel.workers import Workers
from scalewise.runs.profile.layers import AFTER_THE_MODEL, Layers
from scalewise.runs.profile.reading import TimedSamples
from scalewise.runs.profile.spans import Clock, Label, Recorder
from scalewise.runs.profile.wire import Wire
from scalewise.tasks.task import Loss, MeanLoss

BACKWARD = Label("backward"), Label("backward", AFTER_THE_MODEL)
TURN = Label("", hidden=True)


class Probes:
    """What is noted of one training."""

    def __init__(self, training: Training, recorder: Recorder, folder: Path) -> None:
        """From now on its samples are timed; loader processes write to `folder`."""
        strategy = training.strategy
        assert isinstance(strategy, DataParallel)
        self._training, self._strategy, self._recorder = training, strategy, recorder
        self.layers = Layers(strategy.model.call, recorder, training.recipe.compile)
        self.wire = Wire(recorder)
        feed = strategy.feed
        feed._samples = TimedSamples(feed._samples, recorder, folder)
        loads = not feed._samples.in_memory and feed._loaders > 0
        # batches that are there before they are needed, so that the first steps do not wait for them
        self.batches_ahead = (loaders.AHEAD * feed._loaders + AHEAD) if loads else 0
        self._reads_ahead = loads or training.team.device.type != "cpu"  # where a thread copies batches to the device

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The context in which everything is noted."""
        with ExitStack() as stack, self.wire.tapped():
            self._recorder.on = True
            stack.callback(setattr, self._recorder, "on", False)
            self.layers.install()
            stack.callback(self.layers.remove)
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
            (workers, "_row", Label("output")),
            (workers, "_square_norm", Label("norms")),
            (strategy._fold, "put", Label("sum")),
            (strategy._fold, "put_one", Label("sum")),
            (strategy, "_reduced", Label("return")),
            (reduction, "finish", Label("sum")),
            (strategy, "_clipped", Label("norms")),
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
        """A backward pass that tells which layer it is in: a span for the whole, and one after another within it."""

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
        """Workers in lockstep have threads of their own, of which one at a time goes on."""
        lockstep = self._strategy._lockstep
        if lockstep is None:
            return
        wait = self._recorder.around(TURN, lockstep._wait_for_turn)

        def wait_in_own_lane() -> None:
            self._recorder.own_lane("turns")
            wait()

        _replace(stack, lockstep, "_wait_for_turn", wait_in_own_lane)


def device_clock(device: torch.device, clock: Clock) -> Clock:
    """A clock that first waits for the device, so that what it computes belongs to the span that asked for it."""
    if device.type == "cpu":
        return clock
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.mps.synchronize

    def after_the_device() -> float:
        wait()
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
