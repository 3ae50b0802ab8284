"""Find the recipe with the fewest steps that is as good as one worker, and prove it over fresh seeds.

The single worker is trained on the tuning seeds first: the quality to reach. Then the search (`search.py`) tries
recipes on the same seeds and data, by validation metric alone. The best ones are trained on all training data with
fresh seeds, beside the single worker with the same ones, until one is not inferior on test data. Every run is a folder,
and deterministic: resuming repeats the search with what is stored.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from scalewise import extras
from scalewise.engine.candidates import check_names
from scalewise.engine.data import streams
from scalewise.engine.data.samples import held_out_samples, open_samples
from scalewise.engine.placement import DeviceName, available_cores, slots
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.signals import Stop
from scalewise.errors import Failed, TargetMissed, UsageError
from scalewise.optim.rules import matrices
from scalewise.recipe import Recipe, fitting_lr
from scalewise.records import finite, save_document, write_atomically
from scalewise.runs.compare.comparison import Metric
from scalewise.runs.compare.jobs import Job, Message, Outcome, Phase, Setup, Stopped, unfollowed
from scalewise.runs.compare.rows import Line, RowPlan, chosen_workers
from scalewise.runs.compare.trainings import Comparing, Report, Runner, pooled
from scalewise.runs.request import (
    Notice,
    Numbers,
    Question,
    Subject,
    answering,
    check_alone,
    check_counts,
    check_unchanged,
    comma_separated,
    compilable,
    keywords_of,
    load_request,
    request_from,
    resumed_folder,
    stopped,
)
from scalewise.runs.tune.search import (
    FIRST_TUNING_SEED,
    TUNING_SEEDS,
    Allowance,
    Point,
    Search,
    chosen_optimizers,
    parsed_budget,
    recipe_at,
    validation_of,
)
from scalewise.runs.tune.tuning import BegunTuning, Found, Proof, Tuning
from scalewise.stats.interval import not_inferior, paired_difference
from scalewise.tasks.task import Task

DOCUMENT_FILE = "tune.json"
LEAST_HELD_OUT = 10  # validation samples: fewer say nothing
MOST_PROOFS = 3  # recipes, from the fewest steps on
PROOF = "proof"  # how the lines of the proof begin: their runs train on all training data
OTHER_SHARES = {True: 0.25, False: 1.0}  # of one worker's steps with the same optimizer, after a half did or did not do


@dataclass(frozen=True)
class TuneRequest(Question):
    """A search as it is asked for; `given` are the fields of the single worker's recipe."""

    workers: Numbers | None = None
    budget: str | None = None
    seeds: int | None = None
    candidates: str | Sequence[str] | None = None
    seed: int | None = None
    jobs: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        check_counts(jobs=self.jobs)
        check_alone("tune")
        extras.check("optuna")
        begun = BegunTuning("", [], {}, **self.changes)
        parsed_budget(begun.budget)
        check_names(begun.names or ())
        if begun.seeds < 2:
            raise UsageError(f"--seeds must be at least 2, for an interval, got {begun.seeds}")
        if chosen_workers(begun.workers)[0] < 2:
            raise UsageError(
                f"--workers must be at least 2, got {begun.workers}: one worker is what the others are compared with"
            )
        if begun.seed < 0:
            raise UsageError(f"--seed must be at least 0, got {begun.seed}")

    @property
    def changes(self) -> dict[str, Any]:
        """What is given of the search itself, as it is stored."""
        asked = {
            "workers": None if self.workers is None else comma_separated(self.workers),
            "candidates": None if self.candidates is None else comma_separated(self.candidates),
            "budget": self.budget,
            "seeds": self.seeds,
            "seed": self.seed,
        }
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class Started:
    """Everything is checked, and the first runs are about to be trained."""

    jobs: int  # runs at a time
    optimizers: list[str]
    hold_out: bool


Event = Started | Phase | Message | Notice
Follow = Callable[[Tuning, Event], None]


@dataclass(frozen=True)
class TuneResult:
    """A search that has ended, or was stopped by a signal."""

    tuning: Tuning
    folder: Path
    seconds: float
    jobs: int
    signal: int = 0  # that stopped it

    def to_json(self) -> dict[str, Any]:
        """What `tune --json` prints: the row of the most workers, and all rows where there are several."""
        rows = self.tuning.rows()
        top = {name: value for name, value in rows[-1].items() if name != "workers"} if rows else {}
        found: dict[str, Any] = finite(top | ({"rows": rows} if len(rows) > 1 else {}))
        return found

    def document(self) -> dict[str, Any]:
        """What tune.json holds."""
        found: dict[str, Any] = finite(
            self.to_json() | self.tuning.document() | {"seconds": self.seconds, "jobs": self.jobs}
        )
        return found

    def check_interrupted(self) -> None:
        """Raise where a signal stopped the search."""
        if self.signal:
            raise stopped(self.signal, "search", self.folder)

    def check_proved(self) -> None:
        """Raise where no recipe was proved, or the time was too short for one trial."""
        if any(not row.search.trials for row in self.tuning.found):
            raise UsageError(
                f"--budget {self.tuning.begun.budget} is too short for one trial at this speed; raise it and continue "
                f"with --resume {self.folder}"
            )
        missed = [row.search.workers for row in self.tuning.found if row.proof is None or not row.proof.passed]
        if missed:
            counts = ", ".join(map(str, missed))
            raise TargetMissed(
                f"no recipe for {counts} workers was proved as good as one worker; continue with --resume "
                f"{self.folder} and a larger --budget, or with more --seeds"
            )


@keywords_of(TuneRequest)
def tune(task: str | Path | Task, *, follow: Follow = unfollowed, **options: Any) -> TuneResult:  # noqa: ANN401
    """Search for the recipe with the fewest steps that is as good as one worker, and prove it over fresh seeds.

        >>> found = sw.tune("digits", workers=8, budget="20x", seeds=5)  # doctest: +SKIP
        >>> found.to_json()["steps"], found.to_json()["command"]  # doctest: +SKIP
        (40, 'scalewise train digits --recipe runs/tune-digits-20261118-081500/recipe.json')

    Where nothing was proved, `command` is None.

    Arguments:
        task: a built-in name, a file, or a `Task`. One that no process can load by its name is trained in this one.
        follow: called with the search as it stands and what has just happened to it.
        options: fields of `TuneRequest`, named like the flags of the command, and fields of the single worker's recipe.
    """
    found = answer(request_from(TuneRequest, task, options), follow)
    found.check_interrupted()
    return found


def answer(request: TuneRequest, follow: Follow = unfollowed) -> TuneResult:
    """Load the task, search, prove and store, in a new or resumed folder."""
    subject = request.load()
    name = f"tune-{subject.task.name}"
    begun = BegunTuning(subject.spec, subject.settings, request.given, **request.changes)
    resumed = resumed_folder(request.resume, request.out, name)
    if resumed is not None:
        stored = load_request(resumed, BegunTuning)
        given = request.given or stored.given
        begun = replace(stored, task=subject.spec, settings=subject.settings, given=given, **request.changes)
        check_unchanged(resumed, stored, begun)
    tuning = _tuning(begun, subject, request.device)
    with translating():
        with streams.undisturbed():
            model = subject.task.model()
        has_matrices = isinstance(model, nn.Module) and bool(matrices(model))
        optimizers = chosen_optimizers(begun.names, tuning.base, has_matrices)
        _check_budget(tuning, optimizers)
    with answering(name, request.out, resumed, begun, keeps_runs=False) as folder:
        tuning.folder = folder
        found = _Course(request, tuning, optimizers, follow).run()
        save_document(folder / DOCUMENT_FILE, found.document())
    return found


def _tuning(begun: BegunTuning, subject: Subject, device: DeviceName) -> Tuning:
    """The search before its first run; refuses a task without enough data to choose by."""
    task = subject.task
    base = task.recipe.replace(**begun.given)
    if rate := fitting_lr(task.recipe, begun.given):  # as train does
        base = base.replace(lr=rate.value)
    changes = {"workers": 1, "patience": None, "target": None, "threads": base.threads or 1, "seed": begun.seed}
    base = compilable(base, device).replace(**changes)
    with translating():
        samples = len(open_samples(task.train, 0, "training"))
    held_out = held_out_samples(samples) if task.validation is None else 0
    if task.validation is None and held_out < LEAST_HELD_OUT:
        raise UsageError(
            f"tune needs validation data to choose by: a tenth of {samples} training samples is fewer than "
            f"{LEAST_HELD_OUT}; give the task validation=…, or more data"
        )
    assert task.metric is not None
    metric = Metric(task.metric, task.higher_is_better)
    return Tuning(subject, base, metric, (samples - held_out, samples), begun, Path())


def _check_budget(tuning: Tuning, optimizers: Sequence[str]) -> None:
    """Refuse a budget that is too small for the first trial of each number of workers."""
    counts = chosen_workers(tuning.begun.workers)
    for workers in counts:
        limit = _limit(tuning)
        if limit is None:
            return
        point = Point(optimizers[0], 1.0)
        recipe = recipe_at(point, tuning.base, workers, tuning.samples[0])
        needed = (recipe.steps or 1) * recipe.global_batch
        if needed > limit:
            least = math.ceil(10 * len(counts) * needed / tuning.single_samples) / 10
            raise UsageError(
                f"--budget {tuning.begun.budget} is too small for one trial with {workers} workers, which takes "
                f"{needed:,} samples; give at least {least:g}x"
            )


def _limit(tuning: Tuning) -> float | None:
    """Samples that the trials of each number of workers may take; None for a budget in minutes."""
    times = parsed_budget(tuning.begun.budget)[0]
    return None if times is None else times * tuning.single_samples / len(chosen_workers(tuning.begun.workers))


class _Halted(Exception):
    """A signal has stopped the runs."""


class _Runs(Comparing):
    """The work of the pool: runs of the search on part of the training data, those of the proof on all of it."""

    def perform(self, job: Job, send: Report, stop: Stop) -> Outcome | Stopped:
        """Train, resume or read one run."""
        if job.line.name.startswith(PROOF):
            return Comparing(replace(self.setup, hold_out=False), self.tasks).perform(job, send, stop)
        return super().perform(job, send, stop)


class _Course:
    """The course of a search, from the single worker to the proof."""

    def __init__(self, request: TuneRequest, tuning: Tuning, optimizers: list[str], follow: Follow) -> None:
        self.tuning, self.optimizers, self._follow = tuning, optimizers, follow
        subject = tuning.subject
        tasks = {} if subject.task.origin is not None else {tuple(subject.settings): subject.task}
        most = max(tuning.begun.seeds * 2, TUNING_SEEDS)
        free = slots(request.device, tuning.base.threads or 1)
        self.jobs = 1 if tasks else request.jobs or max(1, min(most, free))
        loaders = max(1, available_cores() // self.jobs)
        setup = Setup(subject.spec, subject.data, tuning.folder, tuning.hold_out, request.device, loaders)
        self._work = _Runs(setup, tasks)
        self._pool: Runner

    def run(self) -> TuneResult:
        """Train everything, several runs at the same time; a signal leaves what is known by then."""
        began = time.monotonic()
        tuning = self.tuning
        self._follow(tuning, Started(self.jobs, self.optimizers, tuning.hold_out))
        tell = partial(self._follow, tuning)
        with pooled(self._work, self.jobs, tell) as self._pool, contextlib.suppress(_Halted):
            self._train_all()
        return TuneResult(tuning, tuning.folder, time.monotonic() - began, self.jobs, self._pool.stopping)

    def _train_all(self) -> None:
        tuning = self.tuning
        speed = self._train_reference() * self.jobs
        counts = chosen_workers(tuning.begun.workers)
        limit, seconds = _limit(tuning), parsed_budget(tuning.begun.budget)[1]
        for workers in counts:
            allowance = Allowance(samples=limit or math.inf)
            if seconds is not None:
                allowance = Allowance(seconds=seconds / len(counts), speed=speed)
            settings = tuple(tuning.subject.settings)
            search = Search(
                tuning.base, workers, tuning.samples, self.optimizers, tuning.reference, tuning.metric, allowance,
                tuning.begun.seed, settings,
            )  # fmt: skip
            tuning.found.append(Found(search))
            search.run(self._trained)
            if not search.trials:
                return
        for found in tuning.found:
            self._prove(found)
            self._train_alone(found)
        for found in tuning.found:
            if found.proof is not None and found.proof.passed:
                path = tuning.folder / tuning.recipe_file(found.search.workers)
                write_atomically(path, json.dumps(found.proof.recipe.model_dump(), indent=2) + "\n")

    def _train_reference(self) -> float:
        """Train the single worker on the tuning seeds; returns the samples a second of one run."""
        tuning = self.tuning
        seeds = [tuning.begun.seed + FIRST_TUNING_SEED + number for number in range(TUNING_SEEDS)]
        jobs = [self._job("single", tuning.base, seed) for seed in seeds]
        outcomes = self._trained("one worker", jobs)
        for seed, outcome in zip(seeds, outcomes, strict=True):
            value = validation_of(outcome, tuning.metric)
            if value is None:
                raise Failed("one worker's own recipe diverged; lower --lr", 1)
            tuning.reference[seed] = value
        return fmean(outcome.result["samples_per_second"] for outcome in outcomes if outcome.result)

    def _job(self, name: str, recipe: Recipe, seed: int) -> Job:
        return Job(Line(name, recipe.workers, RowPlan(recipe, tuple(self.tuning.subject.settings), "")), seed)

    def _trained(self, title: str, jobs: Sequence[Job]) -> list[Outcome]:
        """Train some jobs; their outcomes in the order of the jobs. Divergence is a finding, another failure is not."""
        self._follow(self.tuning, Phase(title, [*jobs]))
        ended: dict[str, Outcome] = {}
        for message in self._pool.run(jobs):
            if isinstance(message, Outcome):
                failure = message.failure
                if failure is not None and not failure.diverged:
                    again = "" if failure.exit_code == 2 else f"; --resume {self.tuning.folder} tries again"
                    raise Failed(f"{message.job.title}: {failure.reason}{again}", failure.exit_code)
                ended[message.job.name] = message
                samples = int(message.result["samples"]) if message.result else 0
                kind = title.partition(",")[0]
                self.tuning.spent[kind] = self.tuning.spent.get(kind, 0) + samples
            self._follow(self.tuning, message)
        if self._pool.stopping:
            raise _Halted
        return [ended[job.name] for job in jobs]

    def _prove(self, found: Found) -> None:
        """Train the best recipes and the single worker with fresh seeds, until one is not inferior."""
        tuning, search = self.tuning, found.search
        seeds = [tuning.begun.seed + number for number in range(tuning.begun.seeds)]
        for trial in search.ranked()[:MOST_PROOFS]:
            recipe = recipe_at(trial.point, tuning.base, search.workers, tuning.samples[1])
            jobs = [self._job(f"{PROOF}-{trial.name}", recipe, seed) for seed in seeds]
            alone = [] if tuning.single else [self._job(f"{PROOF}-single", tuning.base, seed) for seed in seeds]
            outcomes = self._trained(f"proof, {search.workers} workers", [*alone, *jobs])
            if alone:
                tuning.single = self._tested(outcomes[: len(alone)])
            test = self._tested(outcomes[len(alone) :])
            difference = paired_difference(test, tuning.single) if len(test) == len(seeds) else None
            higher = tuning.metric.higher_is_better
            reference = fmean(tuning.single.values())
            passed = difference is not None and not_inferior(difference, tuning.metric.name, reference, higher)
            assert recipe.steps is not None
            samples = recipe.steps * recipe.global_batch
            found.proofs.append(Proof(trial, recipe, recipe.steps, samples, test, difference, passed))
            if passed:
                return

    def _tested(self, outcomes: Sequence[Outcome]) -> dict[int, float]:
        name = self.tuning.metric.name
        values = {one.job.seed: one.result["test"].get(name) for one in outcomes if one.result}
        return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}

    def _train_alone(self, found: Found) -> None:
        """How many steps one worker takes with the winner's optimizer: two runs, on the first tuning seed."""
        proof, search, tuning = found.proof, found.search, self.tuning
        if proof is None:
            return
        seed, *_ = tuning.reference
        good: list[Recipe] = []
        share = 0.5
        for _ in range(2):
            recipe = recipe_at(replace(proof.trial.point, share=share), tuning.base, 1, tuning.samples[0])
            name = f"same-{proof.trial.name}-{share:g}"
            outcome = self._trained("same optimizer, one worker", [self._job(name, recipe, seed)])[0]
            value = validation_of(outcome, tuning.metric)
            does = value is not None and search.better_by(value) >= -search.margin
            if does:
                good.append(recipe_at(replace(proof.trial.point, share=share), tuning.base, 1, tuning.samples[1]))
            share = OTHER_SHARES[does]
        steps = min((recipe.steps or 1 for recipe in good), default=None)
        rate = next((recipe.lr for recipe in good if recipe.steps == steps), None)
        found.alone = {"optimizer": proof.recipe.optimizer, "steps": steps, "lr": rate, "runs": 2}
