"""Optimizers by name: a table of functions from parameters and recipe to a torch optimizer.

All are torch's own element-wise kernels in their plain variant, so that a parameter's update does not depend on
where its tensor is cut: the sharded optimizer updates pieces of tensors and must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from scalewise.recipe import OptimizerName, Recipe

Builder = Callable[[Iterable[Tensor], Recipe], Optimizer]


def sgd(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """w ← w − lr·g."""
    return torch.optim.SGD(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)


def momentum(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """v ← μ·v + g; w ← w − lr·v."""
    return torch.optim.SGD(parameters, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def nesterov(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """v ← μ·v + g; w ← w − lr·(g + μ·v)."""
    return torch.optim.SGD(
        parameters, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )


def adam(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam (Kingma and Ba 2015); weight decay joins the gradient."""
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.Adam(parameters, lr=recipe.lr, betas=betas, eps=recipe.epsilon, weight_decay=recipe.weight_decay)


def adamw(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(
        parameters, lr=recipe.lr, betas=betas, eps=recipe.epsilon, weight_decay=recipe.weight_decay
    )


OPTIMIZERS: dict[OptimizerName, Builder] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
}
