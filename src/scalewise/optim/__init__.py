"""Optimizers: LARS, LAMB and Muon for anyone's loop, and all of them by name.

The table holds functions from parameters and recipe to a torch optimizer. The engine does the same on its flat weights
(engine/update).
May import: recipe, records, errors, files, extras. Public: `LARS`, `LAMB`, `Muon`, `OPTIMIZERS`, `Builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from scalewise.optim.lamb import LAMB
from scalewise.optim.lars import LARS
from scalewise.optim.muon import Muon
from scalewise.recipe import OptimizerName, Recipe

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "Builder", "Muon"]

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


def lars(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Momentum with a rate per layer (You et al. 2017)."""
    return LARS(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        trust_coefficient=recipe.trust_coefficient,
        adapt_vectors=recipe.adapt_vectors,
    )


def lamb(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam's direction with a step per layer (You et al. 2020)."""
    return LAMB(
        parameters,
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        adapt_vectors=recipe.adapt_vectors,
    )


def muon(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Orthogonalized momentum for matrices (Jordan et al. 2024), AdamW for the rest."""
    betas = (recipe.beta1, recipe.beta2)
    return Muon(
        parameters,
        lr=recipe.lr,
        momentum=recipe.momentum,
        betas=betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
    )


OPTIMIZERS: dict[OptimizerName, Builder] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
    "lars": lars,
    "lamb": lamb,
    "muon": muon,
}
