"""A comparison in progress: what is to be run, what has come out of it, and what that makes of the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from scalewise.errors import Failed, UsageError
from scalewise.records import SHARES
from scalewise.runs.compare.jobs import Failure, Job, Message, Outcome, Progress
from scalewise.runs.compare.rows import Line, Skipped
from scalewise.stats.interval import Interval, Spread, paired_difference, spread

Outcomes = Mapping[tuple[str, int], Mapping[int, Outcome]]  # by the line's key and the seed


@dataclass
class Comparison:
    """The lines of the table, the runs that have ended, and the learning rates that were chosen."""

    lines: list[Line]
    skipped: list[Skipped]
    metric: Metric
    seeds: int
    budget: int | None = None  # learning rates that every line may try
    outcomes: dict[tuple[str, int], dict[int, Outcome]] = field(default_factory=dict)
    trials: dict[tuple[str, int], dict[float, Outcome]] = field(default_factory=dict)
    tuned: list[Tuned] = field(default_factory=list)

    def trial_jobs(self) -> list[Job]:
        """The runs that choose learning rates: one for each line and each multiple of its learning rate."""
        multiples = [] if self.budget is None else grid(self.budget)
        return [Job(line, TUNING_SEED, multiple, trial=True) for line in self.lines for multiple in multiples]

    def seed_jobs(self) -> list[Job]:
        """The runs of the table: all rows with the first seed, then with the next, so that it fills evenly."""
        chosen = {row.line.key: row.multiple for row in self.tuned}
        return [Job(line, seed, chosen.get(line.key, 1.0)) for seed in range(self.seeds) for line in self.lines]

    def take(self, message: Message) -> None:
        """Keep an outcome.

        A mistake in the task or recipe ends everything, and so does a failure before any run has succeeded, since it
        would meet them all. Divergence is a finding.
        """
        if not isinstance(message, Outcome):
            return
        failure, job = message.failure, message.job
        mistake = failure is not None and failure.exit_code == UsageError.exit_code
        if failure is not None and not failure.diverged and (mistake or not self._has_result()):
            raise Failed(f"{job.title}: {failure.reason}", failure.exit_code)
        if job.trial:
            self.trials.setdefault(job.line.key, {})[job.multiple] = message
        else:
            self.outcomes.setdefault(job.line.key, {})[job.seed] = message

    def _has_result(self) -> bool:
        seeds = [outcome for by_seed in self.outcomes.values() for outcome in by_seed.values()]
        trials = [outcome for by_multiple in self.trials.values() for outcome in by_multiple.values()]
        return any(outcome.result is not None for outcome in (*seeds, *trials))

    def choose(self) -> None:
        """Give every line the learning rate that did best on validation data."""
        self.tuned = [tuned(line, self.trials.get(line.key, {}), self.metric) for line in self.lines]

    def rows(self) -> list[RemedyRow]:
        """The table as it stands; each line is paired, seed by seed, with the reference."""
        single = [line for line in self.lines if line.name == "single"]
        reference = next(iter([*single, *(one for one in self.lines if (one.name, one.workers) == ("naive", 1))]), None)
        known = {} if reference is None else _values(self.outcomes.get(reference.key, {}), "test", self.metric)
        return [
            _row(line, self.outcomes.get(line.key, {}), self.metric, known if line != reference else {})
            for line in self.lines
        ]

    def failures(self) -> list[Failure]:
        """Why runs of the table have no result."""
        ended = [outcome for by_seed in self.outcomes.values() for outcome in by_seed.values()]
        return [outcome.failure for outcome in ended if outcome.failure is not None]

    def document(self) -> dict[str, Any]:
        """What `compare --json` prints of it."""
        tried = [row.to_json() for row in self.tuned]
        tuned = {"budget": self.budget, "factor": TUNING_FACTOR, "seed": TUNING_SEED, "rows": tried}
        rows = self.rows()
        content: dict[str, Any] = {
            "metric": asdict(self.metric),
            "rows": [row.to_json() for row in rows],
            "skipped": [asdict(row) for row in self.skipped],
            "tuned": tuned if tried else None,
            "curves": curves(self.lines, self.outcomes),
        }
        if len({line.workers for line in self.lines if line.name != "single"}) > 1:
            content["curve"] = error_curve(rows, self.metric)
        return content


@dataclass(frozen=True)
class Metric:
    """The number that counts for a task."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class RemedyRow:
    """A line of the table over the seeds that have ended."""

    name: str
    workers: int
    global_batch: int
    lr: float
    optimizer: str
    steps: int | None
    samples: int | None
    test: Spread
    train: Spread
    samples_per_second: float | None
    seconds: float | None
    seeds: list[int]
    difference: Interval[float] | None
    failed: list[tuple[int, str]]  # (seed, reason)
    diverged: bool
    what: str
    settings: tuple[str, ...]
    derived: list[dict[str, Any]]  # values that nobody gave, with their reasons, of the first seed

    @property
    def beats_noise(self) -> bool | None:
        """Whether the row differs from single by more than seed noise; None where that cannot be told."""
        return None if self.difference is None else self.difference.excludes(0)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `rows`."""
        failed = [{"seed": seed, "reason": reason} for seed, reason in self.failed]
        found = self.difference
        difference = None if found is None else {"mean": found.value, "low": found.low, "high": found.high}
        values = asdict(self) | {"failed": failed, "difference": difference, "settings": list(self.settings)}
        return values | {"beats_noise": self.beats_noise}


def _row(line: Line, ended: Mapping[int, Outcome], metric: Metric, reference: Mapping[int, float]) -> RemedyRow:
    results = [ended[seed].result or {} for seed in sorted(ended) if ended[seed].result is not None]
    test, train = (_values(ended, part, metric) for part in ("test", "train"))
    failures = [(seed, outcome.failure) for seed, outcome in sorted(ended.items()) if outcome.failure is not None]
    recipe = next((outcome.recipe for outcome in ended.values() if outcome.recipe is not None), line.plan.recipe)
    return RemedyRow(
        name=line.name,
        workers=line.workers,
        global_batch=recipe.global_batch,
        lr=fmean([result["lr"]["peak"] for result in results]) if results else recipe.lr * recipe.lr_factor,
        optimizer=recipe.optimizer,
        steps=_whole([result["steps"] for result in results]),
        samples=_whole([result["samples"] for result in results]),
        test=spread([*test.values()]),
        train=spread([*train.values()]),
        samples_per_second=fmean([result["samples_per_second"] for result in results]) if results else None,
        seconds=fmean([result["seconds"] for result in results]) if results else None,
        seeds=[*test],
        difference=paired_difference(test, reference),
        failed=[(seed, failure.reason) for seed, failure in failures],
        diverged=not results and any(failure.diverged for _, failure in failures),
        what=line.plan.what,
        settings=line.plan.settings,
        derived=results[0]["derived"] if results else [],
    )


def _values(ended: Mapping[int, Outcome], part: str, metric: Metric) -> dict[int, float]:
    """The metric by seed, in the order of seeds; runs without a finite one are left out."""
    found = {seed: outcome.result[part].get(metric.name) for seed, outcome in sorted(ended.items()) if outcome.result}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def _whole(values: Sequence[int]) -> int | None:
    return round(sum(values) / len(values)) if values else None


def error_curve(table: Sequence[RemedyRow], metric: Metric) -> list[dict[str, Any]]:
    """The error by global batch of each row: 1 − accuracy, or the metric itself where it is not a share."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        if row.test.mean is not None:
            error = 1 - row.test.mean if metric.name in SHARES else row.test.mean
            point = {"workers": row.workers, "global_batch": row.global_batch, "error": error, "std": row.test.std}
            found.setdefault(row.name, []).append(point)
    return [{"name": name, "points": points} for name, points in found.items()]


def curves(lines: Sequence[Line], outcomes: Outcomes) -> list[dict[str, Any]]:
    """Each row's metric by epoch, averaged over the seeds that have a result."""
    found = []
    for line in lines:
        ended = outcomes.get(line.key, {})
        runs = [ended[seed].curve for seed in sorted(ended) if ended[seed].result is not None]
        points = [*zip(*runs, strict=False)]  # (epoch, seed); as many epochs as every run has
        if points:
            columns = [[_known_mean([run[column] for run in point]) for point in points] for column in range(3)]
            epochs, train, validation = columns
            has_validation = any(value is not None for value in validation)
            found.append(
                {
                    "name": line.name,
                    "workers": line.workers,
                    "epoch": epochs,
                    "train": train,
                    "validation": validation if has_validation else None,
                }
            )
    return found


def _known_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


TUNING_SEED = 0
# Between neighbours of the grid. A rule that is off by the number of workers (8, say) is found with 5 rates; what a
# finer grid would still gain is small, as a rate is then off by less than √√10 = 1.8.
TUNING_FACTOR = math.sqrt(10)


@dataclass(frozen=True)
class Trial:
    """A learning rate that was tried: its peak and what it gave on validation data; None where it diverged."""

    multiple: float
    lr: float | None
    validation: float | None


@dataclass(frozen=True)
class Tuned:
    """What was tried for a line, and the multiple of its own learning rate that won."""

    line: Line
    trials: list[Trial]
    multiple: float

    @property
    def lr(self) -> float | None:
        """The chosen peak rate."""
        return next((trial.lr for trial in self.trials if trial.multiple == self.multiple), None)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `tuned`."""
        trials = [asdict(trial) for trial in self.trials]
        return {"name": self.line.name, "workers": self.line.workers, "lr": self.lr, "trials": trials}


def grid(budget: int) -> list[float]:
    """Multiples of a row's learning rate that are tried: a geometric grid that holds 1.

    >>> [round(multiple, 2) for multiple in grid(3)]
    [0.32, 1.0, 3.16]
    """
    return [TUNING_FACTOR**exponent for exponent in range(-((budget - 1) // 2), budget // 2 + 1)]


def tuned(line: Line, ended: Mapping[float, Outcome], metric: Metric) -> Tuned:
    """The multiple with the best validation metric; of equals the one nearest to 1, and 1 if none has a metric."""
    found = [_trial(multiple, ended[multiple], metric) for multiple in sorted(ended)]
    sign = 1 if metric.higher_is_better else -1
    known = [(sign * trial.validation, -abs(math.log(trial.multiple)), trial.multiple)
             for trial in found if trial.validation is not None]  # fmt: skip
    return Tuned(line, found, max(known)[2] if known else 1.0)


def _trial(multiple: float, outcome: Outcome, metric: Metric) -> Trial:
    if outcome.result is None:
        return Trial(multiple, None, None)
    validation = (outcome.result["validation"] or {}).get(metric.name)
    return Trial(multiple, outcome.result["lr"]["peak"], validation)


class Remaining:
    """Seconds left for some jobs on some processes, from what has been seen of them."""

    def __init__(self, jobs: Sequence[Job], processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = {job.name: job for job in jobs}
        self._processes, self._clock = processes, clock
        self._began: dict[str, tuple[float, int]] = {}  # when a run was first heard of, and its step then
        self._running: dict[str, tuple[float, float]] = {}  # seconds a run has taken since, and will take in all
        self._ended: dict[tuple[str, int], list[float]] = {}  # seconds of runs by line

    def observe(self, message: Message) -> None:
        """Take note of a progress or an outcome."""
        name = message.job.name
        if isinstance(message, Progress):
            now = self._clock()
            began, step = self._began.setdefault(name, (now, message.step))
            if message.step > step:
                taken = now - began
                self._running[name] = taken, taken * (message.steps - step) / (message.step - step)
            return
        self._open.pop(name, None)
        self._running.pop(name, None)
        if isinstance(message, Outcome) and message.result is not None and not message.stored:
            self._ended.setdefault(message.job.line.key, []).append(message.result["seconds"])

    def seconds(self) -> float | None:
        """The work that is left, shared out; None before anything is known."""
        known = [*(value for values in self._ended.values() for value in values)]
        known = known or [total for _, total in self._running.values()]
        if not known or not self._open:
            return None if self._open else 0.0
        typical = sum(known) / len(known)
        return sum(self._left(name, job, typical) for name, job in self._open.items()) / self._processes

    def _left(self, name: str, job: Job, typical: float) -> float:
        if name in self._running:
            taken, total = self._running[name]
            return max(0.0, total - taken)
        ended = self._ended.get(job.line.key)
        return sum(ended) / len(ended) if ended else typical
