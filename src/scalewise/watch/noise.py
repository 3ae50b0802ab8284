"""Feeds a noise scale from anyone's own loop: DistributedDataParallel, or gradient accumulation."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scalewise.errors import UsageError
from scalewise.stats import noise_scale as stats
from scalewise.stats.noise_scale import ENOUGH_STEPS
from scalewise.stats.precondition import check_adam_like, preconditioner_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch._C._distributed_c10d import GradBucket
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

LONGEST_WAIT_SECONDS = 1.0
CLOSE_STEPS = ENOUGH_STEPS  # every step of these is looked at, so that a first number comes soon


def norm(gradient: Tensor, out: Tensor | None = None) -> Tensor:
    """‖gradient‖, at least in float32; in `out` if that can hold it."""
    import torch

    if gradient.is_sparse:
        gradient = gradient.detach().coalesce().values()
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    if out is not None and (out.dtype, out.device) != (dtype, gradient.device):
        out = None
    return torch.linalg.vector_norm(gradient.detach(), dtype=dtype, out=out)


class Squares:
    """Squared norms of the gradients of a model's parameters, or of those an optimizer holds, by their numbers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise UsageError(
                "the noise scale needs a model with parameters that are trained, got none that requires a gradient; "
                "watch the model before it is frozen, or another one"
            )
        if optimizer is not None:
            check_adam_like(optimizer)
            named = _held(named, optimizer)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(self.parameters)}
        self.optimizer = optimizer
        self._factors: dict[int, Tensor | None] = {}

    def begin_step(self) -> None:
        """The optimizer has moved, and its state with it."""
        self._factors.clear()

    def norm(self, number: int, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """‖gradient‖, in the optimizer's coordinates if there is one; not a number before its first step.

        A parameter that has never had a gradient has no coordinates and counts for nothing.
        """
        import torch

        if self.optimizer is not None:
            factor = self._factor(number)
            unknown = 0.0 if factor is None and self._has_moved() else torch.nan
            gradient = gradient.new_full((), unknown) if factor is None else gradient.detach() * factor
        return norm(gradient, out)

    def _has_moved(self) -> bool:
        """Whether the optimizer has taken a step with any of the parameters."""
        assert self.optimizer is not None
        return any(self.optimizer.state.get(parameter) for parameter in self.parameters)

    def _factor(self, number: int) -> Tensor | None:
        assert self.optimizer is not None
        if number not in self._factors:
            self._factors[number] = preconditioner_of(self.parameters[number], self.optimizer)
        return self._factors[number]


def _held(named: list[tuple[str, nn.Parameter]], optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer moves: only in them it has coordinates."""
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = [(name, parameter) for name, parameter in named if id(parameter) in moved]
    if not held:
        raise UsageError(
            f"a preconditioned noise scale needs an optimizer of the model's parameters, got a "
            f"{type(optimizer).__name__} that holds none of the {len(named)} that are trained; give the one that moves "
            f"them, or leave optimizer= out"
        )
    return held


def observe(
    scale: NoiseScale,
    names: Sequence[str] | None,
    small: Sequence[float],
    big: Sequence[float],
    groups: int,
    samples: int,
) -> None:
    """Hand one step's L and T to a noise scale; where they come by parameter, to those of its layers too."""
    scale.observe(sum(small), sum(big), groups, samples)
    if names is not None:
        for name, of_small, of_big in zip(names, small, big, strict=True):
            layer = scale.layers.setdefault(name, type(scale)(scale.population))
            layer.every = scale.every
            layer.observe(of_small, of_big, groups, samples)


def _squares(norms: Sequence[Tensor]) -> Tensor:
    """All squares in one go: norms are many and small."""
    import torch

    return torch.stack([*norms]).double().square()


class AccumulationMeter:
    """Sees micro batches' gradients on their way into `.grad`; `step()` after the last one of a step.

    A step that is dropped is forgotten by itself where `zero_grad()` leaves no gradients, as it does unless told not
    to; after `zero_grad(set_to_none=False)` call `discard()`.
    """

    def __init__(
        self,
        scale: NoiseScale,
        model: nn.Module,
        micro_batch: int,
        optimizer: Optimizer | None,
        layers: bool,
        every: int,
    ) -> None:
        from torch.autograd.graph import get_gradient_edge

        self._scale, self._micro_batch, self._layers, self._every = scale, micro_batch, layers, every
        self._squares = Squares(model, optimizer)
        self._norms: list[list[Tensor]] = [[] for _ in self._squares.parameters]
        # Room for the norms, made between steps: what is made in a pass and kept leaves the pass's memory in pieces.
        self._room: list[list[Tensor]] = [[] for _ in self._squares.parameters]
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._squares.parameters]  # live while held
        self._hooks = [self._hook(number) for number in range(len(self._nodes))]
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._compared = False  # whether a step had two micro batches yet
        scale.compared = "micro batches"
        self._look()

    def _hook(self, number: int) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(gradients: tuple[Tensor, ...]) -> None:
            norms, room = self._norms[number], self._room[number]
            if self._squares.parameters[number].grad is None:
                norms.clear()  # what was seen before was of a step that was dropped
            out = room[len(norms)] if len(norms) < len(room) else None
            norms.append(self._squares.norm(number, gradients[0], out))

        return hook

    def _look(self) -> None:
        """See the next step's gradients."""
        self._handles = [node.register_prehook(hook) for node, hook in zip(self._nodes, self._hooks, strict=True)]

    def close(self) -> None:
        """See no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def discard(self) -> None:
        """Forget the micro batches seen since the last step, which is not to be taken."""
        self._forget()

    def step(self) -> None:
        """End a step: call it after the last backward pass, before gradients are clipped and the optimizer steps.

        A step of a single micro batch, as at the end of an epoch, says nothing and is left out.
        """
        looked = bool(self._handles)
        self._steps += 1
        if looked:
            self._measure()
        look = self._steps < CLOSE_STEPS or self._steps % self._every == 0
        if self._steps == CLOSE_STEPS:
            self._scale.every = self._every
        if looked and not look:
            self.close()
        elif look and not looked:
            self._look()

    def _measure(self) -> None:
        gradients = [(number, parameter.grad) for number, parameter in enumerate(self._squares.parameters)]
        for number, gradient in gradients:
            if gradient is None:
                self._norms[number].clear()  # seen in a step that was dropped, and not in this one
        micro_batches = max(len(norms) for norms in self._norms)
        if micro_batches >= 2:
            self._compared = True
            self._compare(micro_batches, gradients)
        self._forget()
        if not self._compared and self._steps >= CLOSE_STEPS:
            raise UsageError(
                f"the noise scale needs at least 2 micro batches in a step, got {micro_batches} in the last of "
                f"{self._steps} steps and never 2; split the batch and call backward() on each part, or use several "
                f"workers (watch_ddp)"
            )

    def _compare(self, micro_batches: int, gradients: list[tuple[int, Tensor | None]]) -> None:
        """Hand the micro batches' squares and that of their sum to the noise scale."""
        import torch

        counts = [len(norms) for norms in self._norms]
        of_parts = _squares([norm for norms in self._norms for norm in norms]) / micro_batches
        seen = [number for number, gradient in gradients if gradient is not None]
        of_sums = _squares(
            [self._squares.norm(number, gradient) for number, gradient in gradients if gradient is not None]
        )
        of_sums /= micro_batches**2
        if self._layers:
            of_parts = torch.stack([squares.sum() for squares in of_parts.split(counts)])
            of_sums = of_sums.new_zeros(len(gradients)).index_copy_(
                0, torch.tensor(seen, device=of_sums.device), of_sums
            )
        else:
            of_parts, of_sums = of_parts.sum(0, keepdim=True), of_sums.sum(0, keepdim=True)
        squares_of_parts, squares_of_sums = torch.stack([of_parts, of_sums]).tolist()
        names = self._squares.names if self._layers else None
        observe(self._scale, names, squares_of_parts, squares_of_sums, micro_batches, self._micro_batch)

    def _forget(self) -> None:
        import torch

        if any(len(norms) > len(room) for norms, room in zip(self._norms, self._room, strict=True)):
            self._room = [[torch.empty_like(norm) for norm in norms] for norms in self._norms]
        self._norms = [[] for _ in self._squares.parameters]
        self._squares.begin_step()


class DistributedMeter:
    """The state of the communication hook: squared norms of this process's gradients and of the average."""

    def __init__(
        self,
        scale: NoiseScale,
        model: DistributedDataParallel,
        worker_batch: int,
        optimizer: Optimizer | None,
        layers: bool,
    ) -> None:
        self._scale, self._worker_batch, self._layers = scale, worker_batch, layers
        self._squares = Squares(model.module, optimizer)
        self._by_parameter = layers or optimizer is not None
        self._group: dist.ProcessGroup = model.process_group
        self.processes: int = self._group.size()
        self._local: list[tuple[list[int], Tensor]] = []
        self._whole: list[tuple[list[int], Tensor]] = []
        self._shared: Tensor | None = None  # kept: no other thread may be the last to hold it when Python ends
        self._exchange: dist.Work | None = None
        self._callbacks: list[weakref.ref[Callable[..., Tensor]]] = []

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """What DistributedDataParallel itself does with a bucket, and the norms before and after it."""
        import torch.distributed as dist

        if bucket.index() == 0:
            self.bring_in()
            self._local, self._whole = [], []  # of a step that broke off
            self._squares.begin_step()
        buffer = bucket.buffer()
        numbers, gradients = self._watched(bucket) if self._by_parameter else ([], [buffer])
        self._local.append((numbers, self._norms(numbers, gradients)))
        if bucket.is_last():
            self._start_exchange()
        # Not torch's own hook: importing it in the middle of a job keeps the process group alive (docs/log.md).
        work = dist.all_reduce(buffer.div_(self.processes), group=self._group, async_op=True)
        assert work is not None

        def with_norms(done: Future[list[Tensor]]) -> Tensor:
            self._whole.append((numbers, self._norms(numbers, gradients)))
            return done.value()[0]

        self._callbacks.append(weakref.ref(with_norms))
        return work.get_future().then(with_norms)

    def _watched(self, bucket: GradBucket) -> tuple[list[int], list[Tensor]]:
        """Numbers and gradients, parts of the bucket's buffer, of the parameters that are measured."""
        known = self._squares.numbers
        both = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        kept = [(known[parameter], gradient) for parameter, gradient in both if parameter in known]
        return [number for number, _ in kept], [gradient for _, gradient in kept]

    def _norms(self, numbers: list[int], gradients: Sequence[Tensor]) -> Tensor:
        import torch

        if not self._by_parameter:
            return norm(gradients[0]).double().square()[None]
        if not numbers:
            return torch.zeros(0, dtype=torch.float64, device=self._squares.parameters[0].device)
        norms = [self._squares.norm(number, gradient) for number, gradient in zip(numbers, gradients, strict=True)]
        return _squares(norms)

    def _start_exchange(self) -> None:
        """The mean of the processes' local squares, on its way until the next step begins."""
        import torch.distributed as dist

        local = self._table(self._local).div_(self.processes)
        self._shared = local if self._shared is None else self._shared.copy_(local)
        self._exchange = dist.all_reduce(self._shared, group=self._group, async_op=True)

    def _table(self, parts: list[tuple[list[int], Tensor]]) -> Tensor:
        """Squares by parameter, or their sum."""
        import torch

        if not self._layers:
            return torch.stack([squares.sum() for _, squares in parts]).sum(0, keepdim=True)
        whole = parts[0][1].new_zeros(len(self._squares.names))
        for numbers, squares in parts:
            whole[numbers] = squares
        return whole

    def bring_in(self) -> None:
        """Read the last step's numbers: its exchange has long ended, and its averages are there."""
        if self._exchange is None or self._shared is None:
            return
        self._exchange.wait()
        small, big = self._shared.tolist(), self._table(self._whole).tolist()
        names = self._squares.names if self._layers else None
        observe(self._scale, names, small, big, self.processes, self._worker_batch)
        self._local, self._whole, self._exchange = [], [], None
        self._wait_for_callbacks()

    def _wait_for_callbacks(self) -> None:
        """Let the threads that called back let go of Python's objects: they abort if they must after Python has ended.

        They do so within microseconds, unless the processor is busy; mostly this waits for nothing.
        """
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while any(callback() is not None for callback in self._callbacks) and time.monotonic() < deadline:
            time.sleep(1e-4)  # gives the interpreter to other threads
        self._callbacks.clear()


def watch_ddp(
    scale: NoiseScale, model: nn.Module, worker_batch: int, optimizer: Optimizer | None, layers: bool
) -> Callable[[], None]:
    """Register the hook; returns what brings in the newest step's numbers."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"watch_ddp needs a model wrapped in DistributedDataParallel, got a {type(model).__name__}; wrap it, or "
            f"use watch_accumulation on one process"
        )
    meter = DistributedMeter(scale, model, worker_batch, optimizer, layers)
    if meter.processes < 2:
        raise UsageError(
            "watch_ddp compares at least 2 processes, got 1; start more, or split the batch and use watch_accumulation"
        )
    # no annotations: torch compares them with types, and those of this module are text
    model.register_comm_hook(meter, lambda state, bucket: state.reduce(bucket))
    return meter.bring_in


class NoiseScale(stats.NoiseScale):
    """Noise scale of a stream of steps, for anyone's loop.

    It is fed by hand, by `watch_ddp` or by `watch_accumulation`, and read with `estimate()`.

    >>> monitor = NoiseScale()
    >>> monitor.observe(mean_square=3.0, square_of_mean=2.0, groups=2, group_samples=4)
    >>> monitor.current
    8.0
    """

    def watch_ddp(
        self, model: nn.Module, worker_batch: int, optimizer: Optimizer | None = None, layers: bool = False
    ) -> None:
        """Measure in a communication hook of DistributedDataParallel; the averaged gradients stay what they were.

        >>> monitor.watch_ddp(model, worker_batch=32)  # doctest: +SKIP

        Arguments:
            model: wrapped in DistributedDataParallel, on at least 2 processes.
            worker_batch: samples of one process between two steps of the optimizer.
            optimizer: an Adam-like one, to measure the parameters it holds in its own coordinates (`preconditioner`).
            layers: fill `layers` with a noise scale for every parameter.
        """
        self._late.append(watch_ddp(self, model, worker_batch, optimizer, layers))

    def watch_accumulation(
        self,
        model: nn.Module,
        micro_batch: int,
        optimizer: Optimizer | None = None,
        layers: bool = False,
        every: int = 4,
    ) -> AccumulationMeter:
        """Measure from the micro batches of one step; call `step()` of what is returned after the last backward pass.

        A look at a step of 50 ms costs 2 to 4 % of it, so that after the first 20 steps only some are looked at.

        >>> accumulation = monitor.watch_accumulation(model, micro_batch=8)  # doctest: +SKIP

        Arguments:
            model: whose parameters' gradients are watched.
            micro_batch: samples of one backward pass.
            optimizer: an Adam-like one, to measure the parameters it holds in its own coordinates (`preconditioner`).
            layers: fill `layers` with a noise scale for every parameter.
            every: after the first 20 steps look at one in N; 1 looks at all.
        """
        if every < 1:
            raise UsageError(f"every must be at least 1 step, got {every}; 1 looks at every step")
        return AccumulationMeter(self, model, micro_batch, optimizer, layers, every)
