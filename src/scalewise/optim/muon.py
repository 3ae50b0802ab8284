"""Muon for matrices and AdamW for the rest, behind one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from scalewise.optim.rules import refuse_half

RULE = "rule"  # the option of a parameter group that says who updates it


class Muon(Optimizer):
    """torch.optim.Muon (Jordan et al. 2024) for the 2-D weights, torch.optim.AdamW for everything else.

    Muon turns a matrix's momentum into the nearest orthogonal matrix. Its step is scaled to have about the size of an
    AdamW step (Liu et al. 2025), so one learning rate serves both.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = Muon(layer.parameters(), lr=1e-3)
    >>> [group["rule"] for group in optimizer.param_groups]
    ['muon', 'adamw']

    Arguments:
        parameters: as for any torch optimizer. Each group becomes two: its matrices, and the rest. Convolution kernels
            have more than two dimensions and belong to the rest. A group may choose `rule="adamw"` for its matrices
            too, as is usual for embeddings and the last layer.
        momentum: of Muon.
        betas, eps: of AdamW.
        weight_decay: of both, decoupled.
    """

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
        self._inner = _inner(options)
        super().__init__(parameters, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; the two optimizers hold nothing of their own."""
        super().__setstate__(state)
        self._inner = _inner(self.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices of a group to Muon and the rest to AdamW."""
        given = param_group["params"]
        parameters: list[Tensor | tuple[str, Tensor]] = [given] if isinstance(given, Tensor) else list(given)
        parts: dict[str, list[Tensor | tuple[str, Tensor]]] = {"muon": [], "adamw": []}
        chosen = param_group.get(RULE, "muon")
        if chosen not in parts:
            raise ValueError(f"the rule of a parameter group must be muon or adamw, got {chosen!r}; leave it out")
        for parameter in parameters:
            tensor = parameter[1] if isinstance(parameter, tuple) else parameter  # as named_parameters() gives them
            refuse_half("Muon", tensor)
            parts[chosen if tensor.ndim == 2 else "adamw"].append(parameter)
        for rule, members in parts.items():
            if members:
                super().add_param_group(self._inner[rule].defaults | param_group | {"params": members, RULE: rule})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` computes the loss and the gradients again."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            inner = self._inner[group[RULE]]
            whole = [value for value in group["params"] if group[RULE] == "adamw" or not hasattr(value, "to_local")]
            inner.param_groups, inner.state = [group | {"params": whole}], self.state
            inner.step()
            for parameter in group["params"]:
                if group[RULE] == "muon" and hasattr(parameter, "to_local") and parameter.grad is not None:
                    self._update_sharded(group, parameter)
        return loss

    def _update_sharded(self, group: dict[str, Any], parameter: Any) -> None:  # noqa: ANN401  (a DTensor)
        """Muon on a copy of the whole matrix, alike on every process; each takes over what it holds of it."""
        from torch.distributed.tensor import distribute_tensor

        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        matrix, buffer = parameter.full_tensor(), state["momentum_buffer"].full_tensor()
        matrix.grad = parameter.grad.full_tensor()
        inner = self._inner["muon"]
        inner.param_groups, inner.state = [group | {"params": [matrix]}], defaultdict(dict)
        inner.state[matrix]["momentum_buffer"] = buffer
        inner.step()
        for mine, full in ((parameter, matrix), (state["momentum_buffer"], buffer)):
            mine.copy_(distribute_tensor(full, mine.device_mesh, mine.placements, src_data_rank=None))


def _inner(options: dict[str, Any]) -> dict[str, Optimizer]:
    """Who updates what; they get their parameters and state before each step."""
    nothing = [torch.empty(0, 0)]
    lr, decay, momentum = options["lr"], options["weight_decay"], options["momentum"]
    return {
        "muon": torch.optim.Muon(nothing, lr, decay, momentum, adjust_lr_fn="match_rms_adamw"),
        "adamw": torch.optim.AdamW(nothing, lr, options["betas"], options["eps"], decay),
    }
