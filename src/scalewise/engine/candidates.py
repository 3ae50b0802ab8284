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
MUON_RATES = 0.01, 0.08  # as long as none was measured: larger ones are unstable in attention
MUON_LADDER = 0.03, 0.06, 0.12, 0.24  # rates that trials compare, from the second one up or down
SHIFTS = -1.5, 0.7  # of the best rate from the middle one, in steps of the ladder
MEASURED_RATES = 0.005, 0.2
TRIAL_SPAN = 10  # a training of so many trials' steps has the best rate of a trial for its peak; it falls with the root
MUON_MOMENTUM = 0.9  # 0.95 averages over too many of so few steps
WARMUP_SHARE = 0.1
MOST_WORKERS = 8  # of trials: what they measure does not depend on how many measure it
MEAN_RATE = {"constant": 1.0, "cosine": 0.5, "linear": 0.5, "step": 0.53}  # over a training, of the peak
CARRIES = 0.3, 0.8  # shares of what is learned that hold for held-out data: memorizing below, learning above
UNKNOWN = sum(CARRIES) / 2  # in between, where nothing was measured


@dataclass(frozen=True)
class Found:
    """What trials of some steps have measured."""

    carried: float  # the share of what a longer one learns that holds for held-out data
    rate: float | None = None  # of Muon, the best constant one; None where it was not looked for
    steps: int = 0  # of such a trial


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate of the lowest loss, from the parabola through three losses over the logarithm of neighbouring rates.

    It lies at most half of a step below them, and within the upper end: too large a rate costs more than too small a
    one, and few steps show it late. Where a loss is infinite (diverged), the best one that was tried.

    >>> round(best_rate({0.03: 1.5, 0.06: 1.0, 0.12: 1.5}), 3), best_rate({0.03: 1.0, 0.06: 2.0, 0.12: math.inf})
    (0.06, 0.03)
    """
    rates = sorted(losses)
    low, middle, high = (losses[rate] for rate in rates)
    bend = low - 2 * middle + high
    if not all(map(math.isfinite, losses.values())):
        return min(rates, key=lambda rate: losses[rate])
    down, up = SHIFTS
    shift = (low - high) / (2 * bend) if bend > 0 else math.copysign(math.inf, low - high)
    return float(rates[1] * (rates[2] / rates[1]) ** min(max(shift, down), up))


@dataclass(frozen=True)
class Intensity:
    """How hard to train, by how much of what is learned carries over to data that were not trained on.

    A task whose labels are noisy, or whose samples are few, is memorized when it is trained hard: it wants much decay
    and few passes. One that carries over wants the opposite.

    Arguments:
        decay: the sum of rate × weight decay over a training; what the weights began with ends as e to minus that.
        samples, growth: of N workers, times those of one: samples · N^growth, at least 1.
        least_steps: fewer updates do not suffice, however large the global batch.
    """

    decay: float
    samples: float
    growth: float
    least_steps: int

    def times(self, workers: int) -> float:
        """Samples of N workers, times those of one."""
        return max(1.0, self.samples * workers**self.growth)


GENTLE = Intensity(decay=2.5, samples=0.6375, growth=0.2165, least_steps=40)  # 1.0 times at 8 workers, 1.35 at 32
BOLD = Intensity(decay=0.6, samples=0.371, growth=0.603, least_steps=100)  # 1.3 times at 8 workers, 3.0 at 32


def intensity(carried: float) -> Intensity:
    """Between gentle and bold, by the share of what longer trials learn that carries over to held-out data.

    >>> intensity(0.2) == GENTLE, intensity(1.1) == BOLD, round(intensity(0.55).decay, 2)
    (True, True, 1.22)
    """
    low, high = CARRIES
    place = min(max((carried - low) / (high - low), 0.0), 1.0)

    def between(gentle: float, bold: float) -> float:
        return gentle ** (1 - place) * bold**place

    return Intensity(
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
    Budget(steps=234, samples=59904, single_steps=1875)
    """
    single = single_steps(recipe, samples)
    factor = 1.0 if epochs_fixed else intensity(carried).times(recipe.workers)
    steps = max(1, math.floor(single * factor / recipe.workers + 0.5))
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
    name: str, base: Recipe, given: Mapping[str, Any], samples: int, steps: int, found: Found | None = None
) -> Candidate:
    """A recipe of an optimizer for a training of so many steps; fields that the user gave are not in it.

    Arguments:
        name: of the optimizer.
        base: the task's single-worker recipe.
        given: fields set by the user.
        samples: of the training set.
        steps: of the training.
        found: by the race, once it has ended; by default a rate in between, and no decay.
    """
    chosen = _muon(given, steps, found) if name == "muon" else _scaled(name, base, given)
    return _with_course(chosen, base, given, samples, steps, found)


def usual_muon_rate(steps: int) -> float:
    """Muon's peak for a training of so many steps, as long as no race has measured it.

    >>> usual_muon_rate(200), usual_muon_rate(800), usual_muon_rate(10)
    (0.05, 0.025, 0.08)
    """
    return _within(MUON_LR * math.sqrt(MUON_STEPS / steps), MUON_RATES)


def _muon(given: Mapping[str, Any], steps: int, found: Found | None) -> Candidate:
    fields: dict[str, Any] = {"optimizer": "muon", "lr_rule": "none", "momentum": MUON_MOMENTUM}
    reasons = {
        "optimizer": "moves all directions of a matrix alike, so large batches pay",
        "lr_rule": "the rate is that of the whole run, not of one worker",
        "momentum": "usual for muon",
    }
    if "lr" not in given:
        if found is None or found.rate is None:
            rate = usual_muon_rate(steps)
            reasons["lr"] = f"relative to the weights, for {steps:,} steps"
        else:
            rate = _within(found.rate * math.sqrt(TRIAL_SPAN * found.steps / steps), MEASURED_RATES)
            reasons["lr"] = (
                f"between rates that were tried, {found.rate:.2g} is best for {found.steps} steps; for {steps:,}"
            )
        fields["lr"] = _round(rate)
    return Candidate("muon", fields, reasons)


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
    chosen: Candidate, base: Recipe, given: Mapping[str, Any], samples: int, steps: int, found: Found | None
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
    fields = {**chosen.fields, **{name: value for name, (value, _) in course.items()}}
    reasons = {**chosen.reasons, **{name: reason for name, (_, reason) in course.items()}}
    if chosen.name == "muon":
        mean = float(fields.get("lr", workers.lr)) * MEAN_RATE[str(fields.get("schedule", workers.schedule))]
        decay = 0.0 if found is None else intensity(found.carried).decay  # a trial shows what is memorized without it
        fields["weight_decay"] = _round(decay / (mean * steps)) if mean else 0.0
        reasons["weight_decay"] = f"{decay:.2g} ÷ the sum of all rates{_share(found)}"
    return Candidate(
        chosen.name,
        {name: value for name, value in fields.items() if name == "epochs" or name not in given},
        reasons,
    )


def _share(found: Found | None) -> str:
    if found is None:
        return ""
    share = 100 * min(max(found.carried, 0.0), 1.0)
    return f", against memorizing: {share:.0f} % of what a trial learned last held for held-out data"


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


def _round(value: float) -> float:
    """Three digits: more would only look exact."""
    return float(f"{value:.3g}")
