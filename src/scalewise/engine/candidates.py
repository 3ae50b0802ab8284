"""What auto tries for many workers: an optimizer that uses large batches, or the task's own, over a derived budget.

Pure functions of recipe and number of samples; auto.py trains the candidates. Constants were measured on tasks of
different kinds (docs/methods/auto.md); none of them depends on the task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from scalewise.errors import RecipeError
from scalewise.recipe import Derived, OptimizerName, Recipe, fitting_lr, fitting_rule

OWN = "own"
DEFAULT_CANDIDATES = ("muon", OWN)
GROWTH = 0.39  # samples of N workers are this times √N those of one: 1.1 times at 8, 2.2 times at 32
LEAST_STEPS = 100  # fewer updates do not suffice, however large the global batch
MUON_LR, MUON_STEPS = 0.05, 200  # its rate for trainings of that length; it falls with the root of the steps
MUON_RATES = 0.01, 0.1
MUON_MOMENTUM = 0.9  # 0.95 averages over too many of so few steps
MUON_DECAY = 0.3  # the sum of rate × weight decay over a training: what the weights began with ends as 74 %
GENTLER = 2.5  # a second rate, for a task on which the first one is unstable
WARMUP_SHARE = 0.1
MEAN_RATE = {"constant": 1.0, "cosine": 0.5, "linear": 0.5, "step": 0.53}  # over a training, of the peak


@dataclass(frozen=True)
class Budget:
    """How long N workers train: steps and samples, and the steps of a single worker."""

    steps: int
    samples: int
    single_steps: int


@dataclass(frozen=True)
class Candidate:
    """Recipe fields to try, with the reason for each."""

    name: str
    fields: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def derived(self) -> list[Derived]:
        """The values with their reasons."""
        return [Derived(name, value, self.reasons.get(name, "")) for name, value in self.fields.items()]


def budget(recipe: Recipe, samples: int, epochs_fixed: bool) -> Budget:
    """Steps for several workers, from the single worker's epochs.

    The samples grow with the workers, because the noise that a step averages away becomes less useful; never fewer
    than 100 steps, unless one worker takes fewer.

    >>> budget(Recipe(workers=8, worker_batch=32, epochs=6.0), samples=10_000, epochs_fixed=False)
    Budget(steps=259, samples=66304, single_steps=1875)
    """
    single = max(1, round(recipe.epochs * samples / recipe.worker_batch))
    factor = 1.0 if epochs_fixed else max(1.0, GROWTH * math.sqrt(recipe.workers))
    steps = max(1, round(single * factor / recipe.workers))
    if not epochs_fixed:
        steps = max(steps, min(single, LEAST_STEPS))
    return Budget(steps, steps * recipe.global_batch, single)


def check_names(names: Sequence[str]) -> None:
    """Refuse candidates that do not exist."""
    known = (OWN, *get_args(OptimizerName))
    for name in names:
        if name not in known:
            raise RecipeError(f"--candidates needs names out of {', '.join(known)}, got {name!r}; correct it")


def candidates(
    base: Recipe, given: Mapping[str, Any], samples: int, total: Budget, names: Sequence[str]
) -> list[Candidate]:
    """What to try, the most promising first; fields that the user gave are in none of them.

    Arguments:
        base: the task's single-worker recipe.
        given: fields set by the user. An optimizer means that one; a rate without one, the task's own optimizer.
        samples: of the training set.
        total: how long to train.
        names: optimizers, or `own`.
    """
    if "optimizer" in given or "lr" in given:
        names = [OWN]
    optimizer = base.replace(**given).optimizer
    wanted = dict.fromkeys(optimizer if name == OWN else name for name in names)
    found: list[Candidate] = []
    for name in wanted:
        found += _muon(base, given, total) if name == "muon" else [_scaled(name, base, given)]
    return [_with_course(candidate, base, given, samples, total) for candidate in found]


def _muon(base: Recipe, given: Mapping[str, Any], total: Budget) -> list[Candidate]:
    if "lr" in given:
        return [Candidate("muon", {"optimizer": "muon", "lr_rule": "none"})]
    low, high = MUON_RATES
    rate = min(max(MUON_LR * math.sqrt(MUON_STEPS / total.steps), low), high)
    rates = {
        rate: f"{MUON_LR:g} × √({MUON_STEPS} ÷ {total.steps:,} steps): relative to the weights",
        rate / GENTLER: f"{1 / GENTLER:g} of muon's usual rate, which was less stable here",
    }
    fields = {"optimizer": "muon", "lr_rule": "none", "momentum": MUON_MOMENTUM}
    reasons = {
        "optimizer": "moves all directions of a matrix alike, so large batches pay",
        "lr_rule": "the rate is that of the whole run, not of one worker",
        "momentum": "usual for muon",
    }
    return [Candidate("muon", {**fields, "lr": _round(lr)}, reasons | {"lr": reason}) for lr, reason in rates.items()]


def _scaled(name: str, base: Recipe, given: Mapping[str, Any]) -> Candidate:
    """An optimizer by the rule that fits it."""
    own = base.replace(**given).optimizer == name
    fields: dict[str, Any] = {"optimizer": name} if not own or "optimizer" in given else {}
    recipe = base.replace(**{**given, **fields})
    rule = fitting_rule(recipe)
    fields["lr_rule"] = rule
    law = "grows with the root of the batch" if rule == "sqrt" else "grows with the batch"
    reasons = {"lr_rule": f"{recipe.workers} workers average more noise away; {name}'s rate {law}"}
    if "lr" not in given and (rate := fitting_lr(base, {**given, "optimizer": name})):
        fields["lr"], reasons["lr"] = rate.value, rate.reason
    return Candidate(name, fields, reasons | {"optimizer": "asked for" if own else "lowest loss in the race"})


def _with_course(
    candidate: Candidate, base: Recipe, given: Mapping[str, Any], samples: int, total: Budget
) -> Candidate:
    """Add what all candidates share: the budget, a warm-up and a rate that falls to 0; without what was given."""
    workers = base.replace(**given)
    epochs = total.samples / samples
    more = f"{total.samples / (workers.epochs * samples):.2g} times its samples"
    course: dict[str, tuple[Any, str]] = {
        "epochs": (epochs, f"{total.steps:,} steps instead of one worker's {total.single_steps:,}, with {more}"),
        "warmup_epochs": (round(WARMUP_SHARE * epochs, 6), "a tenth of the steps"),
        "schedule": ("cosine", "falls to 0, so that a large rate ends calm"),
    }
    if workers.schedule != "constant":
        del course["schedule"]  # the task's own falls already
    fields = {**candidate.fields, **{name: value for name, (value, _) in course.items()}}
    reasons = {**candidate.reasons, **{name: reason for name, (_, reason) in course.items()}}
    if candidate.name == "muon":
        mean = float(fields.get("lr", workers.lr)) * MEAN_RATE[str(fields.get("schedule", workers.schedule))]
        fields["weight_decay"] = _round(MUON_DECAY / (mean * total.steps))
        reasons["weight_decay"] = f"{MUON_DECAY:g} ÷ the sum of all rates: holds overfitting back"
    return Candidate(
        candidate.name,
        {name: value for name, value in fields.items() if name == "epochs" or name not in given},
        reasons,
    )


def _round(value: float) -> float:
    """Three digits: more would only look exact."""
    return float(f"{value:.3g}")
