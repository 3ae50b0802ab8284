"""A torch optimizer as somebody has set it up, read as a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from scalewise.errors import TaskError
from scalewise.recipe import Recipe

WAY_OUT = "say how it is learned with recipe=sw.Recipe(optimizer=…, lr=…, worker_batch=…, epochs=…)"


def recipe_of(optimizer: Optimizer, worker_batch: int, epochs: float) -> Recipe:
    """The single-worker recipe of SGD (with momentum or Nesterov's), Adam or AdamW.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    >>> recipe_of(optimizer, worker_batch=32, epochs=5.0).optimizer
    'momentum'
    """
    group = _only_group(optimizer)
    fields: dict[str, Any] = {"worker_batch": worker_batch, "epochs": float(epochs), "lr": float(group["lr"])}
    fields["weight_decay"] = float(group.get("weight_decay", 0.0))
    if type(optimizer) is torch.optim.SGD:
        fields |= _sgd(group)
    elif type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = group["betas"]
        name = "adamw" if type(optimizer) is torch.optim.AdamW else "adam"
        fields |= {"optimizer": name, "beta1": float(beta1), "beta2": float(beta2), "epsilon": float(group["eps"])}
    else:
        raise _unreadable(f"a {type(optimizer).__name__}")
    if group.get("amsgrad") or group.get("maximize") or group.get("dampening"):
        raise _unreadable("amsgrad, maximize or dampening")
    return Recipe(**fields)


def _sgd(group: dict[str, Any]) -> dict[str, Any]:
    if not group["momentum"]:
        return {"optimizer": "sgd"}
    return {"optimizer": "nesterov" if group["nesterov"] else "momentum", "momentum": float(group["momentum"])}


def _only_group(optimizer: Optimizer) -> dict[str, Any]:
    """The settings of all parameter groups, where they are the same."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(other != settings[0] for other in settings[1:]):
        raise _unreadable("parameter groups with different settings")
    return settings[0]


def _unreadable(got: str) -> TaskError:
    return TaskError(
        f"a recipe can be read from torch.optim's SGD, Adam and AdamW with the same settings for all parameters, got "
        f"{got}; {WAY_OUT}"
    )
