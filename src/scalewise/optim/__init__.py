"""Optimizers: LARS, LAMB, Muon, SOAP and Schedule-Free for anyone's loop, and all of them by name.

The table holds functions from parameters and recipe to a torch optimizer. The engine does the same on its flat weights
(engine/update).
May import: recipe, records, errors, files, extras. Public: `LARS`, `LAMB`, `Muon`, `SOAP`,
`ScheduleFree`, `OPTIMIZERS`, `Builder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def _momentum(recipe: Recipe) -> dict[str, Any]:
    return {**_rates(recipe), "momentum": recipe.momentum}


def _layer_wise(recipe: Recipe) -> dict[str, Any]:
    return {"trust_coefficient": recipe.trust_coefficient, "adapt_vectors": recipe.adapt_vectors}


OPTIMIZERS: dict[OptimizerName, Builder] = {
    "sgd": lambda parameters, recipe: torch.optim.SGD(parameters, **_rates(recipe)),
    "momentum": lambda parameters, recipe: torch.optim.SGD(parameters, **_momentum(recipe)),
    "nesterov": lambda parameters, recipe: torch.optim.SGD(parameters, **_momentum(recipe), nesterov=True),
    "adam": lambda parameters, recipe: torch.optim.Adam(parameters, **_moments(recipe)),  # decay joins the gradient
    "adamw": lambda parameters, recipe: torch.optim.AdamW(parameters, **_moments(recipe)),  # decay is decoupled
    "lars": lambda parameters, recipe: LARS(parameters, **_momentum(recipe), **_layer_wise(recipe)),
    "lamb": lambda parameters, recipe: LAMB(parameters, **_moments(recipe), adapt_vectors=recipe.adapt_vectors),
    "muon": lambda parameters, recipe: Muon(parameters, **_moments(recipe), momentum=recipe.momentum),
    "soap": lambda parameters, recipe: SOAP(parameters, **_moments(recipe)),
    "schedule-free": lambda parameters, recipe: ScheduleFree(parameters, **_moments(recipe)),
}
