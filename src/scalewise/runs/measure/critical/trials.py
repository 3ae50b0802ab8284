"""Trials: short trainings whose validation loss is followed, several at the same time, each stored when it ends.

A trial's curve depends on task, recipe and seed alone: on exact restarts it is the same whether it was interrupted or
not, and in whichever process it ran.

Steps count on a logarithmic scale throughout: a tenth more steps means the same early and late, at a small and at a
large global batch, so that curves of very different lengths are treated alike.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from scalewise.engine.data.samples import Samples, Subset
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement, slots
from scalewise.engine.processes import signals
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.pool import InProcess, Pool
from scalewise.engine.processes.signals import Stop
from scalewise.engine.store import checkpoint
from scalewise.errors import Failed, Interrupted, NonFiniteLoss, RunFolderError, ScalewiseError
from scalewise.plan.assemble import steps_to
from scalewise.recipe import Recipe
from scalewise.records import Step, write_atomically
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin, Task

VALIDATION_SAMPLES = 1024  # at most: a fixed choice of them, the same for every trial, so its noise is common to all
STATISTICS_SAMPLES = 1024  # for batch norm in each of many evaluations; a training's own take four times as many
SAVE_SECONDS = 60.0  # a trial that is killed loses at most that

Ended = Literal["target", "budget", "diverged"]


@dataclass(frozen=True)
class Branch:
    """Where a trial begins when not at step 0: at a kept checkpoint of another one, so many samples into the stream."""

    trial: str
    step: int
    samples: int


@dataclass(frozen=True)
class Trial:
    """A training to be done."""

    name: str  # of its files
    recipe: Recipe  # how it is learned
    evaluations: tuple[int, ...]  # steps after which the validation loss is measured
    last: int  # the step at which it ends
    target: float | None = None  # a validation loss at which it ends earlier
    keep: tuple[int, ...] = ()  # steps whose checkpoints are kept, for others to branch off
    branch: Branch | None = None  # the checkpoint to begin at


@dataclass(frozen=True)
class Curve:
    """The validation loss of a trial by step, and why it ended."""

    points: tuple[Point, ...]
    ended: Ended

    def steps_to(self, target: float) -> float | None:
        """Steps to a loss, interpolated; None where it was not reached."""
        return crossing(self.points, target)

    @property
    def least(self) -> float:
        """The least loss seen."""
        return min((point.loss for point in self.points), default=math.inf)


def follow(task: Task, trial: Trial, folder: Path, stop: Stop) -> Curve:
    """Train until the target, the end of the budget or divergence; resumes from where it was saved."""
    place = folder / trial.name
    with Training(task, trial.recipe, Placement(noise=False), pause_every=1, hold_out=True, alone=True) as training:
        training.validation = _some(training.validation)
        training.statistics_samples = STATISTICS_SAMPLES
        points = _begin(training, trial, folder)
        with stop.of(training):
            ended = _train(training, trial, points, place)
    curve = Curve(tuple(points), ended)
    content = {"asked": _asked(trial), "last": trial.last, **asdict(curve)}
    write_atomically(_file(trial, folder), json.dumps(content, allow_nan=False) + "\n")
    shutil.rmtree(place / "saved", ignore_errors=True)
    if not trial.keep:
        shutil.rmtree(place, ignore_errors=True)
    return curve


def stored(trial: Trial, folder: Path) -> Curve | None:
    """The curve of a trial that has come to its end, if it had the budget that is asked for now."""
    if not _file(trial, folder).is_file():
        return None
    points, content = _checked(_file(trial, folder), trial)
    enough = content["ended"] != "budget" or content["last"] >= trial.last
    return Curve(tuple(points), content["ended"]) if enough else None


def _checked(file: Path, trial: Trial) -> tuple[list[Point], dict[str, Any]]:
    """The points in a file, and the rest of it; it must be of this very trial."""
    content = json.loads(file.read_text())
    if content["asked"] != _asked(trial):
        raise RunFolderError(f"{file} must be a trial of the same recipe and target, found another; use a new folder")
    return [Point(**point) for point in content["points"]], content


def _file(trial: Trial, folder: Path) -> Path:
    return folder / f"{trial.name}.json"


def _asked(trial: Trial) -> dict[str, Any]:
    """What a curve depends on, beside the task; not on the planned steps, where the rate does not."""
    recipe = trial.recipe.model_dump()
    if trial.recipe.schedule == "constant":
        del recipe["steps"], recipe["epochs"]
    return {"recipe": recipe, "target": trial.target, "branch": trial.branch and asdict(trial.branch)}


def _some(samples: Samples | None) -> Samples:
    assert samples is not None
    if len(samples) <= VALIDATION_SAMPLES:
        return samples
    chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(samples))[:VALIDATION_SAMPLES]
    return Subset(samples, torch.from_numpy(np.sort(chosen)))


def _begin(training: Training, trial: Trial, folder: Path) -> list[Point]:
    """Go on from what was saved, or begin at the start or the branch; returns the points so far."""
    saved = folder / trial.name / "saved"
    if checkpoint.stored(saved):
        checkpoint.load_newest(training, saved)
        return _checked(saved / f"points-{training.progress.step}.json", trial)[0]
    if trial.branch is not None:
        checkpoint.load(training, folder / trial.branch.trial / "kept" / f"step-{trial.branch.step}")
        training.progress.step, rest = divmod(trial.branch.samples, training.recipe.global_batch)
        assert rest == 0  # else it would see other samples
    return []


def _train(training: Training, trial: Trial, points: list[Point], place: Path) -> Ended:
    """Take steps and add points, until the trial's end."""
    due = time.monotonic() + SAVE_SECONDS
    try:
        for record in training.records():
            if not isinstance(record, Step):
                continue
            if record.step in trial.keep:
                checkpoint.save(training, place / "kept")
            if record.step in trial.evaluations:
                points.append(_evaluated(training))
                if trial.target is not None and crossing(points, trial.target) is not None:
                    return "target"
            if record.step >= trial.last:
                return "budget"
            if time.monotonic() >= due:
                _save(training, trial, points, place / "saved")
                due = time.monotonic() + SAVE_SECONDS
    except NonFiniteLoss:
        return "diverged"
    _save(training, trial, points, place / "saved")
    raise Interrupted("a signal stopped the trial; its state is saved", training.interrupted)


def _evaluated(training: Training) -> Point:
    loss = training.validate()["loss"]
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"the validation loss must stay finite, got {loss} after step {training.progress.step}")
    return Point(training.progress.step, loss)


def _save(training: Training, trial: Trial, points: list[Point], folder: Path) -> None:
    """Write a checkpoint, and before it the points: it must not know more than they do."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"asked": _asked(trial), "points": [asdict(point) for point in points]}
    write_atomically(folder / f"points-{training.progress.step}.json", json.dumps(content) + "\n")
    checkpoint.save(training, folder)
    checkpoint.prune(folder, 1, None)


# Between neighbouring evaluations where the target is expected. With 1.1, the same 40 curves of digits crossed at 34.3
# or at 37.4 steps depending on which steps were looked at: an error of a whole global batch that no seeds take away.
DENSE_RATIO = 1.05
SPARSE_RATIO = 1.5  # and before
DENSE_FROM = 0.25  # of the expected steps
WINDOW = 1.25  # ratio of the last to the first step that are averaged


@dataclass(frozen=True)
class Point:
    """A loss after some steps."""

    step: int
    loss: float


def evaluation_steps(expected: float, last: int) -> tuple[int, ...]:
    """After which steps to evaluate: densely from a quarter of the expected steps, and at the last one.

    >>> evaluation_steps(expected=32, last=10)
    (1, 2, 3, 5, 8, 9, 10)
    """
    steps, step = [], 1
    while step < last:
        steps.append(step)
        ratio = DENSE_RATIO if step >= DENSE_FROM * expected else SPARSE_RATIO
        step = max(step + 1, math.ceil(step * ratio))
    return (*steps, last)


def smoothed(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(log step, loss), each the mean over the evaluations of the last fifth of the steps.

    The mean of both, so that a steady fall in log step is not delayed by averaging.
    """
    found = []
    for number, point in enumerate(points):
        window = [other for other in points[: number + 1] if other.step * WINDOW >= point.step]
        count = len(window)
        found.append((sum(math.log(other.step) for other in window) / count, sum(o.loss for o in window) / count))
    return found


def crossing(points: Sequence[Point], target: float) -> float | None:
    """Steps at which the smoothed loss first reaches the target, between evaluations; None where it never does.

    >>> round(crossing([Point(100, 3.0), Point(200, 1.0)], 2.0), 2)  # half way in log step
    141.42
    """
    found = steps_to(smoothed(points), target, higher_is_better=False)
    return None if found is None else math.exp(found)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: with its curve, with why it failed, or with neither where a signal stopped it."""

    trial: Trial
    curve: Curve | None = None
    failure: str | None = None
    exit_code: int = 1


@dataclass(frozen=True)
class Trying:
    """The work of the processes: each loads the task once."""

    origin: Origin | None
    folder: Path
    tasks: list[Task] = field(default_factory=list)

    def perform(self, trial: Trial, send: Callable[[Outcome], None], stop: Stop) -> Outcome:
        """Train or resume one trial; its state is saved where a signal stops it."""
        try:
            if not self.tasks:
                assert self.origin is not None
                self.tasks.append(load_task(self.origin.spec, self.origin.settings, self.origin.data))
            return Outcome(trial, follow(self.tasks[0], trial, self.folder, stop))
        except Interrupted:
            return Outcome(trial)
        except Exception as error:
            known = error if isinstance(error, ScalewiseError) else translated(error)
            return Outcome(trial, failure=str(known), exit_code=known.exit_code)

    def died(self, trial: Trial, reason: str) -> Outcome:
        """A failed trial."""
        return Outcome(trial, failure=reason)

    def stopped(self, trial: Trial) -> Outcome:
        """A trial to resume."""
        return Outcome(trial)


class Laboratory(contextlib.ExitStack):
    """A folder of trials, and the processes that do them.

    Processes must know where to load the task from: trials of a task without an origin are done here, one by one.
    """

    def __init__(self, task: Task, folder: Path, jobs: int | None) -> None:
        super().__init__()
        self._folder = folder / "trials"
        self._folder.mkdir(parents=True, exist_ok=True)
        size = jobs or slots("auto")
        self._pool: Pool[Trial, Outcome] | InProcess[Trial, Outcome]
        if task.origin is None or size == 1:
            self._pool = InProcess(Trying(task.origin, self._folder, [task]))
        else:
            self._pool = Pool(size, Trying(task.origin, self._folder))

    def __enter__(self) -> Self:
        self.enter_context(self._pool)
        self.enter_context(signals.stopping(self._pool.stop))
        return self

    def curves(self, trials: Sequence[Trial]) -> list[Curve]:
        """The curves of some trials, in their order: read where they are stored, else trained."""
        found = {trial.name: stored(trial, self._folder) for trial in trials}
        for outcome in self._pool.run([trial for trial in trials if found[trial.name] is None]):
            if outcome.failure is not None:
                raise Failed(f"trial {outcome.trial.name}: {outcome.failure}", outcome.exit_code)
            found[outcome.trial.name] = outcome.curve
        if self._pool.stopping:
            raise Interrupted(
                f"{signals.name(self._pool.stopping)} stopped the measurement; its trials are saved in "
                f"{self._folder.parent}, the same command with that folder continues",
                self._pool.stopping,
            )
        curves = [found[trial.name] for trial in trials]
        return [curve for curve in curves if curve is not None]
