"""One run of a comparison, in the process that trains it: a run folder as `scalewise train` makes it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scalewise import records
from scalewise.engine.auto import complete
from scalewise.engine.data.samples import open_samples
from scalewise.engine.placement import Placement
from scalewise.engine.processes import signals
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.pool import InProcess, Pool
from scalewise.engine.processes.signals import Stop
from scalewise.engine.store.folder import RunFolder, RunRecipe, check_same, read_recipe
from scalewise.errors import Interrupted, NonFiniteLoss, ScalewiseError, TaskError
from scalewise.recipe import Derived, Recipe
from scalewise.runs.compare.jobs import Failure, Job, Message, Outcome, Progress, Setup, Stopped
from scalewise.runs.compare.rows import Facts
from scalewise.runs.measure.memory.steps import has_batch_norm
from scalewise.runs.request import Notice
from scalewise.runs.run import started_in
from scalewise.tasks.load import load_task, settings_of
from scalewise.tasks.task import Task

FAILURE_FILE = "failure.json"
REPORT_SECONDS = 0.2

Report = Callable[[Message], None]
Runner = Pool[Job, Message] | InProcess[Job, Message]


def facts(task: Task, task_spec: str, settings: tuple[str, ...], base: Recipe) -> Facts:
    """What the rows need to know of a task; the model is built once to see whether it has batch norm."""
    samples = len(open_samples(task.train, 0, "training"))
    changed = [name for name in Recipe.model_fields if getattr(base, name) != getattr(task.recipe, name)]
    changes = ", ".join(f"{name} {getattr(base, name)}" for name in changed if name not in ("threads", "compile"))
    takes_bn = task.origin is not None and "bn" in settings_of(task_spec)
    return Facts(base, settings, samples, has_batch_norm(task), takes_bn, changes)


@dataclass(frozen=True)
class Comparing:
    """The work of a comparison's pool."""

    setup: Setup
    tasks: dict[tuple[str, ...], Task] = field(default_factory=dict)  # by settings, filled in each process

    @property
    def folder(self) -> Path:
        """Where the processes' logs go."""
        return self.setup.folder

    def perform(self, job: Job, send: Report, stop: Stop) -> Outcome | Stopped:
        """Train, resume or read one run."""
        settings = job.line.plan.settings
        try:
            if settings not in self.tasks:
                self.tasks[settings] = load_task(self.setup.task_spec, settings, self.setup.data)
        except ScalewiseError as error:
            return Outcome(job, None, None, Failure(str(error), error.exit_code, False), [])
        return perform(job, self.tasks[settings], self.setup, send, stop)

    def died(self, job: Job, reason: str) -> Outcome:
        """A failed run."""
        return Outcome(job, None, None, Failure(reason, 1, False), [])

    def stopped(self, job: Job) -> Stopped:
        """A run to resume."""
        return Stopped(job)


@contextmanager
def pooled(work: Comparing, jobs: int, notify: Callable[[Notice], None]) -> Iterator[Runner]:
    """Processes that train, each loading the task by its name, or this one if it has none; a signal stops all runs."""
    pool: Runner = InProcess(work) if work.tasks else Pool(jobs, work)

    def ask(number: int) -> None:
        pool.stop(number)
        notify(Notice("stopping all runs after their step to save the state; a second signal stops at once"))

    with pool, signals.stopping(ask):
        yield pool


def perform(job: Job, task: Task, setup: Setup, report: Report, stop: Stop) -> Outcome | Stopped:
    """Train, resume or read one run; failures are outcomes too."""
    folder = RunFolder(setup.folder / job.name)
    recipe: Recipe | None = None
    try:
        run = resolved(job, task, setup, folder)
        recipe = run.recipe
        done = _stored(job, folder, run, task)
        if done is None:
            _train(job, task, setup, run, folder, report, stop)
            done = _stored(job, folder, run, task)
            assert done is not None
            done = dataclasses.replace(done, stored=False)
        numbers: list[str] = [*done.result["test"]] if done.result is not None else []
        if numbers and task.metric not in numbers:
            raise TaskError(f"the task's metric {task.metric!r} must be among its numbers, got {', '.join(numbers)}")
        return done
    except Interrupted:
        return Stopped(job)
    except Exception as error:
        known = error if isinstance(error, ScalewiseError) else translated(error)
        failure = Failure(str(known), known.exit_code, isinstance(known, NonFiniteLoss))
        if folder.recipe.is_file():
            text = json.dumps(dataclasses.asdict(failure), indent=2) + "\n"
            records.write_atomically(folder.path / FAILURE_FILE, text)
        return Outcome(job, recipe, None, failure, curve(folder, task))


def resolved(job: Job, task: Task, setup: Setup, folder: RunFolder) -> RunRecipe:
    """The complete recipe of a run; trials that were run for it are not run again."""
    plan = job.line.plan
    known = read_recipe(folder).search if folder.recipe.is_file() else None
    where = Placement(device=setup.device)
    recipe, derived, search = complete(
        task, plan.recipe, {"seed": job.seed}, plan.mode, where, known=known, hold_out=setup.hold_out
    )
    if job.multiple != 1.0:
        recipe = recipe.replace(lr=recipe.lr * job.multiple)
        derived = [*derived, Derived("lr", recipe.lr, f"--tune: {job.multiple:.3g} × the row's own learning rate")]
    return RunRecipe(setup.task_spec, list(plan.settings), recipe, derived, setup.hold_out, search)


def _stored(job: Job, folder: RunFolder, run: RunRecipe, task: Task) -> Outcome | None:
    """The outcome of a run that has come to its end, by result or by divergence; it must be of the same recipe."""
    if not folder.recipe.is_file():
        return None
    check_same(read_recipe(folder), run, folder, task.validation is not None)
    if folder.result.is_file():
        result = json.loads(folder.result.read_text())
        return Outcome(job, run.recipe, result, None, curve(folder, task), stored=True)
    file = folder.path / FAILURE_FILE
    if file.is_file():
        failure = Failure(**json.loads(file.read_text()))
        if failure.diverged:  # it would do so again; any other failure is tried again
            return Outcome(job, run.recipe, None, failure, curve(folder, task), stored=True)
    return None


def _train(job: Job, task: Task, setup: Setup, run: RunRecipe, folder: RunFolder, report: Report, stop: Stop) -> None:
    """Train into the run's folder, and now and then report how far it is."""
    placement = Placement(device=setup.device, loaders=setup.loaders)
    due = 0.0
    with started_in(folder, task, run, placement, notify=print, stop=stop) as started:
        (folder.path / FAILURE_FILE).unlink(missing_ok=True)

        def report_now_and_then(record: records.Record) -> None:
            nonlocal due
            if time.monotonic() >= due:
                training = started.training
                report(Progress(job, int(training.progress.learned), int(training.pace.total)))
                due = time.monotonic() + REPORT_SECONDS

        started.train(report_now_and_then)


def curve(folder: RunFolder, task: Task) -> list[tuple[float, float, float | None]]:
    """(epoch, training metric, validation metric) at every epoch's end."""
    if not folder.metrics.is_file():
        return []
    epochs = (record for record in records.read(folder.metrics) if record["kind"] == "epoch")
    return [
        (record["epoch"], record["train"].get(task.metric), (record["validation"] or {}).get(task.metric))
        for record in epochs
    ]
