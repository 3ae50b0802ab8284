"""Muon for matrices and convolution kernels, AdamW for the rest, behind one optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from scalewise.optim.rules import MatrixOptimizer, part, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (Jordan et al. 2024)
ITERATIONS = 5
ADAMW_SIZE = 0.2  # root mean square of an AdamW update, relative to its rate (Liu et al. 2025)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to `matrix`: U·Vᵀ of its singular value decomposition U·S·Vᵀ.

    Five Newton–Schulz iterations X ← aX + (bXXᵀ + c(XXᵀ)²)X, which bring singular values to between 0.7 and 1.2.

    >>> orthogonal(torch.diag(torch.tensor([4.0, -1.0]))).diag().sign().tolist()
    [1.0, -1.0]
    """
    linear, cubic, quintic = NEWTON_SCHULZ
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = found @ found.T
        found = linear * found + (cubic * square + quintic * square @ square) @ found
    return found.T if tall else found


class Muon(MatrixOptimizer):
    """Muon (Jordan et al. 2024) for matrices and convolution kernels, AdamW for everything else.

    Muon turns the momentum of a matrix into the nearest orthogonal matrix: every direction moves by the same length.
    A convolution kernel is the matrix from all inputs of a position to its outputs. The step is scaled to the size of
    an AdamW step (Liu et al. 2025), so one learning rate serves both.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = Muon(layer.parameters(), lr=1e-3)
    >>> [group["rule"] for group in optimizer.param_groups]
    ['muon', 'adamw']

    Arguments:
        parameters: as for any torch optimizer. Each group becomes two: matrices and kernels, and the rest. A group may
            choose `rule="adamw"` for its matrices too, or say that `stacked` of them are in one parameter;
            `Muon.groups(model)` does both, for embeddings, positions, gates and torch's attention.
        momentum: of Muon, as Nesterov's.
        betas, eps: of AdamW.
        weight_decay: of matrices and kernels, decoupled. The rest has none, unless its group says so.
    """

    rule = "muon"

    def __init__(
        self,
        parameters: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}; 0.95 is usual")
        options = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, options | {"stacked": 1})

    def _update_matrix(self, group: dict[str, Any], weight: Tensor) -> None:
        """v ← μ·v + (1 − μ)·g; w ← (1 − lr·λ)·w − lr·0.2·√max(rows, columns)·orthogonal((1 − μ)·g + μ·v)."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        assert weight.grad is not None
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(weight.grad, 1 - momentum)
        updates = whole(weight.grad.lerp(buffer, momentum)).flatten(1).chunk(group["stacked"])
        length = group["lr"] * ADAMW_SIZE * math.sqrt(max(updates[0].shape))
        update = torch.cat([orthogonal(update) for update in updates]) if len(updates) > 1 else orthogonal(updates[0])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(part(update.view_as(weight) * length, weight))
