"""The layers of a model, forward and backward, as spans.

Forward, every module has hooks. Backward, autograd's nodes carry numbers that count up as forward creates them, so a
node's number says in which module's forward it was made; a hook before each node at which the module changes marks
when backward reaches it. That sees in-place operations, views and operations outside any layer, which torch's own
backward hooks for modules do not. A CPU runs the nodes from the highest number down (autograd's
own priority), one at a time.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from scalewise.runs.profile.spans import Label, Recorder

BOOKKEEPING = Label("", hidden=True)
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
        self._handles: list[RemovableHandle] = []
        self._pass = _Pass()

    def install(self) -> None:
        """Record what the modules do from now on."""
        self._pass = _Pass()
        for module, name in self._names.items():
            self._handles.append(module.register_forward_pre_hook(self._before(name)))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
        self._recorder.open(BOOKKEEPING)
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
