"""What auto tries for many workers, and how long and how hard the winner trains.

Pure functions of recipe, number of samples and what the race measured; auto.py trains the candidates. Constants were
measured on tasks of different kinds (docs/methods/auto.md); none of them depends on the task.
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
MUON_LR, MUON_STEPS = 0.05, 200  # its rate for trainings of that length; it falls with the root of the steps
MUON_RATES = 0.01, 0.08  # larger ones are unstable in attention
MUON_MOMENTUM = 0.9  # 0.95 averages over too many of so few steps
WARMUP_SHARE = 0.1
MOST_WORKERS = 8  # of trials: what they measure does not depend on how many measure it
MEAN_RATE = {"constant": 1.0, "cosine": 0.5, "linear": 0.5, "step": 0.53}  # over a training, of the peak
CARRIES = 0.2, 0.8  # shares of what is learned that hold for held-out data: memorizing below, learning above
UNKNOWN = sum(CARRIES) / 2  # in between, where nothing was measured


@dataclass(frozen=True)
class Intensity:
    """How hard to train, by how much of what is learned carries over to data that were not trained on.

    A task whose labels are noisy, or whose samples are few, is memorized when it is trained hard: it wants a small
    rate, much decay and few passes. One that carries over wants the opposite.

    Arguments:
        rate: times the usual rate.
        decay: the sum of rate × weight decay over a training; what the weights began with ends as e to minus that.
        samples, growth: of N workers, times those of one: samples · N^growth, at least 1.
        least_steps: fewer updates do not suffice, however large the global batch.
    """

    rate: float
    decay: float
    samples: float
    growth: float
    least_steps: int

    def times(self, workers: int) -> float:
        """Samples of N workers, times those of one."""
        return max(1.0, self.samples * workers**self.growth)


GENTLE = Intensity(
    rate=0.6, decay=2.5, samples=0.55, growth=0.29, least_steps=40
)  # 1.0 times the samples at 8 workers, 1.5 at 32
BOLD = Intensity(rate=1.6, decay=1.0, samples=0.33, growth=0.64, least_steps=100)  # 1.25 times at 8, 3 at 32


def intensity(carried: float) -> Intensity:
    """Between gentle and bold, by the share of what longer trials learn that carries over to held-out data.

    >>> intensity(0.2) == GENTLE, intensity(1.1) == BOLD, round(intensity(0.65).rate, 2)
    (True, True, 1.25)
    """
    low, high = CARRIES
    place = min(max((carried - low) / (high - low), 0.0), 1.0)

    def between(gentle: float, bold: float) -> float:
        return gentle ** (1 - place) * bold**place

    return Intensity(
        between(GENTLE.rate, BOLD.rate),
        between(GENTLE.decay, BOLD.decay),
        between(GENTLE.samples, BOLD.samples),
        GENTLE.growth + place * (BOLD.growth - GENTLE.growth),
        round(between(GENTLE.least_steps, BOLD.least_steps)),
    )


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


def single_steps(recipe: Recipe, samples: int) -> int:
    """Steps that one worker takes for the budget of a recipe."""
    return max(1, round(recipe.epochs * samples / recipe.worker_batch))


def budget(recipe: Recipe, samples: int, epochs_fixed: bool, carried: float) -> Budget:
    """Steps for several workers, from the single worker's epochs and how much carries over.

    The samples grow with the workers, because the noise that a step averages away becomes less useful; never fewer
    than 40 to 100 steps, unless one worker takes fewer.

    >>> budget(Recipe(workers=8, worker_batch=32, epochs=6.0), samples=10_000, epochs_fixed=False, carried=0.3)
    Budget(steps=244, samples=62464, single_steps=1875)
    """
    single = single_steps(recipe, samples)
    factor = 1.0 if epochs_fixed else intensity(carried).times(recipe.workers)
    steps = max(1, round(single * factor / recipe.workers))
    if not epochs_fixed:
        steps = max(steps, min(single, intensity(carried).least_steps))
    return Budget(steps, steps * recipe.global_batch, single)


def check_names(names: Sequence[str]) -> None:
    """Refuse candidates that do not exist."""
    known = (OWN, *get_args(OptimizerName))
    for name in names:
        if name not in known:
            raise RecipeError(f"--candidates needs names out of {', '.join(known)}, got {name!r}; correct it")


def candidate_names(base: Recipe, given: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Optimizers to try, each once; one that was given means that one, a rate alone the task's own optimizer."""
    if "optimizer" in given or "lr" in given:
        names = [OWN]
    own = base.replace(**given).optimizer
    return list(dict.fromkeys(own if name == OWN else name for name in names))


def candidate(
    name: str, base: Recipe, given: Mapping[str, Any], samples: int, steps: int, carried: float | None = None
) -> Candidate:
    """A recipe of an optimizer for a training of so many steps; fields that the user gave are not in it.

    Arguments:
        name: of the optimizer.
        base: the task's single-worker recipe.
        given: fields set by the user.
        samples: of the training set.
        steps: of the training.
        carried: how much of what is learned carries over, once that is measured; by default a rate in between.
    """
    found = _muon(given, steps, carried) if name == "muon" else _scaled(name, base, given)
    return _with_course(found, base, given, samples, steps, carried)


def _muon(given: Mapping[str, Any], steps: int, carried: float | None) -> Candidate:
    fields: dict[str, Any] = {"optimizer": "muon", "lr_rule": "none", "momentum": MUON_MOMENTUM}
    reasons = {
        "optimizer": "moves all directions of a matrix alike, so large batches pay",
        "lr_rule": "the rate is that of the whole run, not of one worker",
        "momentum": "usual for muon",
    }
    if "lr" not in given:
        low, high = MUON_RATES
        times = 1.0 if carried is None else intensity(carried).rate
        fields["lr"] = _round(min(max(times * MUON_LR * math.sqrt(MUON_STEPS / steps), low), high))
        reasons["lr"] = f"relative to the weights, for {steps:,} steps"
        if carried is not None:
            reasons["lr"] += f" and a factor of {times:.2f}, at most {high:g}: {_share(carried)}"
    return Candidate("muon", fields, reasons)


def _share(carried: float) -> str:
    share = f"{min(max(carried, 0.0), 1.0):.0%}"
    return f"of what the second half of the longer trial adds, {share} holds for held-out data"


def _scaled(name: str, base: Recipe, given: Mapping[str, Any]) -> Candidate:
    """An optimizer by the rule that fits it."""
    own = base.replace(**given).optimizer == name
    fields: dict[str, Any] = {"optimizer": name} if not own or "optimizer" in given else {}
    rate = fitting_lr(base, {**given, "optimizer": name})
    recipe = base.replace(**{**given, **fields, **({"lr": rate.value} if rate else {})})
    rule = fitting_rule(recipe)
    law = "grows with the root of the batch" if rule == "sqrt" else "grows with the batch"
    reasons = {"lr_rule": f"{recipe.workers} workers average more noise away; {name}'s rate {law}"}
    if recipe.workers > MOST_WORKERS:
        tried = recipe.replace(workers=MOST_WORKERS, lr_rule=rule)
        fields |= {"lr": _round(tried.lr * tried.lr_factor), "lr_rule": "none"}
        reasons |= {
            "lr": f"that of {MOST_WORKERS} workers, which the race tried",
            "lr_rule": "the rate is that of the run",
        }
    else:
        fields["lr_rule"] = rule
        if rate:
            fields["lr"], reasons["lr"] = rate.value, rate.reason
    return Candidate(name, fields, reasons | {"optimizer": "asked for" if own else "lowest loss in the race"})


def _with_course(
    found: Candidate, base: Recipe, given: Mapping[str, Any], samples: int, steps: int, carried: float | None
) -> Candidate:
    """Add what all candidates share: the budget, a warm-up and a rate that falls to 0; without what was given."""
    workers = base.replace(**given)
    epochs, single = steps * workers.global_batch / samples, single_steps(workers, samples)
    more = f"{epochs / workers.epochs:.2g} times its samples"
    course: dict[str, tuple[Any, str]] = {
        "epochs": (epochs, f"{steps:,} steps instead of one worker's {single:,}, with {more}"),
        "warmup_epochs": (round(WARMUP_SHARE * epochs, 6), "a tenth of the steps"),
        "schedule": ("cosine", "falls to 0, so that a large rate ends calm"),
    }
    if workers.schedule != "constant":
        del course["schedule"]  # the task's own falls already
    fields = {**found.fields, **{name: value for name, (value, _) in course.items()}}
    reasons = {**found.reasons, **{name: reason for name, (_, reason) in course.items()}}
    if found.name == "muon":
        mean = float(fields.get("lr", workers.lr)) * MEAN_RATE[str(fields.get("schedule", workers.schedule))]
        decay = 0.0 if carried is None else intensity(carried).decay  # a trial shows what is memorized without it
        fields["weight_decay"] = _round(decay / (mean * steps)) if mean else 0.0
        reasons["weight_decay"] = f"{decay:.2g} ÷ the sum of all rates: holds memorizing back"
    return Candidate(
        found.name,
        {name: value for name, value in fields.items() if name == "epochs" or name not in given},
        reasons,
    )


def _round(value: float) -> float:
    """Three digits: more would only look exact."""
    return float(f"{value:.3g}")
