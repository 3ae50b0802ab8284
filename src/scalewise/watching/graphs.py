"""Whether somebody would notice a second backward pass through a graph: what runs again in it, and what is kept."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import lru_cache

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

OWN_FUNCTION = "the model has functions with a backward of their own (a checkpoint, for one), which would run again"
SAVED_ELSEWHERE = "the model keeps tensors by hooks of its own (a checkpoint, for one), which would run again"
RETAINED = "the gradient of a tensor inside of the model is retained, to which a second pass would add"


def what_notices(output: Tensor, search_tensors: bool) -> str | None:
    """What would run again in a second pass from the output on, or keep its gradient; None if nothing is found.

    search_tensors: look for retained gradients too, among all tensors of the program. That takes tens of milliseconds.
    """
    nodes = set()
    for node in _nodes(output):
        if issubclass(type(node), BackwardCFunction):
            return OWN_FUNCTION
        if _has_saved_tensor_hooks(node):
            return SAVED_ELSEWHERE
        nodes.add(node)
    return RETAINED if search_tensors and any(one.grad_fn in nodes for one in _retaining()) else None


def _nodes(output: Tensor) -> Iterator[Node]:
    """Every node of the graph that ends in a tensor, once."""
    waiting = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        fresh = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= fresh
        waiting += fresh


def _has_saved_tensor_hooks(node: Node) -> bool:
    for name in _saved_by(type(node)):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            if getattr(one, "unpack_hook", None) is not None:
                return True
    return False


@lru_cache(maxsize=1024)
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    """Where a kind of node keeps its tensors, as they are saved: to read them unpacked would run the hooks."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _retaining() -> Iterator[Tensor]:
    """Tensors of the program, not parameters, whose gradient is retained."""
    everything = gc.get_objects()
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, Tensor)}
    for one in everything:
        if type(one) in kinds:  # isinstance would wake lazy objects
            with contextlib.suppress(Exception):  # any tensor of the program, however odd
                if one.retains_grad and one.grad_fn is not None:
                    yield one
