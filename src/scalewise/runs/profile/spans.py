"""Spans of time, recorded as cheaply as possible while a step runs and put together afterwards.

A model's layers are spans, too. Forward, every module has hooks. Backward, autograd's nodes carry numbers that count up
as forward creates them, so a node's number says in which module's forward it was made; a hook before each node at which
the module changes marks when backward reaches it. That sees in-place operations, views and operations outside any
layer, which torch's own backward hooks for modules do not. A CPU runs the nodes from the highest number down
(autograd's own priority), one at a time.
"""

from __future__ import annotations

import bisect
import functools
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Result = TypeVar("Result")
Clock = Callable[[], float]  # seconds
LaneKind = Literal["step", "turns", "beside"]
END = None  # the name of an event that ends the span opened last
Event = tuple[float, "Label | None"]


@dataclass(frozen=True, slots=True)
class Label:
    """What a span is of."""

    phase: str  # one of the phases, or "" for what belongs to none of them
    layer: str | None = None  # the layer, in forward and backward
    waits: bool = False  # whether the phase waits in it for another process or thread
    hidden: bool = False  # whether its time belongs to no phase: another thread works in it, or the profiler itself


HIDDEN = Label("", hidden=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time: a whole span, or the part of it that belongs to no span within it."""

    label: Label
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.stop - self.start


@dataclass(frozen=True)
class Lane:
    """What one thread recorded.

    step: the thread of the step itself. turns: a worker's thread, of which one at a time runs in the step's stead.
    beside: a thread that reads ahead while the step runs.
    """

    kind: LaneKind
    events: list[Event]


class Recorder:
    """Records when spans open and close, in a lane for each thread that has one.

    Spans of other threads go to the lane of the step: they are torch's own threads, which run backward while it waits.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.on = True
        self.clock = clock
        self.forget()

    def open(self, label: Label) -> None:
        """A span begins in this thread."""
        self._lane().append((self.clock(), label))

    def close(self) -> None:
        """The span opened last in this thread ends."""
        self._lane().append((self.clock(), END))

    def around(self, label: Label, function: Callable[..., Result]) -> Callable[..., Result]:
        """The function with a span around every call."""

        @functools.wraps(function)
        def spanned(*arguments: Any, **named: Any) -> Result:  # noqa: ANN401
            if not self.on:
                return function(*arguments, **named)
            self.open(label)
            try:
                return function(*arguments, **named)
            finally:
                self.close()

        return spanned

    def own_lane(self, kind: LaneKind) -> None:
        """Give this thread a lane of its own, unless it is the thread of the step."""
        thread = threading.get_ident()
        if thread not in self._lanes or self._lanes[thread].kind not in ("step", kind):
            self._lanes[thread] = Lane(kind, [])

    def forget(self) -> None:
        """Start again, with this thread as that of the step; also after a fork in the middle of a span."""
        self._main = Lane("step", [])
        self._lanes = {threading.get_ident(): self._main}

    def take(self) -> list[Lane]:
        """What was recorded since the last time, that of the step first; to be called between steps.

        A thread beside the step may be within a span, which is then left for the next time.
        """
        taken = []
        for lane in self._lanes.values():
            count = _closed(lane.events)
            taken.append(Lane(lane.kind, lane.events[:count]))
            del lane.events[:count]
        return taken

    def _lane(self) -> list[Event]:
        return self._lanes.get(threading.get_ident(), self._main).events


def _closed(events: list[Event]) -> int:
    """How many of the events lie before the first span that is still open."""
    depth = closed = 0
    for place, (_, label) in enumerate([*events]):
        depth += 1 if label is not END else -1
        if depth <= 0:
            depth, closed = 0, place + 1
    return closed


def spans(events: Iterable[Event]) -> list[Segment]:
    """The closed spans of a lane, in the order in which they opened."""
    found: list[Segment | None] = []
    stack: list[tuple[int, float, Label]] = []
    for when, label in events:
        if label is not END:
            stack.append((len(found), when, label))
            found.append(None)
        elif stack:  # else it was opened before recording began
            place, start, opened = stack.pop()
            found[place] = Segment(opened, start, when)
    return [span for span in found if span is not None]


def segments(events: Iterable[Event]) -> list[Segment]:
    """The time of a lane cut up so that each piece belongs to the innermost span that was open; neighbours are one."""
    found: list[Segment] = []
    stack: list[Label] = []
    since = 0.0
    for when, label in events:
        if stack and when > since:
            if found and found[-1].label == stack[-1] and found[-1].stop == since:
                since = found.pop().start
            found.append(Segment(stack[-1], since, when))
        if label is not END:
            stack.append(label)
        elif stack:
            stack.pop()
        since = when
    return found


AFTER_THE_MODEL = "(loss)"  # no module can have this name
Mark = tuple[int, str]  # autograd's next number, and the layer that makes nodes from there on


class _Pass(threading.local):
    """A forward pass so far: workers in lockstep have one each, in their threads, as autograd's numbers are."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.marks: list[Mark] = []

    def mark(self, layer: str) -> None:
        """Nodes from here on are this layer's."""
        self.marks.append((torch.autograd._get_sequence_nr(), layer))  # type: ignore[attr-defined]


class Layers:
    """Spans of a model's modules in the passes of one process."""

    def __init__(self, model: nn.Module, recorder: Recorder, compiled: bool) -> None:
        """Nothing is recorded before `install`; of a compiled model only the whole is visible."""
        self._recorder = recorder
        self._names = {model: ""} if compiled else {module: name for name, module in model.named_modules()}
        self._pass = _Pass()

    def install(self, stack: ExitStack) -> None:
        """Record what the modules do until the stack closes."""
        self._pass = _Pass()
        for module, name in self._names.items():
            stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
            stack.callback(module.register_forward_hook(self._after, always_call=True).remove)

    def _before(self, name: str) -> Callable[[nn.Module, Any], None]:
        label = Label("forward", name)

        def hook(module: nn.Module, inputs: object) -> None:
            self._pass.open.append(name)
            self._pass.mark(name)
            self._recorder.open(label)

        return hook

    def _after(self, module: nn.Module, inputs: object, output: object) -> None:
        self._recorder.close()
        self._pass.open.pop()
        self._pass.mark(self._pass.open[-1] if self._pass.open else AFTER_THE_MODEL)

    def follow(self, loss: Tensor) -> None:
        """Have the backward pass from this loss mark the layer it is in, within the span of the loss."""
        marks, self._pass.marks = self._pass.marks, []
        if loss.grad_fn is None:
            return
        self._recorder.open(HIDDEN)
        before = AFTER_THE_MODEL
        for number, node in _from_the_end(loss.grad_fn):
            layer = _layer_of(number, marks)
            if layer != before:
                node.register_prehook(self._enter(layer))
            before = layer
        self._recorder.close()

    def _enter(self, layer: str) -> Callable[..., None]:
        label = Label("backward", layer)

        def hook(gradients: object) -> None:
            self._recorder.close()
            self._recorder.open(label)

        return hook

    def kinds(self) -> dict[str, str]:
        """Every layer's class, by its name, in the model's order; and what backward meets before the model."""
        return {name: type(module).__name__ for module, name in self._names.items()} | {AFTER_THE_MODEL: "loss"}


def _from_the_end(root: Node) -> list[tuple[int, Node]]:
    """The nodes that backward will run, in its order; those that only keep a gradient run with the one before."""
    found: dict[Node, int] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node not in found and node.next_functions:
            found[node] = node._sequence_nr()
            waiting += [function for function, _ in node.next_functions if function is not None]
    return sorted(((number, node) for node, number in found.items()), key=lambda pair: -pair[0])


def _layer_of(number: int, marks: list[Mark]) -> str:
    """The layer that was running when autograd gave out this number."""
    place = bisect.bisect_right(marks, number, key=lambda mark: mark[0])
    return marks[place - 1][1] if place else ""
