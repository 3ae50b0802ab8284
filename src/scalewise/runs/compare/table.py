"""From the outcomes of runs to the rows of the table, their curves, and the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scalewise.records import SHARES
from scalewise.runs.compare.jobs import Outcome
from scalewise.runs.compare.rows import Line, Skipped
from scalewise.stats.interval import Interval
from scalewise.stats.seeds import Spread, paired_difference, spread

Outcomes = Mapping[tuple[str, int], Mapping[int, Outcome]]  # by the line's key and the seed


@dataclass(frozen=True)
class Metric:
    """The number that counts for a task."""

    name: str
    higher_is_better: bool

    @property
    def is_share(self) -> bool:
        """Whether people read it as a percentage."""
        return self.name in SHARES


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


def rows(lines: Sequence[Line], outcomes: Outcomes, metric: Metric) -> list[RemedyRow]:
    """The table; each line is paired, seed by seed, with the reference."""
    reference = next((line for line in lines if line.name == "single"), None) or next(
        (line for line in lines if line.name == "naive" and line.workers == 1), None
    )
    known = _values(outcomes.get(reference.key, {}), "test", metric) if reference is not None else {}
    return [_row(line, outcomes.get(line.key, {}), metric, known if line != reference else {}) for line in lines]


def _row(line: Line, ended: Mapping[int, Outcome], metric: Metric, reference: Mapping[int, float]) -> RemedyRow:
    results = [ended[seed].result or {} for seed in sorted(ended) if ended[seed].result is not None]
    test, train = (_values(ended, part, metric) for part in ("test", "train"))
    failures = [(seed, outcome.failure) for seed, outcome in sorted(ended.items()) if outcome.failure is not None]
    recipe = next((outcome.recipe for outcome in ended.values() if outcome.recipe is not None), line.plan.recipe)
    return RemedyRow(
        name=line.name,
        workers=line.workers,
        global_batch=recipe.global_batch,
        lr=_mean([result["lr"]["peak"] for result in results]) if results else recipe.lr * recipe.lr_factor,
        optimizer=recipe.optimizer,
        steps=_whole([result["steps"] for result in results]),
        samples=_whole([result["samples"] for result in results]),
        test=spread([*test.values()]),
        train=spread([*train.values()]),
        samples_per_second=_mean([result["samples_per_second"] for result in results]) if results else None,
        seconds=_mean([result["seconds"] for result in results]) if results else None,
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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _whole(values: Sequence[int]) -> int | None:
    return round(sum(values) / len(values)) if values else None


def has_several_counts(found: Sequence[Line] | Sequence[RemedyRow]) -> bool:
    """Whether a table is over several numbers of workers."""
    return len({item.workers for item in found if item.name != "single"}) > 1


@dataclass(frozen=True)
class Point:
    """One row at one number of workers, for error against global batch."""

    workers: int
    global_batch: int
    error: float
    std: float | None


def error_curve(table: Sequence[RemedyRow], metric: Metric) -> dict[str, list[Point]]:
    """The error by global batch of each row: 1 − accuracy, or the metric itself where it is not a share."""
    found: dict[str, list[Point]] = {}
    for row in table:
        if row.test.mean is not None:
            error = 1 - row.test.mean if metric.is_share else row.test.mean
            found.setdefault(row.name, []).append(Point(row.workers, row.global_batch, error, row.test.std))
    return found


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
    return _mean(known) if len(known) == len(values) else None


def document(
    lines: Sequence[Line],
    skipped: Sequence[Skipped],
    outcomes: Outcomes,
    metric: Metric,
    tuned: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What `compare --json` prints, without what the command itself adds."""
    table = rows(lines, outcomes, metric)
    content: dict[str, Any] = {
        "metric": asdict(metric),
        "rows": [row.to_json() for row in table],
        "skipped": [asdict(row) for row in skipped],
        "tuned": tuned,
        "curves": curves(lines, outcomes),
    }
    if has_several_counts(lines):
        content["curve"] = [
            {"name": name, "points": [asdict(point) for point in points]}
            for name, points in error_curve(table, metric).items()
        ]
    return content
