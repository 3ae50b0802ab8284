"""The gradient of half a micro batch, for the noise scale of a loop that makes one backward pass a step.

While backward goes through the model's output, half of the rows of its gradient are sent through the same graph first:
with a loss that is a mean over rows that gives, scaled, the gradient of those samples alone. Nothing is drawn, counted
or accumulated by it, and the pass that follows is the one that the loop would have made without.

Assumption: batch norm's statistics are those of the whole micro batch in both passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalewise.watching.gradients import norm

BUDGET = 0.005  # share of a step's time that these passes may take
FIRST_STEPS = 160  # in these one in eight is looked at in any case, so that short runs have an estimate too
FIRST_INTERVAL = 8
INTERVALS = (32, 256)
COMPLETE = 0.02  # relative: rounding in bfloat16
OTHER_PATHS = "the loss does not depend on the model's output alone"
OWN_HOOKS = "the model has backward hooks of its own, which a second pass would call too"


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
        if any(one._backward_hooks for one in self._parameters) or any(map(_has_hooks, self._model.modules())):
            self.problem = OWN_HOOKS
        rows = len(gradient) // 2
        if self.problem is not None or rows < 1:
            return
        self.under_way = True
        try:
            half = self._pass(output, gradient, slice(rows))
            other = None if self._complete else self._pass(output, gradient, slice(rows, None))
            self._half = _Half(rows, len(gradient), _share(gradient, rows), half, other)
        except RuntimeError as error:  # a compiled graph, for one, can be passed only once
            self.problem = f"a second backward pass failed: {error}"
        finally:
            self.under_way = False

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
            gap = _square([left - other for left, other in zip(rest, half.others, strict=True)])
            off = float(gap / _square(whole))
            self._complete = off <= COMPLETE**2
            if not self._complete:
                self.problem = OTHER_PATHS if math.isfinite(off) else None
                return None
        sizes = 2 / (1 / half.rows + 1 / (half.all_rows - half.rows))
        squares = _square(half.gradients) / half.share**2 + _square(rest) / (1 - half.share) ** 2
        return sizes, squares / 2

    def keep_within_budget(self, spent_seconds: float, step_seconds: float) -> None:
        """Look less often where it takes more than its share of a step's time."""
        wanted = spent_seconds / max(BUDGET * step_seconds, 1e-9)
        shortest, longest = INTERVALS
        self._interval = max(shortest, min(longest, 2 ** math.ceil(math.log2(max(1.0, wanted)))))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _square(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([norm(gradient) for gradient in gradients])
    return norms @ norms


def _share(gradient: Tensor, rows: int) -> Tensor:
    """The share of the loss's weight in the first rows: of the samples, or of the tokens that have a gradient."""
    if gradient.ndim < 3:
        return torch.tensor(rows / len(gradient), device=gradient.device)
    there = gradient.abs().sum(-1) > 0
    return there[:rows].sum() / there.sum()
