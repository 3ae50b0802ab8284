"""SOAP for matrices and convolution kernels, AdamW for the rest, behind one optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from scalewise.errors import RecipeError
from scalewise.optim.rules import MatrixOptimizer, new_moments, part, whole

SIDES = {"left": 0, "right": 1}  # of a matrix: its outputs and its inputs
ROUND_OFF = 100  # ulps of the largest √v̂, below which what a turned gradient has is round-off, and no reason to move


def eigenbasis(square: Tensor) -> Tensor:
    """The eigenvectors of a symmetric matrix as columns, from the largest eigenvalue to the smallest.

    >>> eigenbasis(torch.diag(torch.tensor([1.0, 4.0]))).abs().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    return torch.linalg.eigh(square.cpu().double()).eigenvectors.flip(1).to(square).contiguous()


def turned(square: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The basis after one step of orthogonal iteration, and the order in which it takes the old columns.

    Columns are sorted by their estimated eigenvalues first, so that they stay the same ones: Q ← qr(A·Q).
    """
    wide, columns = square.cpu().double(), basis.cpu().double()
    product = wide @ columns
    order = (product * columns).sum(0).argsort(descending=True, stable=True)
    found = torch.linalg.qr(product[:, order]).Q.to(basis)
    return found.contiguous(), order.to(basis.device)  # by rows, as it is stored: the layout changes bytes of products


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al. 2024) for matrices and convolution kernels, AdamW for everything else.

    Adam in a basis in which its view of each coordinate by itself is right: the eigenvectors of the running means of
    g·gᵀ and gᵀ·g, which Shampoo (Gupta et al. 2018) also takes. The basis is renewed every few steps by one step of
    orthogonal iteration. The first gradient only gives a basis: nothing moves in the first step. A convolution kernel
    is the matrix from all inputs of a position to its outputs.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = SOAP(layer.parameters(), lr=1e-3)
    >>> [group["rule"] for group in optimizer.param_groups]
    ['soap', 'adamw']

    Arguments:
        parameters: as for any torch optimizer. Each group becomes two: matrices and kernels, and the rest. A group may
            choose `rule="adamw"` for its matrices too; `SOAP.groups(model)` does so for embeddings and positions.
        betas, eps: of Adam; the second beta also of the means that the basis comes from.
        weight_decay: of matrices and kernels, decoupled. The rest has none, unless its group says so.
        every: steps between two renewals of the basis.
        largest: a side of a matrix that is longer keeps its own coordinates; where both are, that is AdamW.
    """

    rule = "soap"

    def __init__(
        self,
        parameters: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        every: int = 10,
        largest: int = 2048,
    ) -> None:
        if every < 1:
            raise RecipeError(f"every must be at least 1 step, got {every}; 10 is usual")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, options | {"every": every, "largest": largest})

    def _update_matrix(self, group: dict[str, Any], weight: Tensor) -> None:
        """m ← β₁·m + (1 − β₁)·g; v ← β₂·v + (1 − β₂)·(LᵀgR)²; w ← (1 − lr·λ)·w − lr·L·(Lᵀm̂R ÷ (√v̂ + ε))·Rᵀ."""
        state, (beta1, beta2) = self.state[weight], group["betas"]
        gradient = _matrix(weight.grad)
        if "step" not in state:
            if weight.dtype == torch.bfloat16:
                raise RecipeError(
                    "SOAP needs weights in float32 or float64, got bfloat16, in which a basis is not orthogonal; keep "
                    "the weights in float32 and compute under torch.autocast"
                )
            state.update(new_moments(weight))
            sides = {name: side for name, side in SIDES.items() if gradient.size(side) <= group["largest"]}
            for name, side in sides.items():
                state[name] = _square(gradient, side) * (1 - beta2)
                state[f"{name}_basis"] = eigenbasis(state[name])
            if sides:
                return
        state["step"].add_(1)
        step = int(state["step"])
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        seen = _forth(state, gradient)
        state["exp_avg_sq"].lerp_(_like(seen.square(), weight), 1 - beta2)
        moved = _forth(state, _matrix(state["exp_avg"])) / (1 - beta1**step)
        size = _matrix(state["exp_avg_sq"]).sqrt() / math.sqrt(1 - beta2**step)
        if any(name in state for name in SIDES):
            size.clamp_(min=ROUND_OFF * torch.finfo(size.dtype).eps * size.max())
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(_like(_back(state, moved / size.add_(group["eps"])) * group["lr"], weight))
        for name, side in SIDES.items():
            if name in state:
                state[name].lerp_(_square(gradient, side), 1 - beta2)
                if step % group["every"] == 0:
                    self._turn(state, name, side)

    def _turn(self, state: dict[str, Any], name: str, side: int) -> None:
        """Renew the basis of a side; the second moments follow their columns."""
        state[f"{name}_basis"], order = turned(state[name], state[f"{name}_basis"])
        moments = state["exp_avg_sq"]
        moments.copy_(_like(_matrix(moments).index_select(side, order), moments))


def _matrix(tensor: Any) -> Tensor:  # noqa: ANN401  (a DTensor is no Tensor to the type checker)
    """From all inputs of a position to the outputs, whole."""
    return whole(tensor).flatten(1)


def _like(matrix: Tensor, weight: Tensor) -> Tensor:
    """A matrix in the shape of the weights that it is for."""
    return part(matrix.view(weight.shape), weight)


def _square(gradient: Tensor, side: int) -> Tensor:
    """g·gᵀ or gᵀ·g."""
    return gradient @ gradient.T if side == 0 else gradient.T @ gradient


def _forth(state: dict[str, Any], matrix: Tensor) -> Tensor:
    """Into the basis: Lᵀ·a·R."""
    found = state["left_basis"].T @ matrix if "left_basis" in state else matrix
    return found @ state["right_basis"] if "right_basis" in state else found


def _back(state: dict[str, Any], matrix: Tensor) -> Tensor:
    """Out of the basis: L·a·Rᵀ."""
    found = state["left_basis"] @ matrix if "left_basis" in state else matrix
    return found @ state["right_basis"].T if "right_basis" in state else found
