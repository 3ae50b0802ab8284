"""SGD and Adam on the flat weights: torch's own kernels in their plain variant.

In that variant a weight's update does not depend on where its tensor is cut: the sharded optimizer updates pieces of
tensors and must give the same bytes. The optimizer classes around the kernels are left out, because they import torch's
compiler: a second of every start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from scalewise.engine.sums.flat import Stretch
from scalewise.recipe import OptimizerName, Recipe


class ElementWiseRule(ABC):
    """An optimizer that treats every weight alike, so that it does not matter where a stretch is cut."""

    def __init__(self, recipe: Recipe, stretches: list[Stretch]) -> None:
        self._recipe, self._stretches = recipe, stretches
        self._weights = [stretch.weights for stretch in stretches]
        self.state: dict[Tensor, dict[str, Tensor]] = {weights: {} for weights in self._weights}

    def step(self, gradient: Tensor, lr: float) -> None:
        """Update the stretches by the flat mean gradient."""
        if self._stretches:
            self._update([stretch.place(gradient) for stretch in self._stretches], lr)

    @abstractmethod
    def _update(self, gradients: list[Tensor], lr: float) -> None: ...


class SgdRule(ElementWiseRule):
    """SGD, with momentum or Nesterov's."""

    def _update(self, gradients: list[Tensor], lr: float) -> None:
        buffers = [self.state[weights].get("momentum_buffer") for weights in self._weights]
        sgd(
            self._weights,
            gradients,
            buffers,
            weight_decay=self._recipe.weight_decay,
            momentum=self._recipe.momentum if self._recipe.optimizer != "sgd" else 0.0,
            lr=lr,
            dampening=0.0,
            nesterov=self._recipe.optimizer == "nesterov",
            maximize=False,
        )
        for weights, buffer in zip(self._weights, buffers, strict=True):
            if buffer is not None:
                self.state[weights]["momentum_buffer"] = buffer


class AdamRule(ElementWiseRule):
    """Adam, or AdamW with its decoupled weight decay."""

    def _update(self, gradients: list[Tensor], lr: float) -> None:
        states = [self._begun(weights) for weights in self._weights]
        update = adamw if self._recipe.optimizer == "adamw" else adam
        update(
            self._weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=self._recipe.beta1,
            beta2=self._recipe.beta2,
            lr=lr,
            weight_decay=self._recipe.weight_decay,
            eps=self._recipe.epsilon,
            maximize=False,
        )

    def _begun(self, weights: Tensor) -> dict[str, Tensor]:
        state = self.state[weights]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        return state


ELEMENT_WISE: dict[OptimizerName, type[ElementWiseRule]] = {
    "sgd": SgdRule,
    "momentum": SgdRule,
    "nesterov": SgdRule,
    "adam": AdamRule,
    "adamw": AdamRule,
}
