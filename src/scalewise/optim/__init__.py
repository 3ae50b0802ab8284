"""Optimizers: LARS, LAMB, Muon, SOAP and Schedule-Free for anyone's loop, and all of them by name.

The table holds functions from parameters and recipe to a torch optimizer. The engine does the same on its flat weights
(engine/update).
May import: recipe, records, errors, files, extras. Public: `LARS`, `LAMB`, `Muon`, `SOAP`,
`ScheduleFree`, `OPTIMIZERS`, `Builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scalewise.optim.lamb import LAMB
from scalewise.optim.lars import LARS
from scalewise.optim.muon import Muon
from scalewise.optim.schedule_free import ScheduleFree
from scalewise.optim.soap import SOAP
from scalewise.recipe import OptimizerName, Recipe

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "SOAP", "Builder", "Muon", "ScheduleFree"]

Builder = Callable[[Any, Recipe], Optimizer]  # parameters, or groups of them


def _rates(recipe: Recipe) -> dict[str, Any]:
    return {"lr": recipe.lr, "weight_decay": recipe.weight_decay}


def _moments(recipe: Recipe) -> dict[str, Any]:
    return {**_rates(recipe), "betas": (recipe.beta1, recipe.beta2), "eps": recipe.epsilon}


def sgd(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """w ← w − lr·g."""
    return torch.optim.SGD(parameters, **_rates(recipe))


def momentum(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """v ← μ·v + g; w ← w − lr·v."""
    return torch.optim.SGD(parameters, **_rates(recipe), momentum=recipe.momentum)


def nesterov(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """v ← μ·v + g; w ← w − lr·(g + μ·v)."""
    return torch.optim.SGD(parameters, **_rates(recipe), momentum=recipe.momentum, nesterov=True)


def adam(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam (Kingma and Ba 2015); weight decay joins the gradient."""
    return torch.optim.Adam(parameters, **_moments(recipe))


def adamw(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(parameters, **_moments(recipe))


def lars(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Momentum with a rate per layer (You et al. 2017)."""
    options = _rates(recipe) | {"momentum": recipe.momentum, "trust_coefficient": recipe.trust_coefficient}
    return LARS(parameters, **options, adapt_vectors=recipe.adapt_vectors)


def lamb(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam's direction with a step per layer (You et al. 2020)."""
    return LAMB(parameters, **_moments(recipe), adapt_vectors=recipe.adapt_vectors)


def muon(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Orthogonalized momentum for matrices (Jordan et al. 2024), AdamW for the rest."""
    return Muon(parameters, **_moments(recipe), momentum=recipe.momentum)


def soap(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """Adam in Shampoo's eigenbasis for matrices (Vyas et al. 2024), AdamW for the rest."""
    return SOAP(parameters, **_moments(recipe))


def schedule_free(parameters: Iterable[Tensor], recipe: Recipe) -> Optimizer:
    """AdamW whose mean over all steps is the model (Defazio et al. 2024)."""
    return ScheduleFree(parameters, **_moments(recipe))


OPTIMIZERS: dict[OptimizerName, Builder] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adam": adam,
    "adamw": adamw,
    "lars": lars,
    "lamb": lamb,
    "muon": muon,
    "soap": soap,
    "schedule-free": schedule_free,
}
