"""Feeds a noise scale from anyone's own loop: DistributedDataParallel, or gradient accumulation.

Hooks of parameters see the gradients of the parts that are compared, processes or micro batches. The gradient of the
whole is in `.grad` after the last backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scalewise.errors import UsageError
from scalewise.stats import noise_scale as stats
from scalewise.stats.noise_scale import ENOUGH_STEPS
from scalewise.stats.precondition import check_adam_like, preconditioner_of
from scalewise.watch.gradients import after_backward, norm, wide

CLOSE_STEPS = ENOUGH_STEPS  # every step of these is looked at, so that a first number comes soon


class Meter:
    """The norms of the gradients of a step's parts, which hooks see, to be compared with that of the whole.

    They are those of a model's parameters, or of the ones that an optimizer holds, by their numbers.
    """

    def __init__(
        self, scale: NoiseScale, model: nn.Module, part_samples: int, optimizer: Optimizer | None, layers: bool
    ) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise UsageError(
                "the noise scale needs a model with parameters that are trained, got none that requires a gradient; "
                "watch the model before it is frozen, or another one"
            )
        if optimizer is not None:
            check_adam_like(optimizer)
            moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            count, named = len(named), [one for one in named if id(one[1]) in moved]  # only there it has coordinates
            if not named:
                raise UsageError(
                    f"a preconditioned noise scale needs an optimizer of the model's parameters, got a "
                    f"{type(optimizer).__name__} that holds none of the {count} that are trained; give the one that "
                    f"moves them, or leave optimizer= out"
                )
        self._scale, self._part_samples, self._layers = scale, part_samples, layers
        self._optimizer = optimizer
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.forget()

    def forget(self) -> None:
        """Begin a step: the optimizer has moved, and its state with it."""
        self._norms: list[list[Tensor]] = [[] for _ in self._parameters]
        self._factors: dict[int, Tensor | None] = {}

    def norm(self, number: int, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """‖gradient‖, in the optimizer's coordinates if there is one; not a number before its first step.

        A parameter that has never had a gradient has no coordinates and counts for nothing.
        """
        if self._optimizer is not None:
            if number not in self._factors:
                self._factors[number] = preconditioner_of(self._parameters[number], self._optimizer)
            factor = self._factors[number]
            if factor is None:
                has_moved = any(self._optimizer.state.get(parameter) for parameter in self._parameters)
                return norm(gradient.new_full((), 0.0 if has_moved else torch.nan), out)
            gradient = gradient.detach() * factor
        return norm(gradient, out)

    def _compared(self) -> tuple[Tensor, Tensor]:
        """Σ‖part‖² and ‖whole‖², by parameter or of all of them."""
        gradients = {number: one.grad for number, one in enumerate(self._parameters) if one.grad is not None}
        parts = self._squared([norm for norms in self._norms for norm in norms])
        whole = self._squared([self.norm(number, gradient) for number, gradient in gradients.items()])
        if not self._layers:
            return parts.sum(0, keepdim=True), whole.sum(0, keepdim=True)
        places = torch.tensor([*gradients], dtype=torch.long, device=whole.device)
        by_parameter = [squares.sum() for squares in parts.split([len(norms) for norms in self._norms])]
        return torch.stack(by_parameter), whole.new_zeros(len(self._norms)).index_copy_(0, places, whole)

    def _squared(self, norms: list[Tensor]) -> Tensor:
        """All squares in one go: norms are many and small."""
        together = torch.stack(norms) if norms else self._parameters[0].new_zeros(0)
        return together.to(wide(together)).square()

    def _observe(self, parts: Tensor, whole: Tensor, groups: int) -> None:
        """Hand one step's L and T to the noise scale; where they come by parameter, to those of its layers too."""
        scale = self._scale
        small, big = torch.stack([parts, whole]).tolist()
        scale.observe(sum(small), sum(big), groups, self._part_samples)
        for name, part, all_of_it in zip(self._names, small, big, strict=True) if self._layers else ():
            layer = scale.layers.setdefault(name, type(scale)(scale.population))
            layer.every = scale.every
            layer.observe(part, all_of_it, groups, self._part_samples)


class AccumulationMeter(Meter):
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
        super().__init__(scale, model, micro_batch, optimizer, layers)
        self._every = every
        # Room for the norms, made between steps: what is made in a pass and kept leaves the pass's memory in pieces.
        self._room: list[list[Tensor]] = [[] for _ in self._parameters]
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]  # live while held
        self._hooks = [self._hook(number) for number in range(len(self._nodes))]
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._met = False  # whether a step had two micro batches yet
        scale.compared = "micro batches"
        self._look()

    def _hook(self, number: int) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(gradients: tuple[Tensor, ...]) -> None:
            norms, room = self._norms[number], self._room[number]
            if self._parameters[number].grad is None:
                norms.clear()  # what was seen before was of a step that was dropped
            out = room[len(norms)] if len(norms) < len(room) else None
            norms.append(self.norm(number, gradients[0], out))

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
        if any(len(norms) > len(room) for norms, room in zip(self._norms, self._room, strict=True)):
            self._room = [[torch.empty_like(norm) for norm in norms] for norms in self._norms]
        self.forget()

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
        for norms, parameter in zip(self._norms, self._parameters, strict=True):
            if parameter.grad is None:
                norms.clear()  # seen in a step that was dropped, and not in this one
        micro_batches = max(len(norms) for norms in self._norms)
        if micro_batches >= 2:
            self._met = True
            parts, whole = self._compared()
            self._observe(parts / micro_batches, whole / micro_batches**2, micro_batches)
        self.discard()
        if not self._met and self._steps >= CLOSE_STEPS:
            raise UsageError(
                f"the noise scale needs at least 2 micro batches in a step, got {micro_batches} in the last of "
                f"{self._steps} steps and never 2; split the batch and call backward() on each part, or use several "
                f"workers (watch_ddp)"
            )


class DistributedMeter(Meter):
    """Compares the gradients of processes with their average; reads a step's numbers when the next one begins."""

    def __init__(
        self,
        scale: NoiseScale,
        model: DistributedDataParallel,
        worker_batch: int,
        optimizer: Optimizer | None,
        layers: bool,
    ) -> None:
        super().__init__(scale, model.module, worker_batch, optimizer, layers)
        self._numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._group: dist.ProcessGroup = model.process_group
        self._averages = False  # whether the next backward pass averages gradients, as that after no_sync() does not
        self._sees = False  # whether such a pass is under way
        self._whole: Tensor | None = None
        self._shared: Tensor | None = None  # kept: no other thread may be the last to hold it when Python ends
        self._exchange: dist.Work | None = None
        model.register_forward_pre_hook(self._before_forward)
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._local_gradient)

    def _before_forward(self, model: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            self._averages, self._sees = bool(model.require_backward_grad_sync), False

    def _local_gradient(self, parameter: Tensor) -> None:
        """See a gradient before it is averaged; with the first one of a pass, wait for the end of the pass."""
        if self._averages:
            self.bring_in()
            self.forget()
            self._averages, self._sees = False, True
            after_backward(self._measure)
        number = self._numbers.get(parameter)
        if self._sees and number is not None and parameter.grad is not None:
            self._norms[number] = [self.norm(number, parameter.grad)]

    def _measure(self) -> None:
        """Start to average the processes' squares; their exchange ends long before the next step begins."""
        self._sees = False
        parts, self._whole = self._compared()
        parts = parts / self._group.size()
        self._shared = parts if self._shared is None else self._shared.copy_(parts)
        self._exchange = dist.all_reduce(self._shared, group=self._group, async_op=True)

    def bring_in(self) -> None:
        """Read the last step's numbers."""
        if self._exchange is not None and self._shared is not None and self._whole is not None:
            self._exchange.wait()
            self._exchange = None
            self._observe(self._shared, self._whole, self._group.size())


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
        """Measure as DistributedDataParallel averages gradients; these stay what they were.

        >>> monitor.watch_ddp(model, worker_batch=32)  # doctest: +SKIP

        Arguments:
            model: wrapped in DistributedDataParallel, on at least 2 processes.
            worker_batch: samples of one process between two steps of the optimizer.
            optimizer: an Adam-like one, to measure the parameters it holds in its own coordinates (`preconditioner`).
            layers: fill `layers` with a noise scale for every parameter.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"watch_ddp needs a model wrapped in DistributedDataParallel, got a {type(model).__name__}; wrap it, "
                f"or use watch_accumulation on one process"
            )
        if model.process_group.size() < 2:
            raise UsageError(
                "watch_ddp compares at least 2 processes, got 1; start more, or split the batch and use "
                "watch_accumulation"
            )
        self._late.append(DistributedMeter(self, model, worker_batch, optimizer, layers).bring_in)

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
