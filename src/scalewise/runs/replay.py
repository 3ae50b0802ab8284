"""One step of a stored run, computed again, bit for bit, on this process alone."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalewise.engine.checks import non_finite_gradients
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.parallel.workers import WorkerStep
from scalewise.engine.placement import DeviceName, Placement
from scalewise.engine.processes.failures import translating
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import RunFolder, RunRecipe, read_recipe
from scalewise.engine.sums.flat import wide
from scalewise.errors import DamagedCheckpoint, NonFiniteLoss, RunFolderError, UsageError
from scalewise.records import Record, Step, read
from scalewise.runs.request import PYTHON, Notify, silent
from scalewise.tasks import BUILT_IN
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Task

COMPARED = ("loss", "gradient_norm", "lr")


@dataclass(frozen=True)
class WorkerReplay:
    """One worker's part of the step."""

    worker: int
    loss: float
    weight: float
    gradient_norm: float
    parameters: dict[str, float]  # the norm of the gradient of each
    hashes: dict[str, str]  # of the bytes of the gradient of each
    not_finite: list[str]
    samples: list[int]
    epochs: list[int]

    def to_json(self) -> dict[str, Any]:
        """All but the hashes."""
        return {name: value for name, value in vars(self).items() if name != "hashes"}


@dataclass(frozen=True)
class Replay:
    """A step computed again, and what the run recorded of it."""

    run: Path  # the run's folder
    step: int
    start: int  # after which step the state came from a checkpoint; 0 is the start of training
    before: dict[str, str]  # the hash of every parameter and buffer
    after: dict[str, str]  # empty where the step failed
    workers: list[WorkerReplay]
    record: Step | None  # the result this time, or the failure
    failure: str | None
    recorded: dict[str, Any] | None  # what metrics.jsonl holds, of kind step or failure
    exact: bool
    problems: list[str]

    @property
    def trained_steps(self) -> int:
        """Steps taken to get there."""
        return self.step - 1 - self.start

    @property
    def matches(self) -> bool | None:
        """Whether the run recorded the same result; None where it recorded nothing of this step."""
        if self.recorded is None:
            return None
        if self.record is None or self.recorded["kind"] != Step.kind:
            return self.recorded["kind"] != Step.kind and self.recorded.get("reason") == self.failure
        return not self.differing

    @property
    def differing(self) -> list[str]:
        """The numbers that the run recorded otherwise."""
        if self.record is None or self.recorded is None:
            return []
        pairs = {name: (getattr(self.record, name), self.recorded.get(name)) for name in COMPARED}
        return [name for name, (now, then) in pairs.items() if then is not None and now != then]

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        now = {"loss": math.nan, "gradient_norm": None, "lr": None}
        if self.record is not None:
            now = {name: getattr(self.record, name) for name in COMPARED}
        return {
            "run": str(self.run),
            "step": self.step,
            "start": self.start,
            "trained_steps": self.trained_steps,
            "matches": self.matches,
            "exact": self.exact,
            "recomputed": now,
            "recorded": None if self.recorded is None else {name: self.recorded.get(name) for name in COMPARED},
            "failure": self.failure,
            "weights": {"before": self.before, "after": self.after or None},
            "workers": [one.to_json() for one in self.workers],
        }


def replay(
    run: Path,
    /,
    *,
    step: int | None = None,
    task: str | None = None,
    data: Path | None = None,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> Replay:
    """Compute one step of a stored run again; its folder stays as it is.

    Arguments:
        run: the run's folder.
        step: counted from 1; by default the one in which the run failed.
        task: the run's task, where it is code of your own: a folder is not trusted to name code to run.
        data: folder of the task's data files.
        notify: receives what is being done.
    """
    folder = RunFolder(run)
    stored = read_recipe(folder)
    with translating():
        return recompute(folder, stored, stored_task(stored, task, data), step, device, notify)


def stored_task(run: RunRecipe, spec: str | None, data: Path | None) -> Task:
    """The task of a stored run; code that is not built in only if `spec` names it: a folder may come from anywhere."""
    if run.task.startswith(PYTHON):  # no name that can be loaded is stored
        if spec is None:
            raise RunFolderError(f"the run trained {run.task}, an object of a program; name its code with --task")
        return load_task(spec, run.settings, data)
    if run.task not in BUILT_IN and spec is None:
        raise RunFolderError(
            f"the run's task is code of its own, {run.task}; if you trust it, say --task {shlex.quote(run.task)}"
        )
    if spec is not None and os.path.normpath(spec) != os.path.normpath(run.task):
        raise RunFolderError(f"the run is one of task {run.task}, got --task {spec}; name its own")
    return load_task(run.task, run.settings, data)


def recompute(
    folder: RunFolder,
    run: RunRecipe,
    task: Task,
    step: int | None,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> Replay:
    """Restore the newest good checkpoint from before a step, or start, and train up to the step."""
    recorded = recorded_steps(folder)
    if step is None:
        failed = [number for number, record in recorded.items() if record["kind"] == "failure"]
        if not failed:
            raise UsageError("--step must say which step to compute again: this run did not fail in one")
        step = failed[-1]
    placement = Placement(device=device)
    with Training(task, run.recipe, placement, pause_every=1, hold_out=run.hold_out, alone=True) as training:
        if not 1 <= step <= training.cuts.total_steps:
            raise UsageError(f"--step must be from 1 to the run's {training.cuts.total_steps} steps, got {step}")
        problems = _restore(training, folder, step)
        start = training.progress.step
        where = f"the checkpoint of step {start}" if start else "the start (no older checkpoint exists)"
        notify(f"from {where}: {step - 1 - start} steps to train before step {step}")
        records = training.records()
        _advance(training, records, step - 1)
        before = hashes(training)
        workers = [_worker(training, one, step) for one in training.strategy.worker_steps(step - 1)]
        record, failure = None, None
        try:
            record = _advance(training, records, step)
        except NonFiniteLoss as error:
            failure = str(error)
        after = hashes(training) if failure is None else {}
        exact = training.progress.exact
    then = recorded.get(step)
    return Replay(folder.path, step, start, before, after, workers, record, failure, then, exact, problems)


def recorded_steps(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """What metrics.jsonl says of every step: its record, or that the run failed in it."""
    if not folder.metrics.is_file():
        return {}
    return {record["step"]: record for record in read(folder.metrics) if record["kind"] in (Step.kind, "failure")}


def hashes(training: Training) -> dict[str, str]:
    """Of every parameter and buffer."""
    with training.strategy.whole() as model:
        return {name: sha256({name: tensor}) for name, tensor in model.tensors().items()}


def _restore(training: Training, folder: RunFolder, step: int) -> list[str]:
    """Load the newest good checkpoint from before a step, if any; returns what is wrong with others."""
    problems = []
    for path in checkpoint.stored(folder.checkpoints):
        if int(path.name.removeprefix("step-")) < step:
            try:
                checkpoint.load(training, path, same_recipe=True)
            except DamagedCheckpoint as error:
                problems.append(str(error))
            else:
                break
    return problems


def _advance(training: Training, records: Iterator[Record], step: int) -> Step | None:
    """Train up to a step; its record, or None if it came earlier."""
    while training.progress.step < step:
        record = next(records, None)
        if record is None or record.kind == "result":
            last = training.progress.step
            raise UsageError(f"the run ended after step {last}; choose --step 1 to {last}")
        if isinstance(record, Step) and record.step == step:
            return record
    return None


def _worker(training: Training, one: WorkerStep, step: int) -> WorkerReplay:
    names = [*training.strategy.model.parameters]
    pairs = [*zip(names, one.gradients, strict=True)]
    norms = {name: float(wide(gradient.detach()).norm()) for name, gradient in pairs}
    samples, epochs = training.strategy.feed.samples_of(step - 1, one.worker)
    total, weight = float(one.numbers.loss), float(one.numbers.weight)
    return WorkerReplay(
        worker=one.worker,
        loss=total / weight if weight else math.nan,
        weight=weight,
        gradient_norm=math.sqrt(sum(norm**2 for norm in norms.values())),
        parameters=norms,
        hashes={name: sha256({name: gradient}) for name, gradient in pairs},
        not_finite=non_finite_gradients(one, names),
        samples=samples,
        epochs=epochs,
    )
