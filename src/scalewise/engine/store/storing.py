"""The records of a training, stored as they come: metrics, checkpoints, the result and the model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterator

from safetensors import SafetensorError

from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.placement import DiskFull
from scalewise.engine.processes import signals
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.heartbeat import HEARTBEAT, Heartbeat
from scalewise.engine.store import checkpoint, emergency
from scalewise.engine.store.folder import RunFolder, add_facts
from scalewise.errors import CheckpointError, Interrupted, LostContact, NonFiniteLoss, Place, ScalewiseError
from scalewise.records import Epoch, Failure, Record, RecordWriter, Result, Step, keep_until, write_atomically

KEPT_CHECKPOINTS = 2
SIGNAL_SECONDS = 3.0


def stored_records(
    training: Training,
    folder: RunFolder,
    checkpoint_steps: int | None,
    on_disk_full: DiskFull = "stop",
    warn: Callable[[str], None] = lambda line: None,
) -> Iterator[Record]:
    """The records of a training, each written into the folder, with checkpoints at every epoch or so many steps.

    Arguments:
        training, folder: what is stored, and where.
        checkpoint_steps: steps from checkpoint to checkpoint, besides one at every epoch's end.
        on_disk_full: whether to stop, or to train on and try again at the next checkpoint.
        warn: told what was wrong but did not end the run.
    """
    leads = training.team.leads
    if leads:
        problem = keep_until(folder.metrics, training.progress.step)
        if problem is not None:
            warn(problem)
        emergency.restore_records(folder.metrics, folder.checkpoints / f"step-{training.progress.step}")
        add_facts(folder.environment, training)
        checkpoint.clear_unfinished(folder.checkpoints)
    writer = RecordWriter(folder.metrics) if leads else None
    newest: deque[Record] = deque(maxlen=emergency.RECORDS)
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
                f"state is saved, go on with --resume {folder.path}",
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
        saved = emergency.save(training, folder.checkpoints, newest)
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
    """Add a record; on a full disk it waits in memory until there is room, if the run is to go on."""
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
        checkpoint.write_tensors(tensors, temporary, {"sha256": sha256(tensors)})
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
