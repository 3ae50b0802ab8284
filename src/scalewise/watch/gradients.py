"""Numbers about gradients: norms, what the loss does to the model's output, and the gradient of half a micro batch.

The last is for the noise scale of a loop that makes one backward pass a step. While backward goes through the model's
output, half of the rows of its gradient are sent through the same graph first. With a loss that is a mean over rows
that gives, scaled, the gradient of those samples alone. The pass that follows is the loop's own. No extra pass is made
where it would run something again (checkpoints, hooks, functions with a backward of their own) or add to a retained
gradient. Should one still move random numbers or buffers, they are put back, and it was the last.

Assumption: batch norm's statistics are those of the whole micro batch in both passes.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

MOST_LABELS = 1000
# A softmax's cross-entropy has output gradients (probabilities − label) that add up to 0 in every sample, to rounding;
# in bfloat16 that is a percent.
BALANCED = 0.02


def norm(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """‖tensor‖, at least in float32; in `out` if that can hold it."""
    tensor = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if out is not None and (out.dtype, out.device) != (dtype, tensor.device):
        out = None
    return torch.linalg.vector_norm(tensor, dtype=dtype, out=out)


def wide(tensor: Tensor) -> torch.dtype:
    """The type to add many numbers in."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # MPS has no float64


def after_backward(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass under way, when gradients are averaged over processes.

    A callback of a callback comes after those that average them.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


def one_number(value: object) -> Tensor | None:
    """A real number as a tensor without dimensions, not read yet; None of anything else.

    >>> one_number(0.5), one_number(torch.ones(3))
    (tensor(0.5000, dtype=torch.float64), None)
    """
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 and not value.is_complex() else None
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, Real) else None


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return isinstance(tensor, DTensor) and any(not place.is_replicate() for place in tensor.placements)


@torch.no_grad()
def square_of(gradients: Iterable[Tensor], processes: int = 1, sharded: bool = False) -> Tensor:
    """‖gradient‖²; of a sharded model this process's part, such that the parts of all processes add up to it.

    A shard that n of P processes hold counts 1 ÷ n on each of them; with s shards that is s ÷ P.
    """
    locals_, shares = [], []
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            shards = math.prod(size for size, place in places if not place.is_replicate())
        locals_.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        shares.append(shards / processes if sharded else 1.0)
    if not locals_:
        return torch.zeros(())
    norms = torch.stack([norm(local).to(locals_[0].device) for local in locals_])
    norms = norms.to(wide(norms))
    if sharded:
        norms = norms * torch.tensor(shares, dtype=norms.dtype, device=norms.device).sqrt()
    return norms @ norms


@dataclass(frozen=True)
class OutputGradient:
    """What a loss did to one output: see `WatchedStep.averaging`; labels counted where it is a cross-entropy."""

    positions: Tensor
    size: Tensor
    labels: Tensor | None


@torch.no_grad()
def output_gradient(gradient: Tensor) -> OutputGradient:
    """Positions with a gradient, the sum of its absolute values, and how many samples have each label.

    The last dimension holds the outputs of one position (a sample, or a token); positions that a mask leaves out have
    no gradient. In a cross-entropy's gradient only the label's entry is negative.

    >>> found = output_gradient(torch.tensor([[-0.5, 0.5], [0.25, -0.25], [0.0, 0.0]]))
    >>> found.positions.item(), found.size.item(), found.labels.tolist()
    (2, 1.5, [1, 1])
    """
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    rows = local.unsqueeze(-1) if local.ndim == 1 else local
    sizes = torch.linalg.vector_norm(rows, 1, dim=-1)
    labels = None
    if rows.ndim == 2 and 2 <= rows.shape[1] <= MOST_LABELS:
        is_label = (rows.sum(-1).abs() <= BALANCED * sizes) & (sizes > 0) & ((rows < 0).sum(-1) == 1)
        labels = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
        labels.index_add_(0, rows.argmin(-1), is_label.to(torch.int64))
    return OutputGradient(sizes.count_nonzero(), sizes.sum(dtype=wide(sizes)), labels)


HALF_BUDGET = 0.005  # share of a step's time that these passes may take
FIRST_STEPS = 160  # in these one in eight is looked at in any case, so that short runs have an estimate too
FIRST_INTERVAL = 8
INTERVALS = (32, 256)
COMPLETE = 0.02  # relative: rounding in bfloat16
LARGEST_BUFFER = 2**20  # elements: larger ones are masks and tables, which no pass moves
OTHER_PATHS = "the loss does not depend on the model's output alone"
OWN_HOOKS = "the model has backward hooks of its own, which a second pass would call too"
MOVES = "a second pass moved random numbers or buffers, which were put back"


@dataclass(frozen=True)
class _Half:
    """The gradient of the first `rows` of `all_rows`, `share` of the loss's weight; of the others too, at first."""

    rows: int
    all_rows: int
    share: Tensor
    gradients: list[Tensor]
    others: list[Tensor] | None


class Halves:
    """Decides on which steps to look, and looks."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._model, self._parameters = model, [*parameters]
        self._interval = INTERVALS[0]
        self._half: _Half | None = None  # of this step's gradient, until all of it is there
        self._complete = False
        self._searched = False  # for what notices a second pass, among all tensors: once
        self.problem: str | None = None  # why there is nothing to see
        self.under_way = False

    def due(self, step: int) -> bool:
        """Whether to look at a step."""
        if self.problem is not None:
            return False
        return step % (FIRST_INTERVAL if step < FIRST_STEPS else self._interval) == 0

    def look(self, output: Tensor, gradient: Tensor) -> None:
        """Take the gradient of the first half of the rows, while backward is at the model's output."""
        self._half = None
        if any(one._backward_hooks for one in self._parameters) or any(
            one._backward_hooks or one._backward_pre_hooks for one in self._model.modules()
        ):
            self.problem = OWN_HOOKS
        if self.problem is not None or len(gradient) < 2:
            return
        self.under_way = True
        try:
            half = self._halve(output, gradient)
            self._half = half if self.problem is None else None
        except RuntimeError as error:  # a compiled graph, for one, can be passed only once
            self.problem = f"a second backward pass failed: {error}"
        finally:
            self.under_way = False

    def _halve(self, output: Tensor, gradient: Tensor) -> _Half | None:
        self.problem, self._searched = what_notices(output, search_tensors=not self._searched), True
        if self.problem is not None:
            return None
        rows = len(gradient) // 2
        with self._as_before():
            half = self._pass(output, gradient, slice(rows))
            other = None if self._complete else self._pass(output, gradient, slice(rows, None))
        share = torch.tensor(rows / len(gradient), device=gradient.device)  # of the loss's weight: of the samples
        if gradient.ndim >= 3:  # or of the tokens that have a gradient
            there = gradient.abs().sum(-1) > 0
            share = there[:rows].sum() / there.sum()
        return _Half(rows, len(gradient), share, half, other)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Put back random numbers and buffers that a pass has moved."""
        buffers = [(one, one.clone()) for one in self._model.buffers() if one.numel() <= LARGEST_BUFFER]
        devices = {one.device for one in self._parameters if one.device.type == "cuda"}
        random = torch.get_rng_state()
        try:
            with torch.random.fork_rng(devices):
                yield
                if not torch.equal(random, torch.get_rng_state()):
                    self.problem = MOVES
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.data.copy_(before)  # data: a graph may hold the buffer at its version
                    self.problem = MOVES

    def _pass(self, output: Tensor, gradient: Tensor, rows: slice) -> list[Tensor]:
        masked = torch.zeros_like(gradient)
        masked[rows] = gradient[rows]
        found = torch.autograd.grad(output, self._parameters, masked, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if one is None else one for p, one in zip(self._parameters, found, strict=True)]

    @torch.no_grad()
    def squares(self) -> tuple[float, Tensor] | None:
        """(samples, mean of both halves' ‖mean gradient‖²) after backward: the other half is what is left of the whole.

        At first both were computed: if they do not add up to the whole, nothing more is looked at.
        """
        half, self._half = self._half, None
        if half is None:
            return None
        whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        rest = [all_of_it - part for all_of_it, part in zip(whole, half.gradients, strict=True)]
        if half.others is not None:
            gap = square_of([left - other for left, other in zip(rest, half.others, strict=True)])
            off = float(gap / square_of(whole))
            self._complete = off <= COMPLETE**2
            if not self._complete:
                self.problem = OTHER_PATHS if math.isfinite(off) else None
                return None
        sizes = 2 / (1 / half.rows + 1 / (half.all_rows - half.rows))
        squares = square_of(half.gradients) / half.share**2 + square_of(rest) / (1 - half.share) ** 2
        return sizes, squares / 2

    def keep_within_budget(self, spent_seconds: float, step_seconds: float) -> None:
        """Look less often where it takes more than its share of a step's time."""
        wanted = spent_seconds / max(HALF_BUDGET * step_seconds, 1e-9)
        shortest, longest = INTERVALS
        self._interval = max(shortest, min(longest, 2 ** math.ceil(math.log2(max(1.0, wanted)))))


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
    saved = (getattr(node, name) for name in _saved_by(type(node)))
    tensors = (one for kept in saved for one in (kept if isinstance(kept, list | tuple) else (kept,)))
    return any(getattr(one, "unpack_hook", None) is not None for one in tensors)


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
