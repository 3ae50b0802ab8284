"""A comparison in progress: what is to be run, what has come out of it, and what that makes of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scalewise.compare import table, tuning
from scalewise.compare.jobs import Failure, Job, Message, Outcome
from scalewise.compare.rows import Line, Skipped
from scalewise.compare.table import Metric, Row
from scalewise.compare.tuning import Tuned
from scalewise.errors import Failed, UsageError


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
        return tuning.trials(self.lines, self.budget) if self.budget is not None else []

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
        self.tuned = [tuning.tuned(line, self.trials.get(line.key, {}), self.metric) for line in self.lines]

    def rows(self) -> list[Row]:
        """The table as it stands."""
        return table.rows(self.lines, self.outcomes, self.metric)

    def failures(self) -> list[Failure]:
        """Why runs of the table have no result."""
        ended = [outcome for by_seed in self.outcomes.values() for outcome in by_seed.values()]
        return [outcome.failure for outcome in ended if outcome.failure is not None]

    def document(self) -> dict[str, Any]:
        """What `compare --json` prints of it."""
        tuned = tuning.document(self.tuned, self.budget) if self.budget is not None and self.tuned else None
        return table.document(self.lines, self.skipped, self.outcomes, self.metric, tuned)
