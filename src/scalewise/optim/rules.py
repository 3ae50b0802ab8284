"""What optimizers share: layer-wise rates from norms, Adam's kernel, and which parameters are matrices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from scalewise.errors import RecipeError


def trust_ratio(weight_norm: float, update_norm: float, largest: float | None = None) -> float:
    """‖w‖ ÷ ‖update‖, or 1 where either is 0 (LAMB, You et al. 2020); never above `largest`.

    >>> trust_ratio(6.0, 2.0), trust_ratio(0.0, 2.0), trust_ratio(6.0, 2.0, largest=2.5)
    (3.0, 1.0, 2.5)
    """
    ratio = weight_norm / update_norm if weight_norm and update_norm else 1.0
    return ratio if largest is None else min(ratio, largest)


def trust_ratios(weight_norms: Tensor, update_norms: Tensor, largest: float | None = None) -> Tensor:
    """`trust_ratio` of many layers at once, without waiting for their device."""
    known = (weight_norms != 0) & (update_norms != 0)
    ratios = torch.where(known, weight_norms / update_norms, 1.0)
    return ratios if largest is None else ratios.clamp(max=largest)


def local_rate(weight_norm: float, gradient_norm: float, trust: float, decay: float) -> float:
    """η‖w‖ ÷ (‖g‖ + β‖w‖), or 1 where either norm is 0 (LARS, You et al. 2017), with trust η and weight decay β.

    >>> local_rate(2.0, 3.0, trust=0.01, decay=0.5)
    0.005
    """
    if not weight_norm or not gradient_norm:
        return 1.0
    return trust * weight_norm / (gradient_norm + decay * weight_norm)


def local_rates(weight_norms: Tensor, gradient_norms: Tensor, trust: float, decay: float) -> Tensor:
    """`local_rate` of many layers at once, without waiting for their device."""
    known = (weight_norms != 0) & (gradient_norms != 0)
    return torch.where(known, trust * weight_norms / (gradient_norms + decay * weight_norms), 1.0)


def update_adam(
    kernel: Callable[..., None],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    betas: tuple[float, float],
    eps: float,
    lr: float,
    decay: float = 0.0,
) -> None:
    """Adam's step for many layers, moments included, by a kernel of torch: `adam`, `adamw` or `_fused_adamw_`.

    The last two: w ← (1 − lr·decay)·w − lr·r.
    """
    kernel(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def new_moments(weight: Tensor) -> dict[str, Tensor]:
    """Adam's state before its first step."""
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def refuse_half(optimizer: str, weight: Tensor) -> None:
    """Refuse float16 where squared gradients are kept: those below 6e-8 are 0 in it, and Adam's ε is too."""
    if weight.dtype == torch.float16:
        raise RecipeError(
            f"{optimizer} needs weights in float32, bfloat16 or float64, got float16, in which squared gradients "
            f"vanish; keep the weights in float32 and compute under torch.autocast"
        )


LONGEST_SUM = 1 << 18  # elements: a float32 sum of this many squares is right to about 1e-6, of ten million to 1e-4
Array = np.ndarray[tuple[int], np.dtype[np.floating[Any]]]
HALF = (torch.bfloat16, torch.float16)


class Vector:
    """A tensor's memory in one dimension; the tensor must fill it without gaps, in whatever order of dimensions.

    Views are kept from step to step: for a tensor of some thousand elements making them takes longer than using them.
    """

    __slots__ = ("address", "array", "dtype", "stride", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.address, self.stride, self.dtype = tensor.data_ptr(), tensor.stride(), tensor.dtype
        self.tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
        self.array: Array = self.tensor.numpy()

    def fits(self, tensor: Tensor, gradient: Tensor) -> bool:
        """Whether the tensor is where it was, and its gradient lies as it does."""
        return (
            tensor.data_ptr() == self.address
            and tensor.numel() == len(self.array)
            and gradient.stride() == self.stride
            and gradient.dtype == self.dtype
        )


def norm(array: Array) -> float:
    """The 2-norm of a vector; numpy's dot took half of the time of torch.dot, a third of that of vector_norm."""
    if array.size <= LONGEST_SUM:
        return math.sqrt(array.dot(array))
    parts = [array[start : start + LONGEST_SUM] for start in range(0, array.size, LONGEST_SUM)]
    return math.sqrt(sum(float(part.dot(part)) for part in parts))


def memory(tensor: Tensor) -> Array:
    """A tensor's memory in one dimension."""
    return tensor.numpy().ravel() if tensor.is_contiguous() else Vector(tensor).array


def norms(parts: list[Tensor], whole: Tensor) -> Tensor:
    """The 2-norms of tensors, (tensor,), of which this process holds `parts` as it holds `whole`'s, on their device."""
    wide = torch.float32 if parts[0].dtype in HALF else parts[0].dtype
    found = torch.stack(torch._foreach_norm(parts, 2, dtype=wide))
    groups = _sharing(whole)
    if not groups:
        return found
    squares = found.double().square()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().to(wide)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor (FSDP2's parameters are such), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def kind(tensor: Tensor) -> tuple[object, ...]:
    """Tensors of the same kind can go through one call, and their norms through one exchange."""
    return (tensor.device, tensor.dtype, getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))


def _sharing(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The process groups over which a DTensor is split; its copies on other processes do not count."""
    placements = getattr(tensor, "placements", ())
    mesh = getattr(tensor, "device_mesh", None)
    return [mesh.get_group(number) for number, place in enumerate(placements) if mesh and place.is_shard()]


RULE = "rule"  # the option of a parameter group that says who updates it
MATRICES = ("weight", "kernel")  # in the name of a parameter that is one


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

        >>> from scalewise.optim import Muon
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
