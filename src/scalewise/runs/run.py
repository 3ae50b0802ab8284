"""A run in its folder: everything that trains and stores does so here.

A `Run` is locked and loaded; its `train` stores every record, writes checkpoints, and saves the state when a signal
stops it. `train_in` and `started_in` train the runs of a larger question, each in a folder of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from safetensors import SafetensorError

from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.placement import DiskFull, Placement
from scalewise.engine.processes import signals
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.heartbeat import HEARTBEAT, Heartbeat
from scalewise.engine.processes.signals import Stop
from scalewise.engine.store import checkpoint
from scalewise.engine.store.checkpoint import load_newest
from scalewise.engine.store.folder import (
    RunFolder,
    RunRecipe,
    add_facts,
    begin,
    check_same,
    environment_changes,
    holding,
    read_recipe,
)
from scalewise.engine.store.shards import write_tensors
from scalewise.errors import CheckpointError, Interrupted, LostContact, NonFiniteLoss, Place, ScalewiseError
from scalewise.recipe import Search
from scalewise.records import Epoch, Failure, Record, RecordWriter, Result, Step, keep_until, write_atomically
from scalewise.runs.request import Notice, Notify, silent
from scalewise.tasks.task import Task

KEPT_CHECKPOINTS = 2
SIGNAL_SECONDS = 3.0
RISE = 1.05  # of the validation loss above its least: more than noise
OnRecord = Callable[[Record], None]


def ignore(record: Record) -> None:
    """Look at no record."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to train on this process: its folder is locked and its newest checkpoint is loaded."""

    folder: RunFolder
    recipe: RunRecipe
    training: Training
    notify: Notify
    checkpoint_steps: int | None = None
    on_disk_full: DiskFull = "stop"
    stop_seconds: float | None = None  # from a stop signal to the end of the process; None waits for the step's end
    stop: Stop | None = None  # of a caller that handles the signals itself

    @property
    def leads(self) -> bool:
        """Whether this process stores the run and reports on it."""
        return self.training.team.leads

    def begin(self, resumes: bool) -> None:
        """Load the newest good checkpoint of a run that is continued, report so, and write what is known by now."""
        training, folder, team = self.training, self.folder, self.training.team
        if resumes:
            for change in environment_changes(folder, team.device.type):
                self._warn(f"resuming elsewhere: {change}; the bytes may differ")
            for problem in load_newest(training, folder.checkpoints):
                self._warn(f"{problem}; set aside")
            step = training.progress.step
            where = f"step {step}" if step else "step 0: there is no checkpoint yet"
            self.notify(f"resuming {folder.path} from {where}")
            if training.progress.learned >= training.pace.total:
                self._warn(
                    "nothing is left to train: the budget is done; raise --epochs or --steps (with AdaScale: of one "
                    "worker)"
                )
        if team.leads:
            begin(folder, self.recipe, team.device.type, team.size)

    def train(self, on_record: OnRecord = ignore) -> Result:
        """Train to the end; every record is stored, then given to `on_record` on the first process."""
        stored = stored_records(self.training, self.folder, self.checkpoint_steps, self.on_disk_full, self._warn)
        course = Course(self.recipe.search, self._warn)
        with self._stopping():
            for record in stored:
                course.observe(record)
                if self.leads:
                    on_record(record)
        assert isinstance(record, Result)
        if not self.recipe.recipe.label_smoothing:  # which keeps the training loss up
            course.end(record.train["loss"])
        return record

    def _warn(self, line: str) -> None:
        self.notify(Notice(line))

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let a signal stop training after the step; a second one, or one after the end, stops it at once."""
        training, seconds, timers = self.training, self.stop_seconds, contextlib.ExitStack()
        stop = self.stop or Stop()

        def ask(number: int) -> None:
            stop.ask(number)
            if seconds is not None:
                timer = threading.Timer(seconds, self._give_up, (number,))
                timer.daemon = True
                timer.start()
                timers.callback(timer.cancel)
            self.notify("stopping after this step to save the state; a second signal stops at once")

        handled = signals.stopping(ask, lambda: training.ended) if self.stop is None else contextlib.nullcontext()
        with timers, stop.of(training), handled:
            yield

    def _give_up(self, number: int) -> None:
        """End a process whose step does not end; what it has not saved is lost."""
        self.notify(f"no step has ended for {self.stop_seconds:.0f} s; the newest checkpoint is what is left")
        os._exit(128 + number)


class Course:
    """Warns when a run whose recipe was raced for does worse than the trials of its search promised, if it had any."""

    def __init__(self, search: Search | None, warn: Callable[[str], None]) -> None:
        losses = [trial.loss for trial in search.trials if trial.loss is not None] if search is not None else []
        self._promised = min(losses, default=None)
        self._warn, self._least = warn, math.inf

    def observe(self, record: Record) -> None:
        """Look at the loss of an epoch on validation data, where there are any."""
        if self._promised is not None and isinstance(record, Epoch) and record.validation is not None:
            loss = record.validation["loss"]
            if loss > RISE * self._least:
                self._warn(
                    f"the validation loss has risen from {self._least:.4g} to {loss:.4g} by epoch {record.epoch:.3g}: "
                    f"the run memorizes its training data and may end below one worker; --patience 2 restores the "
                    f"best weights, --search 0 follows the noise"
                )
                self._least = math.inf  # said once, until it falls and rises again
            self._least = min(self._least, loss)

    def end(self, train_loss: float) -> None:
        """Look at the loss on training data over the last epoch."""
        if self._promised is not None and not train_loss <= self._promised:
            self._warn(
                f"the training loss ended at {train_loss:.4g}, above the {self._promised:.4g} that auto's trial had "
                f"on held-out data: expect less than one worker's quality; raise --epochs, or use --search 0"
            )


def train_in(
    folder: RunFolder, task: Task, recipe: RunRecipe, placement: Placement | None = None, notify: Notify = silent
) -> None:
    """Train or continue a run of a larger question on this process alone; one that has a result is left as it is."""
    if folder.recipe.is_file():
        check_same(read_recipe(folder), recipe, folder, task.validation is not None)
        if folder.result.is_file():
            return
    with started_in(folder, task, recipe, placement, notify) as run:
        notify(f"training {run.training.planned_steps or 'some'} steps in {folder.path.name}")
        run.train()


@contextlib.contextmanager
def started_in(
    folder: RunFolder,
    task: Task,
    recipe: RunRecipe,
    placement: Placement | None = None,
    notify: Notify = silent,
    stop: Stop | None = None,
) -> Iterator[Run]:
    """A run of a larger question on this process alone, ready to train, or to continue what the folder holds.

    `stop` passes on the stop signal of a caller that handles it; by default the first signal saves this run.
    """
    hold_out, search, where = recipe.hold_out, recipe.search, placement or Placement()
    with Training(task, recipe.recipe, where, recipe.derived, None, hold_out, search, alone=True) as training:
        folder.path.mkdir(parents=True, exist_ok=True)
        with holding(folder.path):
            run = Run(folder, recipe, training, notify, stop=stop)
            run.begin(resumes=folder.recipe.is_file())
            yield run


def stored_records(
    training: Training,
    folder: RunFolder,
    checkpoint_steps: int | None,
    on_disk_full: DiskFull = "stop",
    warn: Callable[[str], None] = lambda line: None,
) -> Iterator[Record]:
    """The records of a training, each written into the folder, with checkpoints at every epoch or every N steps.

    `warn` reports what went wrong but did not end the run.
    """
    leads = training.team.leads
    if leads:
        problem = keep_until(folder.metrics, training.progress.step)
        if problem is not None:
            warn(problem)
        checkpoint.restore_records(folder.metrics, folder.checkpoints / f"step-{training.progress.step}")
        add_facts(folder.environment, training)
        checkpoint.clear_unfinished(folder.checkpoints)
    writer = RecordWriter(folder.metrics) if leads else None
    newest: deque[Record] = deque(maxlen=checkpoint.EMERGENCY_RECORDS)
    HEARTBEAT.last = Heartbeat(training.progress.step, True)
    try:
        for record in training.records():
            if isinstance(record, Result):
                record = dataclasses.replace(record, run=str(folder.path))
                if leads:
                    _export(training, folder)
                    write_atomically(folder.result, json.dumps(record.to_json(), indent=2) + "\n")
            newest.append(record)
            if writer is not None:
                _write(writer, record, on_disk_full)
            if _is_due(record, training, checkpoint_steps):
                try:
                    _save(training, folder, writer)
                except checkpoint.StorageFull as error:
                    if on_disk_full == "stop":
                        raise
                    warn(f"{error}; training on without it, as --on-disk-full continue says")
            yield record
        if writer is not None:
            writer.flush()
        if training.interrupted:
            _save(training, folder, writer)
            _await_own_signal(training)
            raise Interrupted(
                f"{signals.name(training.interrupted)} stopped the run after step {training.progress.step}; its "
                f"state is saved, continue with --resume {folder.path}",
                training.interrupted,
            )
    except NonFiniteLoss as error:
        if writer is not None:
            place = error.place or Place(training.progress.step)
            writer.write(Failure(place.step, str(error), place.worker, place.parameter, place.samples))
        raise
    except ScalewiseError:
        raise
    except Exception as error:
        lost = translated(error)
        if not isinstance(lost, LostContact):
            raise
        saved = checkpoint.save_emergency(training, folder.checkpoints, newest)
        what = "the newest checkpoint is what is left" if saved is None else f"the state after step {saved} is saved"
        raise LostContact(f"{lost}; {what}") from None
    finally:
        HEARTBEAT.last = Heartbeat(training.progress.step)
        if writer is not None:
            with contextlib.suppress(OSError):  # a full disk, of which more was said than could be here
                writer.close()


def _await_own_signal(training: Training) -> None:
    """Give the agent of this machine time to end it too, when the agent of another one was first.

    torchrun ends all processes when a machine joins the job. One that has ended already would count as failed.
    """
    deadline = time.monotonic() + (SIGNAL_SECONDS if training.team.size > 1 else 0.0)
    while not training.signal and time.monotonic() < deadline:
        time.sleep(0.02)


def _write(writer: RecordWriter, record: Record, on_disk_full: DiskFull) -> None:
    """Add a record; on a full disk it waits in memory until there is room, if the run is to continue."""
    try:
        writer.write(record)
    except OSError as error:
        if on_disk_full == "stop" or error.errno not in checkpoint.STORAGE_FULL or isinstance(record, Result):
            raise


def _export(training: Training, folder: RunFolder) -> None:
    """Write the model to use, for `load_state_dict`: the best weights if selected, statistics right at evaluation."""
    temporary = folder.model.with_suffix(".tmp")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in training.final.items()}
    try:
        temporary.unlink(missing_ok=True)  # a link put there would be followed
        write_tensors(tensors, temporary, {"sha256": sha256(tensors)})
        temporary.replace(folder.model)
    except (OSError, SafetensorError) as error:  # safetensors hides the system's own error
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{folder.model} could not be written: {error}; free disk space and resume") from None


def _save(training: Training, folder: RunFolder, writer: RecordWriter | None) -> None:
    """Write a checkpoint of good weights, and before it the records: it must not know more than they do."""
    training.check_weights()
    problem = None
    if writer is not None:
        try:
            writer.flush()
        except OSError as error:
            problem = error
    checkpoint.save(training, folder.checkpoints, problem)
    if training.team.leads:
        checkpoint.prune(folder.checkpoints, KEPT_CHECKPOINTS, training.progress.best_step)


def _is_due(record: Record, training: Training, checkpoint_steps: int | None) -> bool:
    if isinstance(record, Epoch):
        return True
    paused = isinstance(record, Step) and record.step == training.progress.step and not training.ends_epoch()
    return paused and checkpoint_steps is not None and training.progress.step % checkpoint_steps == 0
