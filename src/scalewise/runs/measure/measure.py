"""How far a model can scale: noise scale, critical batch, largest worker batch that fits, throughput, sharpness.

A measurement stands in a folder, with the runs that were trained for it; resuming does not train those again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from scalewise.engine.placement import Placement, available_cores
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.memory import is_out_of_memory, says_out_of_memory
from scalewise.engine.store.folder import RunFolder, RunRecipe
from scalewise.errors import Interrupted, RunFolderError, ScalewiseError, TargetMissed, TooLittleMemory
from scalewise.recipe import Recipe, resolve
from scalewise.records import finite, save_document
from scalewise.runs.measure.critical.branch import BranchReport, Plan, branch, single
from scalewise.runs.measure.critical.sweep import SweepReport, check_ladder, default_ladder, sweep, training_samples
from scalewise.runs.measure.memory.largest import MemoryReport, largest_worker_batch
from scalewise.runs.measure.memory.trials import can_be_passed_on
from scalewise.runs.measure.minima import SUBSPACE, Line, Plane, SharpnessReport, line, plane, sharpness
from scalewise.runs.measure.noise import NoiseReport, check_groups, measure_noise
from scalewise.runs.measure.request import RANDOM, MeasureRequest, Part
from scalewise.runs.measure.surface import StoredWeights, stored_weights
from scalewise.runs.measure.throughput import ThroughputReport, throughput
from scalewise.runs.request import (
    Begun,
    Notice,
    Notify,
    answering,
    begun_or_resumed,
    compilable,
    keywords_of,
    request_from,
    silent,
    stopped,
)
from scalewise.runs.run import train_in
from scalewise.stats.critical_batch import WORKERS, CriticalBatch, Efficiency, agreement, efficiency_of, from_noise
from scalewise.stats.interval import as_json
from scalewise.stats.steps_law import to_go_by
from scalewise.tasks.task import Task

DOCUMENT_FILE = "measure.json"
NOISE = ("noise_scale", "verdict", "plain", "preconditioned")  # that are null where the noise was not measured


@dataclass(frozen=True)
class Minimum:
    """How sharp the minimum of one run is, in the full space and in a random subspace."""

    run: str
    full: SharpnessReport
    subspace: SharpnessReport


@dataclass(frozen=True)
class Measurement:
    """What was measured; None for what was not asked for, or skipped."""

    task: str
    recipe: Recipe
    folder: Path | None = None
    noise: NoiseReport | None = None
    verified: BranchReport | SweepReport | None = None
    memory: MemoryReport | None = None
    throughput: ThroughputReport | None = None
    sharpness: tuple[Minimum, ...] | None = None
    line: Line | None = None
    plane: Plane | None = None
    missed: str | None = None  # why `verified` is missing although it was tried
    unfinished: str | None = None  # why the parts after these are missing
    seconds: dict[str, float] = field(default_factory=dict)  # that each part took

    @property
    def cheap(self) -> CriticalBatch | None:
        """The critical batch as the noise scale gives it, with the sampling error alone."""
        return None if self.noise is None else from_noise(self.noise.along, self.recipe.worker_batch)

    @property
    def critical(self) -> CriticalBatch | None:
        """The critical batch to go by, from the noise scale and what was trained."""
        if self.noise is None and self.verified is None:
            return None
        if self.verified is None:
            return to_go_by(self.cheap, None)
        direct = self.verified.law if isinstance(self.verified, SweepReport) else self.verified.critical
        return to_go_by(self.cheap, direct)

    @property
    def efficiencies(self) -> tuple[Efficiency, ...]:
        """What more workers bring, by the critical batch to go by; of a lower bound, the least that they bring."""
        if self.critical is None or (self.critical.value is None and not self.critical.low):
            return ()
        workers = sorted({*WORKERS, self.recipe.workers})
        return tuple(efficiency_of(self.critical, self.recipe.worker_batch, count) for count in workers)

    @property
    def agreement(self) -> str | None:
        """Whether the cheap and the direct critical batch say the same."""
        return None if self.cheap is None or self.verified is None else agreement(self.cheap, self.verified.critical)

    def to_json(self) -> dict[str, Any]:
        """What `measure --json` prints."""
        recipe, own = self.recipe, as_json(self)
        rates = own["throughput"] or {}
        rows = rates.pop("rows", [])
        direct, cheap = self.verified and self.verified.critical.to_json(), self.cheap and self.cheap.to_json()
        both = {"cheap": cheap, "critical_batch": direct, "agreement": self.agreement}
        content: dict[str, Any] = {
            **({} if self.folder is None else {"run": str(self.folder)}),
            "task": self.task,
            "workers": recipe.workers,
            "worker_batch": recipe.worker_batch,
            "global_batch": recipe.global_batch,
            "optimizer": recipe.optimizer,
            **(own["noise"] or {**dict.fromkeys(NOISE), "stages": [], "layers": []}),
            "critical_batch": None if self.critical is None else self.critical.to_json(),
            "efficiency": [row.to_json() for row in self.efficiencies],
            "verified": None if self.verified is None else {**both, **own["verified"]},
            "missed": self.missed or self.unfinished,
            "largest_worker_batch": None if self.memory is None else self.memory.largest_worker_batch,
            "memory": own["memory"],
            "throughput": [{name: row[name] for name in ("worker_batch", "samples_per_second")} for row in rows],
            "training": rows,
            **rates,
            "sharpness": own["sharpness"],
            "landscape": None if self.line is None else {"line": own["line"], "plane": own["plane"]},
            "seconds": self.seconds,
        }
        found: dict[str, Any] = finite(content)
        return found


class Unfinished(TooLittleMemory):
    """A part did not fit into memory; `found` holds what was measured before it."""

    def __init__(self, message: str, found: Measurement) -> None:
        super().__init__(message)
        self.found = replace(found, unfinished=message)


@keywords_of(MeasureRequest)
def measure(task: str | Path | Task, *, notify: Notify = silent, **options: Any) -> Measurement:  # noqa: ANN401
    """Measure how far a model can scale.

        >>> found = sw.measure("digits", workers=8)  # doctest: +SKIP
        >>> found.noise.used.value, found.critical.value  # doctest: +SKIP
        (103.2, 103.2)

    Arguments:
        task: a built-in name, a file, or a `Task`. One that other processes cannot load is trained in this process, one
            run after another, and its largest worker batch is not measured.
        notify: called with each line on what is being done.
        options: fields of `MeasureRequest`, named like the flags of the command, and fields of the recipe.
    """
    return answer(request_from(MeasureRequest, task, options), notify)


def answer(request: MeasureRequest, notify: Notify = silent) -> Measurement:
    """Load the task, complete the recipe, measure in a new or resumed folder, and store what was found."""
    subject = request.load()
    task = subject.task
    name, recipe = f"measure-{task.name}", None if request.recipe is None else str(request.recipe)
    begun = Begun(subject.spec, subject.settings, request.given, recipe)
    begun, resumed = begun_or_resumed(begun, request.resume, request.out, name)
    with translating():
        base = task.recipe if begun.recipe is None else Recipe.load(Path(begun.recipe))
        complete, derived = resolve(base, begun.given, "plain", available_cores())
        complete = compilable(complete, request.device).replace(patience=None, target=None)
        run = RunRecipe(begun.task, begun.settings, complete, derived)
    with answering(name, request.out, resumed, begun) as folder:
        try:
            found = measured(task, run, request, folder, notify)
        except Unfinished as error:
            found = error.found
        except Interrupted as error:
            raise stopped(error.exit_code - 128, "measurement", folder) from None
        save_document(folder / DOCUMENT_FILE, found.to_json())
    return found


def measured(task: Task, run: RunRecipe, wanted: MeasureRequest, folder: Path, notify: Notify) -> Measurement:
    """Measure what is wanted: first what may fail at once, last what takes longest.

    Runs that are trained on the way are stored in the folder, and not trained again where they are stored already.

    Raises:
        Unfinished: where memory is short after some parts are measured, with those.
    """
    stored = [_of_this_task(stored_weights(path), run) for path in wanted.runs]
    if "memory" not in wanted.skip and not can_be_passed_on(task):
        notify(Notice(f"the largest worker batch is not measured: other processes cannot load the task {task.name}"))
        wanted = replace(wanted, skip=(*wanted.skip, "memory"))
    if "noise" not in wanted.skip:
        check_groups(task, run.recipe, wanted.device)
    if wanted.verify == "sweep":  # is there room for it in the training data, or in the budget?
        check_ladder(default_ladder(task, run.recipe), run.recipe)
    if wanted.verify == "branch":
        Plan.of(single(run.recipe), training_samples(task))
    found = Measurement(task.name, run.recipe, folder)
    found = _machine(task, found, wanted, notify)
    found = _scale(task, run, found, wanted, folder, notify)
    if wanted.between is not None:
        with _timed(found, "landscape"):
            found = _landscape(task, found, wanted, stored, notify)
    if wanted.sharpness:
        with _timed(found, "sharpness"):
            if not stored:
                train_in(RunFolder(folder / "trained"), task, run, Placement(device=wanted.device), notify)
                stored = [stored_weights(folder / "trained")]
            found = replace(found, sharpness=tuple(_minimum(task, weights, wanted, notify) for weights in stored))
    return found


@contextmanager
def _timed(found: Measurement, part: str) -> Iterator[None]:
    """Note how long a part takes; memory that is short for it does not lose what was found before."""
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        passed_on = isinstance(error, ScalewiseError) and says_out_of_memory(str(error))  # from another process
        if not found.seconds or not (is_out_of_memory(error) or isinstance(error, TooLittleMemory) or passed_on):
            raise
        words = (str(error) or type(error).__name__).splitlines()[0]  # Python's own has none
        without = f", or leave it out with --skip {part}" if part in get_args(Part) else ""
        raise Unfinished(
            f"{part} must fit into memory, what was measured before it is kept, got: {words}; lower --worker-batch, "
            f"use a machine with more memory{without}",
            found,
        ) from error
    found.seconds[part] = time.monotonic() - began


def _machine(task: Task, found: Measurement, wanted: MeasureRequest, notify: Notify) -> Measurement:
    """What this machine holds, and how fast it is."""
    placement = Placement(device=wanted.device)
    if "memory" not in wanted.skip:
        with _timed(found, "memory"):
            fitting = largest_worker_batch(
                task,
                found.recipe,
                budget=wanted.memory_bytes,
                processes=wanted.processes or 1,
                placement=placement,
                notify=notify,
            )
        found = replace(found, memory=fitting)
    if "throughput" not in wanted.skip:
        largest = None if found.memory is None else found.memory.largest_worker_batch
        with _timed(found, "throughput"):
            speed = throughput(task, found.recipe, largest=largest, placement=placement, notify=notify)
        found = replace(found, throughput=speed)
    return found


def _scale(
    task: Task, run: RunRecipe, found: Measurement, wanted: MeasureRequest, folder: Path, notify: Notify
) -> Measurement:
    """The noise scale, and the critical batch by training where that is asked for."""
    if "noise" not in wanted.skip:
        with _timed(found, "noise"):
            noise = measure_noise(task, run.recipe, layers=wanted.layers, device=wanted.device, notify=notify)
        found = replace(found, noise=noise)
    if wanted.verify is not None:
        with _timed(found, "verify"):
            try:
                found = replace(found, verified=_verified(task, run, wanted, folder, notify))
            except TargetMissed as error:  # a finding: what was measured before is worth keeping
                found = replace(found, missed=str(error))
    return found


def _verified(
    task: Task, run: RunRecipe, wanted: MeasureRequest, folder: Path, notify: Notify
) -> BranchReport | SweepReport:
    assert wanted.verify is not None
    place, recipe = folder / wanted.verify, run.recipe
    if any(value.field == "threads" for value in run.derived):
        recipe = recipe.replace(threads=1)  # several runs share the machine
    if wanted.verify == "branch":
        return branch(task, recipe, folder=place, seeds=wanted.seeds, notify=notify)
    seeds, most = wanted.seeds, wanted.most_seeds
    return sweep(task, recipe, folder=place, target=wanted.target, seeds=seeds, most_seeds=most, notify=notify)


def _of_this_task(found: StoredWeights, run: RunRecipe) -> StoredWeights:
    """The weights, if they are of a run of this task."""
    theirs, ours = ((_place(part.task), sorted(part.settings)) for part in (found.run, run))
    if theirs != ours:
        raise RunFolderError(
            f"{found.path} is a run of task {' '.join([found.run.task, *found.run.settings])}, got "
            f"{' '.join([run.task, *run.settings])}; give the task and --set values of the run"
        )
    return found


def _place(task: str) -> str:
    """The name of a task; of a file where it lies, however its path was written."""
    return str(Path(task).resolve()) if task.endswith(".py") else task


def _landscape(
    task: Task, found: Measurement, wanted: MeasureRequest, stored: Sequence[StoredWeights], notify: Notify
) -> Measurement:
    """The line between the first two runs, and the plane if it is wanted, with the recipe of the first."""
    recipe, first, second = stored[0].run.recipe, stored[0].tensors, stored[1].tensors
    count, device = wanted.samples, wanted.device
    between = line(task, recipe, first, second, samples=count, device=device, notify=notify)
    if wanted.plane is None:
        return replace(found, line=between)
    third = None if wanted.plane == RANDOM else stored[2].tensors
    there = plane(task, recipe, first, second, third, samples=count, device=device, notify=notify)
    return replace(found, line=between, plane=there)


def _minimum(task: Task, weights: StoredWeights, wanted: MeasureRequest, notify: Notify) -> Minimum:
    of = partial(sharpness, task, weights.run.recipe, weights.tensors, samples=wanted.samples, device=wanted.device,
                 notify=notify)  # fmt: skip
    return Minimum(str(weights.path), full=of(subspace=None), subspace=of(subspace=SUBSPACE))
