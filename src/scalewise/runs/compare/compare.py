"""Compare what people do about many workers, over seeds: check, train every row, store, resume, stop on signals.

Every run is a folder as `scalewise train` makes it, and deterministic: one that is stored is not trained again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalewise.engine.placement import DeviceName, available_cores, slots
from scalewise.engine.processes.failures import translating
from scalewise.errors import Failed, UsageError
from scalewise.recipe import Recipe, fitting_lr
from scalewise.records import finite, save_document
from scalewise.runs.compare.comparison import Comparison, Metric
from scalewise.runs.compare.jobs import Message, Phase, Setup, unfollowed
from scalewise.runs.compare.rows import chosen_rows, chosen_workers, lines
from scalewise.runs.compare.trainings import Comparing, Runner, facts, pooled
from scalewise.runs.request import (
    BegunFolder,
    Notice,
    Numbers,
    Question,
    Subject,
    answering,
    begun_or_resumed,
    check_alone,
    check_counts,
    comma_separated,
    compilable,
    keywords_of,
    request_from,
    stopped,
)
from scalewise.tasks.task import Task

DOCUMENT_FILE = "compare.json"
DEFAULT_WORKERS, DEFAULT_SEEDS = "8", 5


@dataclass(frozen=True)
class CompareRequest(Question):
    """A comparison as it is asked for."""

    workers: Numbers | None = None
    seeds: int | None = None
    rows: str | Sequence[str] | None = None
    tuned: Path | None = None
    tune: int | None = None
    hold_out: bool = False
    jobs: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        check_counts(seeds=self.seeds, tune=self.tune, jobs=self.jobs)
        chosen_rows(self.changes.get("rows"), len(chosen_workers(self.changes.get("workers", DEFAULT_WORKERS))) > 1)
        check_alone("compare")

    @property
    def changes(self) -> dict[str, Any]:
        """Those of rows, workers, seeds and the tuned recipe that are given, as they are stored."""
        asked = {
            "rows": None if self.rows is None else comma_separated(self.rows),
            "workers": None if self.workers is None else comma_separated(self.workers),
            "seeds": self.seeds,
            "tuned": None if self.tuned is None else Recipe.load(self.tuned).model_dump(),
        }
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class BegunComparison(BegunFolder):
    """What a comparison was begun with. Resuming may change rows, workers and seeds; its runs are of the rest."""

    what = "comparison"
    rule = "only rows, workers and seeds may change"
    may_change = ("rows", "workers", "seeds", "tuned")
    tune: int | None
    hold_out: bool
    tuned: dict[str, Any] | None = None  # the recipe of that row
    rows: str | None = None
    workers: str = DEFAULT_WORKERS
    seeds: int = DEFAULT_SEEDS


@dataclass(frozen=True)
class Started:
    """Everything is checked, and the first runs are about to be trained."""

    jobs: int  # runs at a time
    threads: int  # of each run


Event = Started | Phase | Message | Notice
Follow = Callable[[Comparison, Event], None]


@dataclass(frozen=True)
class CompareResult:
    """A comparison whose runs have ended, or were stopped by a signal."""

    comparison: Comparison
    folder: Path
    begun: BegunComparison
    task: str
    threads: int
    jobs: int
    seconds: float
    signal: int = 0  # that stopped it

    def to_json(self) -> dict[str, Any]:
        """What `compare --json` prints."""
        content = {
            "run": str(self.folder),
            "task": self.task,
            "settings": self.begun.settings,
            "workers": chosen_workers(self.begun.workers),
            "seeds": list(range(self.comparison.seeds)),
            "threads": self.threads,
            "jobs": self.jobs,
            "seconds": self.seconds,
        }
        found: dict[str, Any] = finite(content | self.comparison.document())
        return found

    def check_interrupted(self) -> None:
        """Raise where a signal stopped the comparison."""
        if self.signal:
            raise stopped(self.signal, "comparison", self.folder)

    def check_failures(self) -> None:
        """Raise where runs broke, or all of them diverged; a row that diverged is a finding."""
        failures = self.comparison.failures()
        broken = [failure for failure in failures if not failure.diverged]
        if broken:
            raise Failed(f"{len(broken)} of the runs failed; --resume {self.folder} tries them again", 1)
        if failures and all(row.test.mean is None for row in self.comparison.rows()):
            raise Failed("every run diverged; lower --lr", 1)


@keywords_of(CompareRequest)
def compare(task: str | Path | Task, *, follow: Follow = unfollowed, **options: Any) -> CompareResult:  # noqa: ANN401
    """Compare remedies for many workers, over seeds.

        >>> found = sw.compare("digits", workers=8, seeds=5)  # doctest: +SKIP
        >>> {row.name: row.test.mean for row in found.comparison.rows()}  # doctest: +SKIP
        {'single': 0.975, 'naive': 0.931, …}

    Runs that failed have no result and are listed in their row's `failed`.

    Arguments:
        task: a built-in name, a file, or a `Task`. Several runs are trained at the same time, in processes that load
            the task by its name; a `Task` that has none is trained in this process, one run after another.
        follow: called with the comparison as it stands and what has just happened to it.
        options: fields of `CompareRequest`, named like the flags of the command, and fields of the recipe.
    """
    found = answer(request_from(CompareRequest, task, options), follow)
    found.check_interrupted()
    return found


def answer(request: CompareRequest, follow: Follow = unfollowed) -> CompareResult:
    """Load the task, choose the rows, train them in a new or resumed folder, and store the table."""
    subject = request.load()
    name = f"compare-{subject.task.name}"
    begun = BegunComparison(subject.spec, subject.settings, request.given, request.tune, request.hold_out)
    begun, resumed = begun_or_resumed(begun, request.resume, request.out, name, request.changes)
    comparison = _comparison(begun, subject, request.device)
    with answering(name, request.out, resumed, begun, keeps_runs=False) as folder:
        found = _trained(request, begun, comparison, subject, folder, follow)
        save_document(folder / DOCUMENT_FILE, found.to_json())
    return found


def _comparison(begun: BegunComparison, subject: Subject, device: DeviceName) -> Comparison:
    """The rows to train."""
    task = subject.task
    counts = chosen_workers(begun.workers)
    names = chosen_rows(begun.rows, len(counts) > 1, begun.tuned is not None)
    base = task.recipe.replace(**begun.given)
    if rate := fitting_lr(task.recipe, begun.given):  # as train does
        base = base.replace(lr=rate.value)
    if base.threads is None:  # for single too, so that rows differ in nothing but their remedy
        base = base.replace(threads=1)
    with translating():
        known = facts(task, subject.spec, tuple(subject.settings), compilable(base, device))
    known = replace(known, tuned=None if begun.tuned is None else Recipe(**begun.tuned))
    found, skipped = lines(names, counts, known, asked=begun.rows is not None)
    if begun.tune is not None and task.validation is None and not begun.hold_out:
        raise UsageError(
            "--tune needs validation data to choose by, and this task has none; give the task validation=…, or add "
            "--hold-out to keep a tenth of the training data out"
        )
    if not found:
        raise UsageError(f"none of the rows can be run: {'; '.join(f'{row.name}: {row.reason}' for row in skipped)}")
    assert task.metric is not None
    return Comparison(found, skipped, Metric(task.metric, task.higher_is_better), begun.seeds, begun.tune)


def _trained(
    request: CompareRequest,
    begun: BegunComparison,
    comparison: Comparison,
    subject: Subject,
    folder: Path,
    follow: Follow,
) -> CompareResult:
    """Train everything, several runs at the same time."""
    began = time.monotonic()
    threads = comparison.lines[0].plan.recipe.threads or 1
    runs = max(len(comparison.seed_jobs()), len(comparison.trial_jobs()))
    jobs = request.jobs or max(1, min(runs, slots(request.device, threads)))
    tasks = {} if subject.task.origin is not None else {tuple(subject.settings): subject.task}
    if tasks:
        jobs = 1
    setup = Setup(subject.spec, subject.data, folder, begun.hold_out, request.device, max(1, available_cores() // jobs))
    follow(comparison, Started(jobs, threads))
    with pooled(Comparing(setup, tasks), jobs, lambda notice: follow(comparison, notice)) as pool:
        _train_all(pool, comparison, follow)
    seconds = time.monotonic() - began
    return CompareResult(comparison, folder, begun, subject.task.name, threads, jobs, seconds, pool.stopping)


def _train_all(pool: Runner, comparison: Comparison, follow: Follow) -> None:
    """The trials, if there are any, then all rows with all seeds."""
    if comparison.budget is not None:
        _follow(pool, Phase("tuning", comparison.trial_jobs()), comparison, follow)
        if pool.stopping:
            return
        comparison.choose()
    _follow(pool, Phase("training", comparison.seed_jobs()), comparison, follow)


def _follow(pool: Runner, phase: Phase, comparison: Comparison, follow: Follow) -> None:
    """Do some jobs, and keep what comes out."""
    follow(comparison, phase)
    for message in pool.run(phase.jobs):
        comparison.take(message)
        follow(comparison, message)
