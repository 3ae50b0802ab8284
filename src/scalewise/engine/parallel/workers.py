"""One worker's gradient, computed alone: its samples, its random numbers, its batch-norm statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from scalewise.engine.data import streams
from scalewise.engine.data.feed import Feed
from scalewise.engine.sums.flat import sum_of_squares
from scalewise.recipe import Recipe
from scalewise.schedules import Cuts
from scalewise.tasks.task import Batch, Loss, MeanLoss, Number, Task

Ready = Callable[[int, Tensor], None]  # (number of the parameter, this worker's gradient of it)


def precision(recipe: Recipe, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the model runs forward."""
    return torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()


class Workers:
    """Computes the gradients of this process's workers, one after another."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        call: nn.Module,
        parameters: Sequence[Tensor],
        feed: Feed,
        cuts: Cuts,
        device: torch.device,
    ) -> None:
        """Nothing is computed yet.

        Arguments:
            task, recipe, device: what is learned, how and where.
            call, parameters: the model, and its trainable parameters.
            feed, cuts: the samples, and how steps cut them.
        """
        self._task, self._recipe, self._call, self._feed, self._device = task, recipe, call, feed, device
        self._cuts = cuts
        self._parameters = [*parameters]
        adds_up = cuts.most_parts * recipe.micro_batches > 1
        self._sums = [torch.zeros_like(p) for p in self._parameters] if adds_up else []
        self._ready: Ready | None = None
        self._waiting: set[int] = set()
        self._began = False  # whether the sums hold micro batches of this step already
        self.metric_names: list[str] = []

    def listen(self) -> None:
        """Make `gradient(ready=…)` possible: tell of each parameter's gradient while backward goes on."""
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._ready is not None:
                assert parameter.grad is not None
                self._tell(number, parameter.grad)

        return hook

    def _tell(self, number: int, gradient: Tensor) -> None:
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
    ) -> tuple[list[Tensor], list[Number]]:
        """The gradients of one worker, scaled by 1 ÷ worker batch, and its numbers.

        Arguments:
            step, worker: which samples and random numbers.
            measure: whether to take the norm of every micro batch's gradient.
            ready: told of each parameter's gradient as it comes, in the last backward pass.
            forwarded: told the worker's weight when it is known, before the last backward pass.
            together: whether other workers are under way in lockstep, so that nothing may be shared with them.

        The numbers are (loss total, weight, Σ‖mean gradient of a micro batch‖², metric totals and weights …).
        """
        recipe = self._recipe
        streams.seed_everything(streams.key("worker", recipe.seed, step, worker), self._device)
        numbers: list[Number] = []
        gradients: list[Tensor] = []
        micro_batches = self._cuts.parts(step) * recipe.micro_batches
        batches: Iterator[Batch] = (self._feed.batch(step, worker, micro) for micro in range(micro_batches))
        sums = self._sums
        if together:
            batches, sums = iter([*batches]), [torch.empty_like(part) for part in sums]
        for micro, batch in enumerate(batches):
            loss = self._forward(batch)
            row = self._row(loss)
            numbers = added(numbers, row)
            last = micro == micro_batches - 1
            if last and forwarded is not None:
                forwarded(numbers[1])
            self._began = micro > 0
            gradients = self._gradients_alone(loss) if together else self._backward(loss, ready if last else None)
            if measure:
                numbers[2] += self._square_norm(gradients) * (recipe.worker_batch / row[1]) ** 2
            if sums and not (last and ready):
                (torch._foreach_add_ if micro else torch._foreach_copy_)(sums, gradients)
        return sums or gradients, numbers

    def passes(self, step: int, worker: int) -> Iterator[tuple[Tensor, list[Number], bool]]:
        """For each micro batch: where backward starts, its numbers as `gradient` has them, whether it is the last."""
        streams.seed_everything(streams.key("worker", self._recipe.seed, step, worker), self._device)
        micro_batches = self._cuts.parts(step) * self._recipe.micro_batches
        for micro in range(micro_batches):
            loss = self._forward(self._feed.batch(step, worker, micro))
            yield loss.root(self._recipe.worker_batch), self._row(loss), micro == micro_batches - 1

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
                self._tell(number, gradients[number])
            self._ready = None
        return gradients

    def _gradients_alone(self, loss: Loss | MeanLoss) -> list[Tensor]:
        """The gradients without a trace in the parameters, which other workers' backward passes use too."""
        found = torch.autograd.grad(loss.root(self._recipe.worker_batch), self._parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, found, strict=True)]

    def _row(self, loss: Loss | MeanLoss) -> list[Number]:
        self.metric_names, row = numbers_of(loss)
        return row

    def _square_norm(self, gradients: list[Tensor]) -> Number:
        return square_of(torch._foreach_norm(gradients))


def numbers_of(loss: Loss | MeanLoss) -> tuple[list[str], list[Number]]:
    """The names of the metrics, and (loss total, weight, 0 for norms to come, metric totals and weights …)."""
    pairs = loss.pairs()
    first, *others = pairs.values()
    return [*pairs][1:], [*first, 0.0, *itertools.chain(*others)]


def square_of(norms: Sequence[Tensor]) -> Number:
    """The squared norm of everything from the norms of its parts, in order."""
    square = sum_of_squares(torch.stack([*norms]))
    return float(square) if square.is_cpu else square


def added(numbers: list[Number], row: list[Number]) -> list[Number]:
    """Numbers of several micro batches, with those of one more."""
    return [sum(pair) for pair in zip(numbers, row, strict=True)] if numbers else row


def numbers_tensor(rows: Sequence[Sequence[Number]], device: torch.device) -> Tensor:
    """Rows of numbers and one-element tensors as one float64 matrix (float32 on MPS, which has no float64)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if device.type == "cpu" or not rows:
        return torch.tensor([[float(value) for value in row] for row in rows], dtype=dtype, device=device)
    values = [torch.as_tensor(value, dtype=dtype, device=device).detach() for row in rows for value in row]
    return torch.stack(values).view(len(rows), -1)
