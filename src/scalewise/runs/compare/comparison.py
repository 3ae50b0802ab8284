"""A comparison in progress: what is to be run, what has come out of it, and what that makes of the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scalewise.errors import Failed, UsageError
from scalewise.runs.compare import table
from scalewise.runs.compare.jobs import Failure, Job, Message, Outcome, Progress
from scalewise.runs.compare.rows import Line, Skipped
from scalewise.runs.compare.table import Metric, RemedyRow


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
        """The runs that choose learning rates."""
        return trials(self.lines, self.budget) if self.budget is not None else []

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
        """The table as it stands."""
        return table.rows(self.lines, self.outcomes, self.metric)

    def failures(self) -> list[Failure]:
        """Why runs of the table have no result."""
        ended = [outcome for by_seed in self.outcomes.values() for outcome in by_seed.values()]
        return [outcome.failure for outcome in ended if outcome.failure is not None]

    def document(self) -> dict[str, Any]:
        """What `compare --json` prints of it."""
        tuned = None
        if self.tuned:
            rows = [row.to_json() for row in self.tuned]
            tuned = {"budget": self.budget, "factor": TUNING_FACTOR, "seed": TUNING_SEED, "rows": rows}
        return table.document(self.lines, self.skipped, self.outcomes, self.metric, tuned)


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


def trials(lines: Sequence[Line], budget: int) -> list[Job]:
    """A run for each line and each multiple of its learning rate."""
    return [Job(line, TUNING_SEED, multiple, trial=True) for line in lines for multiple in grid(budget)]


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
