"""A run folder: the recipe, the environment, the records, the checkpoints and the result of one run."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from scalewise.engine import checkpoint
from scalewise.engine.facts import add_facts
from scalewise.engine.loop import Training
from scalewise.errors import CheckpointError, Interrupted, NonFiniteLoss, RunFolderError
from scalewise.recipe import Derived, Pilot, Recipe, differing_fields
from scalewise.records import Epoch, Failure, Record, RecordWriter, Result, Step, keep_until, write_atomically

KEPT_CHECKPOINTS = 2
_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?")


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


def check_folder(out: Path | None) -> None:
    """Refuse a place for a new run that is in use or cannot be written."""
    place = out or Path("runs")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(
            f"--out {out} must be a new or empty folder, found one in use; choose another, or go on with --resume {out}"
        )
    check_writable(next(path for path in (place.absolute(), *place.absolute().parents) if path.exists()))


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
    write_atomically(folder.recipe, json.dumps(content, indent=2) + "\n")
    if not folder.environment.exists():
        write_atomically(folder.environment, json.dumps(environment(device, processes), indent=2) + "\n")
    folder.result.unlink(missing_ok=True)


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
        raise RunFolderError(f"--resume {folder.path} must be a run folder, found no recipe.json in it; check the path")
    try:
        content = json.loads(folder.recipe.read_text())
        derived = [Derived(**value) for value in content["derived"]]
        recipe, held_out = Recipe(**content["recipe"]), bool(content.get("hold_out", False))
        pilot = Pilot(**content["pilot"]) if "pilot" in content else None
        return RunRecipe(content["task"], content["settings"], recipe, derived, held_out, pilot)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder.recipe} must be a stored recipe, got something else: {error}") from None


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
    """The newest folder <name>-<time> under `root` that holds such a file, finished or not."""
    found = [path for path in root.glob(f"{name}-*/{file}") if _STAMP.fullmatch(path.parent.name[len(name) :])]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def environment_changes(folder: RunFolder, device: str) -> list[str]:
    """What differs from the environment a run was begun in, of the things its bytes may depend on."""
    matters = ("torch", "machine", "cpu_capability", "device")
    try:
        stored = json.loads(folder.environment.read_text())
    except (OSError, ValueError):
        return []
    now = environment(device, 0)
    return [
        f"{name} was {stored[name]}, is {now[name]}" for name in matters if name in stored and stored[name] != now[name]
    ]


def stored_records(training: Training, folder: RunFolder, checkpoint_steps: int | None) -> Iterator[Record]:
    """The records of a training, each written into the folder, with checkpoints at every epoch or so many steps."""
    leads = training.team.leads
    if leads:
        keep_until(folder.metrics, training.progress.step)
        add_facts(folder.environment, training)
    writer = RecordWriter(folder.metrics) if leads else None
    try:
        for record in training.records():
            if isinstance(record, Result):
                record = dataclasses.replace(record, run=str(folder.path))
                if leads:
                    _export(training, folder)
                    write_atomically(folder.result, json.dumps(record.to_json(), indent=2) + "\n")
            if writer is not None:
                writer.write(record)
            if _is_due(record, training, checkpoint_steps):
                _save(training, folder, writer)
            yield record
        if training.interrupted:
            _save(training, folder, writer)
            raise Interrupted(
                f"{signal.Signals(training.interrupted).name} stopped the run after step {training.progress.step}; its "
                f"state is saved, go on with --resume {folder.path}",
                training.interrupted,
            )
    except NonFiniteLoss as error:
        if writer is not None:
            writer.write(Failure(training.progress.step, str(error)))
        raise
    finally:
        if writer is not None:
            writer.close()


def _export(training: Training, folder: RunFolder) -> None:
    """Write the model to use, for `load_state_dict`: the best weights if selected, statistics right at evaluation."""
    temporary = folder.model.with_suffix(".tmp")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in training.final.items()}
    try:
        save_file(tensors, temporary)
    except SafetensorError as error:  # it hides the system's own error
        raise CheckpointError(f"{folder.model} could not be written: {error}; free disk space and resume") from None
    temporary.replace(folder.model)


def _save(training: Training, folder: RunFolder, writer: RecordWriter | None) -> None:
    """Write a checkpoint of good weights, and before it the records: it must not know more than they do."""
    training.check_weights()
    if writer is not None:
        writer.flush()
    checkpoint.save(training, folder.checkpoints)
    if training.team.leads:
        checkpoint.prune(folder.checkpoints, KEPT_CHECKPOINTS, training.progress.best_step)


def _is_due(record: Record, training: Training, checkpoint_steps: int | None) -> bool:
    if isinstance(record, Epoch):
        return True
    paused = isinstance(record, Step) and record.step == training.progress.step and not training.ends_epoch()
    return paused and checkpoint_steps is not None and training.progress.step % checkpoint_steps == 0
