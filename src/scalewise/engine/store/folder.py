"""A run folder: the recipe, the environment, the records, the checkpoints and the result of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from scalewise.engine.data.samples import Samples
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.placement import DiskFull
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.heartbeat import HEARTBEAT, Heartbeat
from scalewise.engine.store import checkpoint, emergency
from scalewise.errors import (
    CheckpointError,
    Interrupted,
    LostContact,
    NonFiniteLoss,
    Place,
    RunFolderError,
    ScalewiseError,
)
from scalewise.files import first_problem, read_bytes, read_json
from scalewise.recipe import Derived, Pilot, Recipe, differing_fields
from scalewise.records import Epoch, Failure, Record, RecordWriter, Result, Step, keep_until, write_atomically

KEPT_CHECKPOINTS = 2
SIGNAL_SECONDS = 3.0
UNNAMED = "none"  # torchrun's name for a job that was given none
_STAMP = re.compile(r"-(\d{8}-\d{6})(?:-(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, the task and its settings."""
        return self.path / "recipe.json"

    @property
    def environment(self) -> Path:
        """Versions, processor and placement."""
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        """One record a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model's parameters and buffers, for `load_state_dict`."""
        return self.path / "model.safetensors"

    @property
    def result(self) -> Path:
        """What `train --json` printed."""
        return self.path / "result.json"


@dataclass(frozen=True)
class RunRecipe:
    """What recipe.json says: which task with which settings, how it is learned, and how that was derived."""

    task: str
    settings: list[str]
    recipe: Recipe
    derived: list[Derived]
    hold_out: bool = False
    pilot: Pilot | None = None


_RUN_RECIPE = TypeAdapter(RunRecipe)


def check_folder(out: Path | None) -> None:
    """Refuse a place for a new run that is in use or cannot be written."""
    place = out or Path("runs")
    if out is not None and out.exists() and (not out.is_dir() or any(_visible(out))):
        raise RunFolderError(
            f"--out {out} must be a new or empty folder, found one in use; choose another, or go on with --resume {out}"
        )
    check_writable(next(path for path in (place.absolute(), *place.absolute().parents) if path.exists()))


def _visible(folder: Path) -> Iterator[Path]:
    """What is in a folder, without what a process left behind that died while it wrote its first file."""
    return (path for path in folder.iterdir() if not path.name.startswith("."))


def check_writable(folder: Path) -> None:
    """Refuse a folder that takes no files: by the system's answer and, for root, by its mode, set on purpose."""
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_mode & 0o222):
        raise RunFolderError(
            f"a run needs a folder that can be written, got {folder}, which cannot; make it so or use another --out"
        )


def make_folder(out: Path | None, task: str) -> RunFolder:
    """Make the folder of a new run: `out`, or runs/<task>-<time>, never one that another run has made."""
    check_folder(out)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return RunFolder(out)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    others = [_stamp(path, task) for path in Path("runs").glob(f"{task}-*")]
    stamp = max([stamp, *(other[0] for other in others if other is not None)])  # also after a clock was set back
    for number in range(1, 1000):
        path = Path("runs") / (f"{task}-{stamp}" if number == 1 else f"{task}-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return RunFolder(path)
    raise RunFolderError(f"there are 999 runs of {task} from this second in runs; use --out")


def begin(folder: RunFolder, run: RunRecipe, device: str, processes: int) -> None:
    """Write what is known before the first step; a resumed run keeps the environment it was begun in."""
    derived = [value.to_json() for value in run.derived]
    content: dict[str, Any] = {
        "task": run.task,
        "settings": run.settings,
        "recipe": run.recipe.model_dump(),
        "derived": derived,
    }
    if run.hold_out:
        content["hold_out"] = True
    if run.pilot is not None:
        content["pilot"] = dataclasses.asdict(run.pilot)
    known = stored_environment(folder) or environment(device, processes)
    known.pop("job", None)
    if (job := current_job()) is not None:
        known["job"] = job
    try:
        write_atomically(folder.environment, json.dumps(known, indent=2) + "\n")  # first: from now on it is this job's
        write_atomically(folder.recipe, json.dumps(content, indent=2) + "\n")
        folder.result.unlink(missing_ok=True)
    except IsADirectoryError as error:
        place = error.filename2 or error.filename
        raise RunFolderError(f"{place} must be a file, got a folder; remove it") from None


def current_job() -> dict[str, Any] | None:
    """What tells the job of this process from any other; None outside of one that restarts its processes."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or (name == UNNAMED and os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0"):
        return None
    return {"id": name, "arguments": sys.argv[1:]}


def begun_by_this_job(out: Path | None, task: str) -> RunFolder | None:
    """The folder of the run that this very job has begun, before its processes were started again.

    A job without a name of its own (torchrun without --rdzv-id) is known by having been restarted.
    """
    job = current_job()
    if job is None or (job["id"] == UNNAMED and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"):
        return None
    places = [out] if out is not None else [path.parent for path in Path("runs").glob(f"{task}-*/env.json")]
    for folder in map(RunFolder, places):
        if (stored_environment(folder) or {}).get("job") == job:
            if folder.recipe.is_file():
                return folder
            folder.environment.unlink()  # it died between its first file and its second: begin again
    return None


def environment(device: str, processes: int) -> dict[str, Any]:
    """What the bytes of a run may depend on besides task and recipe, and where it ran."""
    import torch

    import scalewise

    return {
        "scalewise": scalewise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "processes": processes,
    }


def read_recipe(folder: RunFolder) -> RunRecipe:
    """The recipe of a stored run."""
    if not folder.recipe.is_file():
        raise RunFolderError(f"{folder.path} must be a run folder, found no recipe.json in it; check the path")
    try:
        return _RUN_RECIPE.validate_json(read_bytes(folder.recipe), strict=True)
    except (OSError, ValueError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise RunFolderError(f"{folder.recipe} must be a stored recipe, got something else: {problem}") from None


def check_same(stored: RunRecipe, wanted: RunRecipe, folder: RunFolder, has_validation: bool) -> None:
    """Refuse to resume a run with another task or recipe, or on other training data."""
    if (os.path.normpath(stored.task), sorted(stored.settings)) != (
        os.path.normpath(wanted.task),
        sorted(wanted.settings),
    ):
        raise RunFolderError(
            f"{folder.path} is a run of task {' '.join([stored.task, *stored.settings])}, got "
            f"{' '.join([wanted.task, *wanted.settings])}; resume it with its own task, or start anew without --resume"
        )
    for name in differing_fields(stored.recipe, wanted.recipe):
        raise RunFolderError(
            f"{folder.path} was begun with {name}={getattr(stored.recipe, name)}, got {getattr(wanted.recipe, name)}; "
            f"on resume only epochs, steps, patience, target and the placement may change: drop "
            f"--{name.replace('_', '-')}"
        )
    before, after = (run.recipe.selects or run.hold_out for run in (stored, wanted))
    if before != after and not has_validation:
        raise RunFolderError(
            f"{folder.path} was trained on {'nine tenths' if before else 'all'} of the training data; "
            f"--patience and --target hold a tenth out, or no longer do: give the task validation data, or start anew"
        )


def newest(name: str, root: Path, file: str) -> Path | None:
    """The newest folder <name>-<time> under `root`, by its name, that holds such a file, finished or not."""
    found = {path.parent: _stamp(path.parent, name) for path in root.glob(f"{name}-*/{file}")}
    stamps = {path: stamp for path, stamp in found.items() if stamp is not None}
    return max(stamps, key=lambda path: stamps[path]) if stamps else None


def _stamp(path: Path, name: str) -> tuple[str, int] | None:
    """The time and number in the name of a run's folder."""
    found = _STAMP.fullmatch(path.name.removeprefix(name))
    return (found[1], int(found[2] or 1)) if found else None


def stored_environment(folder: RunFolder) -> dict[str, Any] | None:
    """What env.json says, if it says anything."""
    try:
        stored = read_json(folder.environment)
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) else None


def environment_changes(folder: RunFolder, device: str) -> list[str]:
    """What differs from the environment a run was begun in, of the things its bytes may depend on."""
    matters = ("torch", "machine", "cpu_capability", "device")
    stored = stored_environment(folder) or {}
    now = environment(device, 0)
    return [
        f"{name} was {stored[name]}, is {now[name]}" for name in matters if name in stored and stored[name] != now[name]
    ]


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
                f"{signal.Signals(training.interrupted).name} stopped the run after step {training.progress.step}; its "
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


HASHED_SAMPLES = 256


def add_facts(environment: Path, training: Training) -> None:
    """Add `model` and `task` to env.json, unless they are there from before a resume."""
    known = read_json(environment) if environment.is_file() else {}
    if "model" not in known:
        task = {"samples": len(training.samples), "recipe": training.task.recipe.model_dump()}
        if training.samples.in_memory:
            task["data_sha256"] = data_sha256(training.samples)
        content = {**known, "model": model_facts(training.strategy.model.module), "task": task}
        write_atomically(environment, json.dumps(content, indent=2) + "\n")


def data_sha256(samples: Samples) -> str:
    """The hash of some samples, evenly spread, by which one can tell other data."""
    indices = torch.linspace(0, len(samples) - 1, min(len(samples), HASHED_SAMPLES)).long()
    leaves, _ = tree_flatten(samples.fetch(indices, torch.zeros_like(indices)))
    return sha256({str(number): leaf for number, leaf in enumerate(leaves)})


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Its size, and its batch-norm layers with the smallest momentum, as torch defines it."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers if layer.momentum is not None]
    norm = {"layers": len(layers), "momentum": min(momenta, default=None)} if layers else None
    return {"parameters": parameters, "batch_norm": norm}
