"""Muon for matrices and convolution kernels, AdamW for the rest, behind one optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from scalewise.optim.rules import new_moments, refuse_half, update_adam

RULE = "rule"  # the option of a parameter group that says who updates it
MATRICES = ("weight", "kernel")  # in the name of a parameter that is one
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


def matrices(model: nn.Module) -> dict[str, int]:
    """The parameters of a model that map inputs to outputs, and how many matrices each of them stacks.

    Weights and kernels, but not rows to look up or to add. The gates of a recurrent layer are stacked, and so are the
    queries, keys and values of torch's attention: maps of their own, to be made orthogonal one by one.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2), nn.LSTM(4, 5))
    >>> model.register_parameter("positions", nn.Parameter(torch.zeros(5, 4)))
    >>> matrices(model)
    {'1.weight': 1, '2.weight_ih_l0': 4, '2.weight_hh_l0': 4}
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            own = name.rpartition(".")[2]
            looked_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if parameter.ndim >= 2 and not looked_up and any(word in own for word in MATRICES):
                found[name] = _stacked(module, own)
    return found


def _stacked(module: nn.Module, name: str) -> int:
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and name.startswith(("weight_ih", "weight_hh")):
        return 4 if isinstance(module, nn.LSTM | nn.LSTMCell) else 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1
    return 3 if isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight" else 1


def matrix_groups(parameters: Iterable[tuple[str, Tensor]], stacked: Mapping[str, int]) -> list[dict[str, Any]]:
    """Named parameters as groups of a `MatrixOptimizer`: matrices by how many are stacked, and the rest for AdamW."""
    members: dict[int, list[Tensor]] = {}
    for name, parameter in parameters:
        members.setdefault(stacked.get(name, 0), []).append(parameter)
    rest = {"params": members.pop(0, []), RULE: "adamw"}
    return [*({"params": found, "stacked": count} for count, found in members.items()), rest]


def members(param_group: dict[str, Any], optimizer: str) -> list[tuple[Any, bool]]:
    """The members of a parameter group, and whether each is a matrix or a kernel; float16 is refused."""
    given = param_group["params"]
    found = []
    for member in [given] if isinstance(given, Tensor) else list(given):
        tensor = member[1] if isinstance(member, tuple) else member  # as named_parameters() gives them
        refuse_half(optimizer, tensor)
        found.append((member, tensor.ndim >= 2))
    return found


class MatrixOptimizer(Optimizer):
    """One rule for matrices and convolution kernels, AdamW for everything else: what Muon and SOAP share."""

    rule = ""  # its name

    @classmethod
    def groups(cls, model: nn.Module) -> list[dict[str, Any]]:
        """The trainable parameters of a model as groups: its matrices for the rule, the rest for AdamW.

        >>> optimizer = Muon(Muon.groups(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))), lr=0.02)
        >>> [(group["rule"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adamw', 2)]
        """
        trainable = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        return matrix_groups(trainable, matrices(model))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the matrices of a group to the rule and the rest to AdamW."""
        chosen = param_group.get(RULE, self.rule)
        if chosen not in (self.rule, "adamw"):
            raise ValueError(
                f"the rule of a parameter group must be {self.rule} or adamw, got {chosen!r}; leave it out"
            )
        parts: dict[str, list[Any]] = {self.rule: [], "adamw": []}
        for member, is_matrix in members(param_group, type(self).__name__):
            parts[chosen if is_matrix else "adamw"].append(member)
        for rule, found in parts.items():
            if found:
                decay = {"weight_decay": 0.0} if rule == "adamw" else {}
                add = inspect.unwrap(Optimizer.add_param_group)  # its decorator imports torch's compiler, 1.1 s
                add(self, decay | param_group | {"params": found, RULE: rule})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` computes the loss and the gradients again."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group[RULE] == "adamw":
                self._update_others(group, parameters)
                continue
            for parameter in parameters:
                self._update_matrix(group, parameter)
        return loss

    def _update_matrix(self, group: dict[str, Any], weight: Tensor) -> None:
        raise NotImplementedError

    def _update_others(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = new_moments(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        states = [self.state[weight] for weight in weights]
        update_adam(adamw, weights, gradients, states, group["betas"], group["eps"], group["lr"], group["weight_decay"])


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


def whole(tensor: Any) -> Tensor:  # noqa: ANN401  (a DTensor is no Tensor to the type checker)
    """All of a tensor that is split over processes (FSDP2), alike on every one of them."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def part(whole: Tensor, like: Any) -> Tensor:  # noqa: ANN401
    """What a process holds of a whole tensor that is split as `like` is."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
