"""One worker's part of a step, computed alone: its samples, its random numbers, its batch-norm statistics.

What it finds are `WorkerNumbers`. `pack` lays those of several workers out as one matrix, which processes exchange at
once, and `StepNumbers.read` gives them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from scalewise.engine.data import streams
from scalewise.engine.data.feed import Feed
from scalewise.engine.processes.team import Gathered
from scalewise.engine.sums.flat import clip_coefficient, sum_of_squares
from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch, Loss, MeanLoss, Number

if TYPE_CHECKING:
    from scalewise.engine.parallel import Setup

Ready = Callable[[int, Tensor], None]  # (number of the parameter, this worker's gradient of it)
LOSS, WEIGHT, SQUARED_NORMS, FIRST_METRIC = range(4)  # columns of a packed row: see `pack`
SIGNAL = -1  # the last column, where no fingerprint follows it


@dataclass(frozen=True)
class WorkerNumbers:
    """What one worker finds in a step, or in one micro batch of it: sums, so that they add up."""

    loss: Number
    weight: Number  # what the mean of the loss divides by: samples, tokens, …
    metrics: Mapping[str, tuple[Number, Number]]  # (sum, weight) by name
    squared_norms: Number = 0.0  # Σ‖mean gradient of a micro batch‖²; 0 where norms are not taken
    signal: int = 0  # that the worker's process received, or 0
    fingerprint: tuple[float, ...] = ()  # of its process's weights before the step; empty where they are not compared

    @classmethod
    def of(cls, loss: Loss | MeanLoss) -> WorkerNumbers:
        """Those of one micro batch, before its gradient is known."""
        pairs = loss.pairs()
        return cls(*pairs.pop("loss"), pairs)

    def __add__(self, other: WorkerNumbers) -> WorkerNumbers:
        """The numbers of several micro batches, with those of one more."""
        pairs = zip(self.metrics.items(), other.metrics.values(), strict=True)
        metrics = {name: (mine[0] + its[0], mine[1] + its[1]) for (name, mine), its in pairs}
        norms = self.squared_norms + other.squared_norms
        return WorkerNumbers(self.loss + other.loss, self.weight + other.weight, metrics, norms)

    def with_norm(self, square: Number) -> WorkerNumbers:
        """The same with the squared norm of one more gradient."""
        return replace(self, squared_norms=self.squared_norms + square)

    def sums(self) -> list[Number]:
        """(sum, weight) of the loss and of every metric, one after another: see `means`."""
        return [self.loss, self.weight, *chain(*self.metrics.values())]


def pack(
    workers: Sequence[WorkerNumbers], device: torch.device, signal: int, fingerprint: Sequence[int] = ()
) -> Tensor:
    """One row per worker: loss, weight, squared norms, (sum, weight) of each metric, signal, fingerprint."""
    rows = [
        [one.loss, one.weight, one.squared_norms, *chain(*one.metrics.values()), signal, *fingerprint]
        for one in workers
    ]
    return numbers_tensor(rows, device)


@dataclass(frozen=True)
class StepNumbers:
    """A step's numbers on their way: read them a step late, so that nothing waits."""

    table: Tensor | Gathered  # (worker, number), as `pack` lays it out
    metric_names: Sequence[str]
    squared_norm: Tensor | None  # of the mean gradient, before clipping

    def read(self) -> list[WorkerNumbers]:
        """Every worker's numbers, in order."""
        table = self.table if isinstance(self.table, Tensor) else self.table.wait()
        last = FIRST_METRIC + 2 * len(self.metric_names)
        found = []
        for row in table.tolist():
            pairs = zip(row[FIRST_METRIC:last:2], row[FIRST_METRIC + 1 : last : 2], strict=True)
            metrics = dict(zip(self.metric_names, pairs, strict=True))
            signal, *fingerprint = row[last:]
            square = row[SQUARED_NORMS]
            found.append(WorkerNumbers(row[LOSS], row[WEIGHT], metrics, square, int(signal), tuple(fingerprint)))
        return found

    @property
    def overflows(self) -> bool:
        """Whether the mean gradient is not finite, where that is known without waiting: on a CPU, if measured."""
        square = self.squared_norm
        return square is not None and square.is_cpu and not math.isfinite(square)


class Gradient(Protocol):
    """The mean gradient of a step; a strategy has it."""

    def squared_norm(self) -> Tensor:
        """The same on every process."""

    def mean_gradient(self) -> list[Tensor]:
        """What this process holds of it."""


def step_numbers(
    gradient: Gradient, clip_norm: float | None, measures: bool, table: Tensor | Gathered, names: Sequence[str]
) -> StepNumbers:
    """A step's numbers, with the squared norm of its mean gradient where that is wanted; then it is clipped."""
    if not measures and clip_norm is None:
        return StepNumbers(table, names, None)
    square = gradient.squared_norm()
    if clip_norm is not None:
        coefficient = clip_coefficient(clip_norm, square)
        for part in gradient.mean_gradient():
            part.mul_(coefficient.to(part.dtype))
    return StepNumbers(table, names, square)


@dataclass(frozen=True)
class WorkerStep:
    """One worker's part of a step: its numbers and its gradients."""

    worker: int
    numbers: WorkerNumbers
    gradients: list[Tensor]  # of the parameters, in order; they are overwritten by the next worker


def means(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Σ sum ÷ Σ weight for each name, from rows of such pairs, in order; 0 ÷ 0 is not a number."""
    result = {}
    for number, name in enumerate(names):
        total = sum(row[2 * number] for row in rows)
        weight = sum(row[2 * number + 1] for row in rows)
        result[name] = total / weight if weight else float("nan")
    return result


def precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the model runs forward."""
    return torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()


class Buffers:
    """The buffers of a module from worker to worker of a step; any but `averages` and `counters` must stay as it is."""

    def __init__(self, module: nn.Module, averages: Mapping[str, Tensor], counters: Mapping[str, Tensor]) -> None:
        self._module = module
        kinds = [[*averages.values()], [*counters.values()]]
        self._changing = [(buffers, [buffer.clone() for buffer in buffers]) for buffers in kinds if buffers]
        changing = {id(buffer) for buffers in kinds for buffer in buffers}
        self._fixed = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in changing}
        self.accept()

    def each(self, workers: Iterable[int]) -> Iterator[int]:
        """The workers of a step one after another, each from the same buffers."""
        self.remember()
        for place, worker in enumerate(workers):
            if place:
                self.restore()
            yield worker

    def remember(self) -> None:
        """Note the buffers from which every worker of this step starts."""
        for buffers, starts in self._changing:
            torch._foreach_copy_(starts, buffers)

    def restore(self) -> None:
        """Put the buffers back to where this step's workers start."""
        for buffers, starts in self._changing:
            torch._foreach_copy_(buffers, starts)

    def accept(self) -> None:
        """Take the other buffers as what they are to stay."""
        self._versions = self._fixed_versions()

    def check_fixed(self) -> None:
        """Refuse a buffer that training changed where its value over several workers is not declared."""
        if self._fixed and self._fixed_versions() != self._versions:
            now = self._fixed_versions()
            name = next(name for name in now if now[name] != self._versions.get(name))
            raise TaskError(
                f"buffer {name!r} changed during training, and its value over several workers is not known; declare "
                f"it in the task: buffers={{{name!r}: 'mean'}} (averaged over workers) or 'same' (equal on all)"
            )

    def _fixed_versions(self) -> dict[str, tuple[int, int]]:
        current = dict(self._module.named_buffers())
        return {name: (id(current.get(name)), buffer._version) for name, buffer in self._fixed.items()}


class Workers:
    """Computes the gradients of this process's workers, one after another."""

    def __init__(self, setup: Setup, call: nn.Module, parameters: Sequence[Tensor], feed: Feed) -> None:
        """Nothing is computed yet; `call` is the model, with its trainable parameters, and `feed` its samples."""
        self._task, self._recipe, self._cuts, self._device = setup.task, setup.recipe, setup.cuts, setup.team.device
        self._call, self._parameters, self._feed = call, [*parameters], feed
        adds_up = setup.cuts.most_parts * setup.recipe.micro_batches > 1
        self._sums = [torch.zeros_like(p) for p in self._parameters] if adds_up else []
        self._ready: Ready | None = None
        self._waiting: set[int] = set()
        self._began = False  # whether the sums hold micro batches of this step already

    def listen(self) -> None:
        """Make `gradient(ready=…)` possible: report each parameter's gradient during the backward pass."""
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._ready is not None:
                assert parameter.grad is not None
                self._report(number, parameter.grad)

        return hook

    def _report(self, number: int, gradient: Tensor) -> None:
        assert self._ready is not None
        self._waiting.discard(number)
        if self._sums:
            gradient = self._sums[number].add_(gradient) if self._began else self._sums[number].copy_(gradient)
        self._ready(number, gradient)

    def gradient(
        self,
        step: int,
        worker: int,
        measure: bool,
        ready: Ready | None = None,
        forwarded: Callable[[Number], None] | None = None,
        together: bool = False,
    ) -> tuple[list[Tensor], WorkerNumbers]:
        """The gradients of one worker, scaled by 1 ÷ worker batch, and its numbers.

        Arguments:
            step, worker: which samples and random numbers.
            measure: whether to take the norm of every micro batch's gradient.
            ready: receives each parameter's gradient as it comes, in the last backward pass.
            forwarded: receives the worker's weight once it is known, before the last backward pass.
            together: whether other workers run in lockstep with it, so that nothing may be shared with them.
        """
        sums = [torch.empty_like(part) for part in self._sums] if together else self._sums
        numbers: WorkerNumbers | None = None
        gradients: list[Tensor] = []
        for loss, found, last in self.passes(step, worker, together):
            began = self._began = numbers is not None
            numbers = found if numbers is None else numbers + found
            if last and forwarded is not None:
                forwarded(numbers.weight)
            gradients = self._gradients_alone(loss) if together else self._backward(loss, ready if last else None)
            if measure:
                share_of_mean = self._recipe.worker_batch / found.weight
                numbers = numbers.with_norm(self._square_norm(gradients) * share_of_mean**2)
            if sums and not (last and ready):
                (torch._foreach_add_ if began else torch._foreach_copy_)(sums, gradients)
        assert numbers is not None
        return sums or gradients, numbers

    def passes(
        self, step: int, worker: int, together: bool = False
    ) -> Iterator[tuple[Loss | MeanLoss, WorkerNumbers, bool]]:
        """For each micro batch of a worker: its loss, its numbers, and whether it is the last."""
        streams.seed_everything(streams.key("worker", self._recipe.seed, step, worker), self._device)
        count = self._cuts.micro_batches(step)
        batches: Iterable[Batch] = (self._feed.batch(step, worker, micro) for micro in range(count))
        for number, batch in enumerate([*batches] if together else batches, 1):
            loss = self._forward(batch)
            yield loss, self._numbers(loss), number == count

    def _forward(self, batch: Batch) -> Loss | MeanLoss:
        with precision(self._recipe, self._device):
            return self._task.evaluate(self._call, batch, self._recipe.label_smoothing)

    def _backward(self, loss: Loss | MeanLoss, ready: Ready | None) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        if ready is not None:
            self._ready, self._waiting = ready, set(range(len(self._parameters)))
        loss.root(self._recipe.worker_batch).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if ready is not None:
            for number in sorted(self._waiting):  # the loss did not depend on these
                self._report(number, gradients[number])
            self._ready = None
        return gradients

    def _gradients_alone(self, loss: Loss | MeanLoss) -> list[Tensor]:
        """The gradients without a trace in the parameters, which other workers' backward passes use too."""
        found = torch.autograd.grad(loss.root(self._recipe.worker_batch), self._parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, found, strict=True)]

    def _numbers(self, loss: Loss | MeanLoss) -> WorkerNumbers:  # a phase of its own in profiles
        return WorkerNumbers.of(loss)

    def _square_norm(self, gradients: list[Tensor]) -> Number:
        return square_of(torch._foreach_norm(gradients))


def square_of(norms: Sequence[Tensor]) -> Number:
    """The squared norm of everything from the norms of its parts, in order."""
    square = sum_of_squares(torch.stack([*norms]))
    return float(square) if square.is_cpu else square


def numbers_tensor(rows: Sequence[Sequence[Number]], device: torch.device) -> Tensor:
    """Rows of numbers and one-element tensors as one float64 matrix (float32 on MPS, which has no float64)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if device.type == "cpu" or not rows:
        return torch.tensor([[float(value) for value in row] for row in rows], dtype=dtype, device=device)
    values = [torch.as_tensor(value, dtype=dtype, device=device).detach() for row in rows for value in row]
    return torch.stack(values).view(len(rows), -1)
