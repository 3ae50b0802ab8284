"""Schedule-Free AdamW: gradients at one point, the weights to use at another, no schedule between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.rules import matrices, members


def share_of_newest(lr: float, largest_lr: float, weight_sum: float) -> tuple[float, float, float]:
    """c, the weight of the newest z in the mean x: the largest rate so far, squared, ÷ the sum of these over all steps.

    So a warm-up counts little, and a rate that falls afterwards counts as before. Then come the largest rate and the
    sum, which the next step needs.

    >>> share_of_newest(0.5, largest_lr=0.5, weight_sum=0.75)
    (0.25, 0.5, 1.0)
    """
    largest_lr = max(largest_lr, lr)
    weight_sum += largest_lr**2
    return (largest_lr**2 / weight_sum if weight_sum else 0.0), largest_lr, weight_sum


def direction(gradient: Tensor, moments: Tensor, step: int, beta2: float, eps: float) -> Tensor:
    """g ÷ (√v̂ + ε), with v ← β₂·v + (1 − β₂)·g²."""
    moments.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return gradient / (moments.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)


def move(y: Tensor, z: Tensor, along: Tensor, lr: float, beta1: float, share: float) -> None:
    """z ← z − lr·d; x ← (1 − c)·x + c·z; y ← (1 − β₁)·z + β₁·x, without x.

    With the old y and z that is y ← (1 − c)·y + c·z − lr·(1 − β₁·(1 − c))·d.
    """
    y.lerp_(z, share).add_(along, alpha=-lr * (1 - beta1 * (1 - share)))
    z.add_(along, alpha=-lr)


def mean(y: Tensor, z: Tensor, beta1: float) -> Tensor:
    """x, from y = (1 − β₁)·z + β₁·x."""
    return y.lerp(z, 1 - 1 / beta1)


class ScheduleFree(Optimizer):
    """Schedule-Free AdamW (Defazio et al. 2024): a constant rate that ends as well as one that falls.

    The weights are y while training, where gradients are taken: between z, which takes the steps, and x, the mean of
    all z, which is the model to evaluate and to store.

    >>> weight = torch.tensor([1.0], requires_grad=True)
    >>> optimizer = ScheduleFree([weight], lr=0.1)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> optimizer.eval()  # x: the mean of z = 0.9 and 0.8
    >>> round(weight.item(), 4)
    0.85
    >>> optimizer.train()  # y = 0.1·z + 0.9·x
    >>> round(weight.item(), 4)
    0.845

    Call `eval()` before evaluating or storing the model, and `train()` before the next step. Batch-norm statistics
    belong to y: recompute them for x.

    Arguments:
        parameters: as for any torch optimizer. Each group becomes two: matrices and kernels, and the rest.
        lr: one that rises in a warm-up helps; it need not fall.
        betas: how far y is from z to x, above 0; of the squared gradients.
        weight_decay: of matrices and kernels, decoupled, at y. The rest has none, unless its group says so;
            `ScheduleFree.groups(model)` leaves embeddings and positions out too.
    """

    def __init__(
        self,
        parameters: ParamsT,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 < betas[0] < 1:
            raise RecipeError(f"the first of betas must be above 0 and below 1, got {betas[0]}; 0.9 is usual")
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        """The trainable parameters of a model as two groups: its matrices, and the rest, which do not decay."""
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        decaying = matrices(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parts[name in decaying].append(parameter)
        return [{"params": parts[True]}, {"params": parts[False], "weight_decay": 0.0}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices of a group, and the rest without decay."""
        found = members(param_group, type(self).__name__)
        for wanted, decay in ((True, {}), (False, {"weight_decay": 0.0})):
            parameters = [member for member, is_matrix in found if is_matrix is wanted]
            if parameters:
                super().add_param_group({**decay, "trains": True, **param_group, "params": parameters})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` computes the loss and the gradients again."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["trains"]:
                raise RecipeError("step() needs the weights in training mode, got those of eval(); call train() first")
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(group, weight)
        return loss

    def _update(self, group: dict[str, Any], weight: Tensor) -> None:
        state, (beta1, beta2), lr = self.state[weight], group["betas"], float(group["lr"])
        if not state:
            state.update(step=torch.tensor(0.0), largest_lr=0.0, weight_sum=0.0)
            state.update(z=weight.detach().clone(), exp_avg_sq=torch.zeros_like(weight))
        assert weight.grad is not None
        state["step"].add_(1)
        share, state["largest_lr"], state["weight_sum"] = share_of_newest(lr, state["largest_lr"], state["weight_sum"])
        along = direction(weight.grad, state["exp_avg_sq"], int(state["step"]), beta2, group["eps"])
        if group["weight_decay"]:
            along.add_(weight, alpha=group["weight_decay"])
        move(weight, state["z"], along, lr, beta1, share)

    @torch.no_grad()
    def train(self) -> None:
        """Put y into the weights, where gradients are taken; they are at the start."""
        self._put(True)

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the weights: the model to evaluate and to store."""
        self._put(False)

    def _put(self, trains: bool) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["trains"] is not trains else ():
                state = self.state.get(weight)
                if state and trains:
                    weight.copy_(state.pop("y"))
                elif state:
                    state["y"] = weight.detach().clone()  # its own bytes: an evaluation does not change the training
                    weight.copy_(mean(weight, state["z"], group["betas"][0]))
            group["trains"] = trains
