"""The search for one number of workers: which recipes are tried, in which order, and which of them are good.

Optuna's seeded TPE sampler proposes points in batches of a fixed size, and is told of all of them in order. So the
search depends on task, recipe and seed alone, not on how many runs are trained at a time. A point is tried on one
tuning seed first. If it is not far behind one worker there, and would be the one with the fewest steps, it is tried on
the others too. What counts is the distance to one worker's mean over the tuning seeds: a seed's luck differs from
recipe to recipe, so pairing by seed would add noise.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from scalewise.engine.candidates import MEAN_RATE, OWN, UNKNOWN, budget, candidate
from scalewise.errors import UsageError
from scalewise.extras import require
from scalewise.recipe import ADAPTIVE, Recipe
from scalewise.runs.compare.comparison import Metric
from scalewise.runs.compare.jobs import Job, Outcome
from scalewise.runs.compare.rows import Line, RowPlan
from scalewise.stats.interval import margin

if TYPE_CHECKING:
    import optuna

BATCH = 4  # points that are asked for, tried and told together, whatever the number of processes
TUNING_SEEDS = 3
FIRST_TUNING_SEED = 1000  # added to the seed; those of the proof begin at the seed itself
SCHEDULES = ("cosine", "linear")
RATES = 0.2, 5.0  # times the rate that auto would try
WARMUPS = 0.0, 0.4  # share of the steps
MEMORIES = 0.8, 0.98  # momentum, or beta1 of optimizers without
FORGETS = 0.001, 0.1  # 1 − beta2
DECAYS = 0.0, 1.0  # the sum of rate × weight decay over a training
LEAST_SHARE, MOST_SHARE = 0.25, 1.5  # of the samples that auto would take
SHORTER, LONGER = (0.8, 0.9), (1.5, 2.0)  # times the samples of the best point, or of the least bad one: what is next
BELOW = 0.97  # of the fewest steps so far: more cannot win
GENTLER = 0.47  # a second rate of muon to begin with, times its usual one
MUON_DECAY = 0.3  # the sum of rate × weight decay that muon begins with
HEAVY = frozenset({"momentum", "nesterov", "lars", "muon"})  # have momentum; the adaptive ones have betas
DIVERGED = 1000.0  # margins behind


@dataclass(frozen=True)
class Point:
    """Where a trial lies in the search space; its fields are the names of Optuna's parameters."""

    optimizer: str
    share: float  # samples, as a multiple of the single worker's
    rate: float = 1.0  # the peak, as a multiple of what auto would try for this optimizer and number of steps
    warmup: float = 0.1  # share of the steps
    schedule: str = "cosine"
    memory: float = 0.9  # momentum or beta1
    forget: float = 0.001  # 1 − beta2
    decay: float = 0.0  # the sum of rate × weight decay over the training


def recipe_at(point: Point, base: Recipe, workers: int, samples: int) -> Recipe:
    """The complete recipe of a point, from the single worker's and the number of training samples.

    >>> base = Recipe(worker_batch=32, epochs=10.0, optimizer="momentum", lr=0.02)
    >>> found = recipe_at(Point("momentum", share=1.0, rate=0.5), base, workers=8, samples=1437)
    >>> found.steps, found.lr, found.lr_rule
    (56, 0.08, 'none')
    """
    recipe = _usual(point.optimizer, point.share, base, workers, samples)
    steps, lr = recipe.steps, _round(recipe.lr * recipe.lr_factor * point.rate)
    assert steps is not None
    fields: dict[str, Any] = {"lr": lr, "lr_rule": "none", "schedule": point.schedule}
    fields["warmup_epochs"] = round(point.warmup * steps * recipe.global_batch / samples, 6)
    if point.optimizer in HEAVY:
        fields["momentum"] = round(point.memory, 4)
    elif point.optimizer in ADAPTIVE:
        fields["beta1"] = round(point.memory, 4)
    if point.optimizer in ADAPTIVE:
        fields["beta2"] = round(1 - point.forget, 5)
    fields["weight_decay"] = _round(point.decay / (lr * MEAN_RATE[point.schedule] * steps)) if lr else 0.0
    return recipe.replace(**fields)


def _usual(optimizer: str, share: float, base: Recipe, workers: int, samples: int) -> Recipe:
    """What auto would try with an optimizer, over some multiple of the single worker's samples, with a cosine."""
    base = base.replace(schedule="constant")  # for which auto takes the cosine
    single = base.total_steps(samples)
    steps = max(1, round(share * single / workers))
    fields = candidate(optimizer, base, {"workers": workers}, samples, steps).fields
    return base.replace(**{**fields, "workers": workers, "steps": steps})


def starts(names: Sequence[str], base: Recipe, workers: int, samples: int) -> list[Point]:
    """What the race of auto would try, with the single worker's samples; its first one also with auto's own."""
    found = []
    for name in names:
        recipe = _usual(name, 1.0, base, workers, samples)
        lr, steps = recipe.lr * recipe.lr_factor, recipe.steps or 1
        memory = recipe.momentum if name in HEAVY else recipe.beta1
        decay = MUON_DECAY if name == "muon" else recipe.weight_decay * lr * MEAN_RATE[recipe.schedule] * steps
        forget = _within(1 - recipe.beta2, FORGETS)
        point = Point(name, 1.0, memory=_within(memory, MEMORIES), forget=forget, decay=_within(decay, DECAYS))
        found += [point, replace(point, rate=GENTLER)] if name == "muon" else [point]
    longer = replace(found[0], share=auto_share(base, workers, samples))
    return [*found[:3], longer, *found[3:]]


def auto_share(base: Recipe, workers: int, samples: int) -> float:
    """The samples that auto would take, as a multiple of the single worker's."""
    single = base.total_steps(samples) * base.worker_batch
    same = base.replace(workers=workers, steps=None, epochs=single / samples)
    return max(1.0, budget(same, samples, epochs_fixed=False, carried=UNKNOWN).samples / single)


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


def _round(value: float) -> float:
    """Three digits: more would only look exact."""
    return float(f"{value:.3g}")


@dataclass
class Allowance:
    """What the trials may take: samples, or seconds by a clock."""

    samples: float = math.inf
    seconds: float = math.inf
    speed: float = math.inf  # samples a second of all runs together, measured on the single worker
    clock: Callable[[], float] = time.monotonic
    spent: int = 0
    began: float | None = None

    def fits(self, samples: int) -> bool:
        """Whether so many samples more may be trained."""
        self.began = self.clock() if self.began is None else self.began
        in_time = self.clock() - self.began + samples / self.speed <= self.seconds
        return self.spent + samples <= self.samples and in_time


def parsed_budget(text: str) -> tuple[float | None, float | None]:
    """Single-worker trainings, or seconds.

    >>> parsed_budget("20x"), parsed_budget("30min")
    ((20.0, None), (None, 1800.0))
    """
    for unit, factor in (("min", 60.0), ("x", 1.0)):
        amount = text.removesuffix(unit)
        if amount != text and amount.replace(".", "", 1).isdecimal() and 0 < float(amount) < 1e6:
            return (float(amount), None) if unit == "x" else (None, float(amount) * factor)
    raise UsageError(
        f"--budget must be a multiple of one training such as 20x, or a time such as 30min, got {text[:40]!r}"
    )


@dataclass
class Trial:
    """A point, its recipe, and what it gave on validation data by tuning seed."""

    number: int
    point: Point
    recipe: Recipe  # over the data that the search trains on
    steps: int  # over all training data, as the winner will take
    values: dict[int, float] = field(default_factory=dict)
    diverged: bool = False
    spent: int = 0  # samples

    @property
    def name(self) -> str:
        """What its folders begin with: a search with another budget may try something else under this number."""
        digest = hashlib.sha256(self.recipe.model_dump_json().encode()).hexdigest()
        return f"trial-{self.number}-{digest[:6]}"


Train = Callable[[str, Sequence[Job]], list[Outcome]]  # trains jobs and gives their outcomes in the same order


class Search:
    """The trials of one number of workers."""

    def __init__(
        self,
        base: Recipe,
        workers: int,
        samples: tuple[int, int],
        names: Sequence[str],
        reference: Mapping[int, float],
        metric: Metric,
        allowance: Allowance,
        seed: int,
        settings: tuple[str, ...] = (),
    ) -> None:
        """Begin without trials.

        Arguments:
            samples: of the data that the search trains on, and of all training data.
            names: optimizers.
            reference: the single worker's validation metric by tuning seed.
        """
        self.base, self.workers, self.samples, self.metric = base, workers, samples, metric
        self.reference, self.allowance, self.settings = reference, allowance, settings
        self.trials: list[Trial] = []
        self._names = [*names]
        share = auto_share(base, workers, samples[0])
        self._low, self._high = min(1.0, LEAST_SHARE * share), MOST_SHARE * share
        self._waiting = starts(names, base, workers, samples[0])
        self._tried: set[Point] = set()
        self._study = _study(seed)

    @property
    def target(self) -> float:
        """The quality to reach: one worker's mean over the tuning seeds."""
        return fmean(self.reference.values())

    @property
    def margin(self) -> float:
        """How much worse than one worker still counts as the same."""
        return margin(self.metric.name, self.target) or 1e-12

    def cost(self, point: Point) -> int:
        """The samples of a run."""
        recipe = recipe_at(point, self.base, self.workers, self.samples[0])
        return (recipe.steps or 1) * recipe.global_batch

    def gain(self, trial: Trial) -> float | None:
        """How much better than one worker it is, as a mean over the seeds that it was tried on; None if it diverged."""
        if trial.diverged or not trial.values:
            return None
        return self.better_by(fmean(trial.values.values()))

    def better_by(self, value: float) -> float:
        """How much better than one worker a validation metric is."""
        return (value - self.target) * (1 if self.metric.higher_is_better else -1)

    def behind(self, trial: Trial) -> float:
        """How far it is behind one worker, in margins."""
        gain = self.gain(trial)
        return DIVERGED if gain is None else max(0.0, -gain / self.margin)

    def is_good(self, trial: Trial) -> bool:
        """Whether it is as good as one worker on all tuning seeds together."""
        return len(trial.values) == len(self.reference) and self.behind(trial) == 0

    def best(self) -> Trial | None:
        """The good trial with the fewest steps; of several the best one."""
        good = [trial for trial in self.trials if self.is_good(trial)]
        return min(good, key=self._order, default=None)

    def ranked(self) -> list[Trial]:
        """What to prove, in this order: good trials from the fewest steps on, then those that are least behind."""
        good = sorted((trial for trial in self.trials if self.is_good(trial)), key=self._order)
        others = [trial for trial in self.trials if trial not in good and self.gain(trial) is not None]
        return good + sorted(others, key=lambda trial: (-len(trial.values), self.behind(trial), trial.steps))

    def _order(self, trial: Trial) -> tuple[int, float, int]:
        return trial.steps, -(self.gain(trial) or 0.0), trial.number

    def run(self, train: Train) -> None:
        """Try points until nothing more fits into the budget, or no fewer steps are left to try."""
        while (asked := self._ask()) and self._try(asked, train):
            pass

    def _ask(self) -> list[tuple[optuna.Trial, Point]]:
        """A batch of points: from the best one with fewer steps, then what auto would try, then Optuna's own."""
        best = self.best()
        high = self._high if best is None else best.point.share * BELOW
        if high <= self._low * 1.02:
            return []
        queue = self._next_to_best(best) if self.trials else []
        room = BATCH - len(queue)
        queue += self._waiting[:room]
        del self._waiting[:room]
        for point in queue:
            self._study.enqueue_trial(asdict(replace(point, share=_within(point.share, (self._low, high)))))
        found = []
        for _ in range(BATCH):
            asked = self._study.ask()
            found.append((asked, _suggested(asked, self._names, self._low, high)))
        return found

    def _next_to_best(self, best: Trial | None) -> list[Point]:
        """The best point with fewer steps, or the least bad one with more; each once."""
        start = best or min(self.trials, key=lambda trial: (self.behind(trial), trial.number))
        for factor in LONGER if best is None else SHORTER:
            point = replace(start.point, share=_within(start.point.share * factor, (self._low, self._high)))
            if point not in self._tried:
                self._tried.add(point)
                return [point]
        return []

    def _try(self, asked: Sequence[tuple[optuna.Trial, Point]], train: Train) -> bool:
        """Train what of a batch is within the budget, and tell Optuna; returns whether that was anything.

        What the other seeds of its first trial would take is kept free.
        """
        batch: list[tuple[optuna.Trial, Trial]] = []
        first, *others = self.reference
        planned = 0
        for proposal, point in asked:
            cost = self.cost(point)
            if self.allowance.fits(planned + cost):
                planned += cost if batch else (1 + len(others)) * cost
                recipe = recipe_at(point, self.base, self.workers, self.samples[0])
                steps = recipe_at(point, self.base, self.workers, self.samples[1]).steps or 1
                batch.append((proposal, Trial(proposal.number + 1, point, recipe, steps)))
            else:
                self._study.tell(proposal, state=require("optuna").trial.TrialState.FAIL)
        self.trials += [trial for _, trial in batch]
        self._train([trial for _, trial in batch], [first], train)
        promising = [trial for _, trial in batch if self.behind(trial) <= 1]
        for trial in sorted(promising, key=self._order):
            best = self.best()
            if best is not None and trial.steps >= best.steps:
                break
            if self.allowance.fits(len(others) * self.cost(trial.point)):
                self._train([trial], others, train)
        for proposal, trial in batch:
            behind = self.behind(trial)
            self._study.tell(proposal, trial.steps if behind == 0 else self.base.total_steps(self.samples[1]) + behind)
        return bool(batch)

    def _train(self, trials: Sequence[Trial], seeds: Sequence[int], train: Train) -> None:
        plans = [(trial, seed) for trial in trials for seed in seeds]
        jobs = [
            Job(Line(trial.name, self.workers, RowPlan(trial.recipe, self.settings, "")), seed) for trial, seed in plans
        ]
        for (trial, seed), outcome in zip(plans, train(f"search, {self.workers} workers", jobs), strict=True):
            value = validation_of(outcome, self.metric)
            trial.diverged = trial.diverged or value is None
            samples = self.cost(trial.point) if outcome.result is None else int(outcome.result["samples"])
            trial.spent += samples
            self.allowance.spent += samples
            if value is not None:
                trial.values[seed] = value


def validation_of(outcome: Outcome, metric: Metric) -> float | None:
    """What a run gave on validation data; None if it diverged."""
    value = ((outcome.result or {}).get("validation") or {}).get(metric.name)
    return float(value) if value is not None and math.isfinite(value) else None


def _study(seed: int) -> optuna.Study:
    library = require("optuna")
    library.logging.set_verbosity(library.logging.WARNING)
    sampler = library.samplers.TPESampler(seed=seed, n_startup_trials=BATCH, multivariate=False, constant_liar=True)
    study: optuna.Study = library.create_study(direction="minimize", sampler=sampler)
    return study


def _suggested(trial: optuna.Trial, names: Sequence[str], low: float, high: float) -> Point:
    return Point(
        trial.suggest_categorical("optimizer", [*names]),
        trial.suggest_float("share", low, high, log=True),
        trial.suggest_float("rate", *RATES, log=True),
        trial.suggest_float("warmup", *WARMUPS),
        trial.suggest_categorical("schedule", SCHEDULES),
        trial.suggest_float("memory", *MEMORIES),
        trial.suggest_float("forget", *FORGETS, log=True),
        trial.suggest_float("decay", *DECAYS),
    )


def chosen_optimizers(names: Sequence[str] | None, base: Recipe, has_matrices: bool) -> list[str]:
    """The optimizers to search over; by default muon where the model has matrices, the task's own and two more."""
    layerwise = "lamb" if base.optimizer in ADAPTIVE else "lars"
    wanted = names or [*(["muon"] if has_matrices else []), OWN, layerwise, "adamw"]
    return [*dict.fromkeys(base.optimizer if name == OWN else name for name in wanted)]
