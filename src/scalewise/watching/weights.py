"""A look at a model's weights that is the same on every process whose copy is the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalewise.watching.gradients import is_sharded, norm

PLACES = 256


class WeightSample:
    """Up to 256 weights spread over all parameters, and the norm of all."""

    def __init__(self, model: nn.Module) -> None:
        numbers = (parameter for parameter in model.parameters() if parameter.is_floating_point())
        self._whole = [parameter for parameter in numbers if not is_sharded(parameter) and parameter.numel()]
        per_tensor = max(1, PLACES // max(1, len(self._whole)))
        stride = max(1, len(self._whole) // PLACES)
        self._places = [
            (parameter, index)
            for parameter in self._whole[::stride]
            for index in _spread(parameter, min(per_tensor, parameter.numel()))
        ]

    @property
    def possible(self) -> bool:
        """Whether there is a parameter that every process holds whole."""
        return bool(self._places)

    @torch.no_grad()
    def take(self) -> tuple[Tensor, Tensor]:
        """The weights looked at, and the norm of all."""
        device = self._whole[0].device
        values = torch.stack([parameter.detach()[index].float().to(device) for parameter, index in self._places])
        norms = torch.stack([norm(parameter.detach()).to(device) for parameter in self._whole])
        return values, torch.linalg.vector_norm(norms)


def _spread(parameter: Tensor, count: int) -> list[tuple[int, ...]]:
    """Places spread evenly over a parameter, as indices that do not depend on how it lies in memory."""
    flat = torch.linspace(0, parameter.numel() - 1, count, dtype=torch.float64).round().long()
    if not parameter.ndim:
        return [()]
    columns = torch.unravel_index(flat, parameter.shape)
    return [tuple(row) for row in torch.stack(columns, 1).tolist()]
