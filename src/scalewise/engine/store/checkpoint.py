"""Checkpoints: safetensors shards and a JSON index, by tensor name. Nothing is pickled.

    checkpoints/step-120/
        index.json                 progress, recipe, and for every tensor its shape and where its pieces are
        shard-0.safetensors        what process 0 held: parameters, buffers, optimizer state
        shard-1.safetensors        with a sharded optimizer: what process 1 held of its state

A checkpoint is written into a temporary folder, synced, and renamed, so it exists as a whole or not at all. The
index holds the size and SHA-256 of each shard, and its own; they are checked before anything is loaded. The
steps in their names, not clocks, show which one is newest.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from scalewise import records
from scalewise.engine.loop import Training
from scalewise.engine.store.shards import (
    INDEX_FILE,
    Entry,
    File,
    Index,
    Piece,
    Shards,
    described,
    key,
    sync_folder,
    verified_index,
    write_tensors,
)
from scalewise.engine.update.optimizer import StateEntry
from scalewise.errors import CheckpointError, DamagedCheckpoint, ScalewiseError
from scalewise.recipe import Recipe, differing_fields
from scalewise.records import Record, Step, names_aside

EMERGENCY_RECORDS = 256  # kept in memory: more than the first process holds back before it writes
STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SYSTEM_ERROR = re.compile(r"os error (\d+)")  # how safetensors passes the system's error on


class StorageFull(CheckpointError):
    """The disk is full; older checkpoints are unchanged."""


@dataclass(frozen=True)
class _Written:
    """What one process has written, or why it could not."""

    files: dict[str, File]
    tensors: dict[str, Entry]
    problem: str | None = None
    full: bool = False


def save(training: Training, folder: Path, problem: OSError | None = None) -> Path:
    """Write the training state of all processes; every process calls it at the same step, and fails if one does.

    `folder` is that of all checkpoints, `problem` why this process cannot write one, if that is known already.
    """
    team, progress = training.team, training.progress
    final = folder / f"step-{progress.step}"
    temporary = folder / f".step-{progress.step}.tmp"
    prepared = _attempt(lambda: _make(temporary, problem)) if team.leads else _Written({}, {})
    team.barrier()
    entries = training.strategy.state()
    with training.strategy.whole() as model:
        if team.leads:
            entries += _tensors("model", model.tensors()) + _tensors("best", training.best)
        mine = prepared if prepared.problem else _attempt(lambda: _write_shard(temporary, team.rank, entries))
        parts = team.gather_objects(mine)
    published = _Written({}, {})
    if team.leads and not any(part.problem for part in parts):
        index = Index(progress, training.noise.state(), training.recipe.model_dump(), *_merged(parts))
        published = _attempt(lambda: _publish(temporary, final, index))
    outcomes = [*parts, *team.gather_objects(published)]
    if any(outcome.problem for outcome in outcomes):
        if team.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        first = next(outcome for outcome in outcomes if outcome.problem)
        kind = StorageFull if first.full else CheckpointError
        advice = "free disk space and resume" if first.full else "check the folder's permissions and resume"
        raise kind(f"a checkpoint could not be written into {folder}: {first.problem}; {advice}")
    return final


def _attempt(write: Callable[[], _Written | None]) -> _Written:
    """Write something; a failure becomes part of the outcome."""
    try:
        return write() or _Written({}, {})
    except (OSError, SafetensorError, CheckpointError) as error:
        number = getattr(error, "errno", None)
        hidden = _SYSTEM_ERROR.search(str(error))
        number = int(hidden[1]) if number is None and hidden else number
        return _Written({}, {}, str(error), number in STORAGE_FULL)


def _make(temporary: Path, problem: OSError | None) -> None:
    if problem is not None:
        raise problem
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, index: Index) -> None:
    """Give a complete checkpoint its name; a good one of the same step stays."""
    missing = [name for name in index.files if not (temporary / name).exists()]
    if missing:
        raise CheckpointError(
            f"all processes must write into one folder, but {', '.join(missing)} did not appear in {temporary}; with "
            f"--shard-optimizer on several machines --out must be on a shared file system"
        )
    records.write_atomically(temporary / INDEX_FILE, index.to_json())
    sync_folder(temporary)
    if final.exists():
        try:
            verified_index(final)
        except DamagedCheckpoint:
            _set_aside(final)
        else:
            shutil.rmtree(temporary)
            return
    temporary.replace(final)
    sync_folder(final.parent)


def save_emergency(training: Training, folder: Path, newest: Iterable[Record]) -> int | None:
    """Write the state after the last whole step from this process alone, after another one has died.

    Every process holds all of it, so one that is left is enough. The newest records are stored with it: those that the
    first process had not yet written may have died with it. Returns the step, or None where one process does not hold
    the whole state. The training has broken off, and will not continue.
    """
    try:
        waiting, state = training.settle(), training.strategy.emergency_state()
        if waiting is None or state is None or training.strategy.non_finite() is not None:
            return None
        lines = [records.line(record) for record in (*newest, *waiting)]
        final = folder / f"step-{training.progress.step}"
        temporary = folder / f".{final.name}.process-{training.team.rank}.tmp"
        _make(temporary, None)
        tensors = _tensors("model", training.strategy.model.tensors()) + _tensors("best", training.best)
        written = _write_shard(temporary, training.team.rank, state + tensors)
        recipe = training.recipe.model_dump()
        index = Index(training.progress, training.noise.state(), recipe, *_merged([written]), lines)
        try:
            _publish(temporary, final, index)
        except OSError:  # another process has written the same state already
            shutil.rmtree(temporary, ignore_errors=True)
    except (ScalewiseError, OSError, SafetensorError):  # an older checkpoint exists; report the first failure instead
        return None
    return training.progress.step


def restore_records(metrics: Path, stored: Path) -> None:
    """Put the records that came with a checkpoint in the place of those from their first step on."""
    if not stored.exists():
        return
    found = [json.loads(line) for line in verified_index(stored).records]  # each a record, which is verified too
    while found and found[0]["kind"] != Step.kind:  # its step was before the kept ones
        found.pop(0)
    if not found:
        return
    before = records.read(metrics) if metrics.exists() else iter(())
    kept = [record for record in before if record["step"] < found[0]["step"]]
    records.write_atomically(metrics, "".join(json.dumps(record) + "\n" for record in (*kept, *found)))


def _tensors(prefix: str, tensors: dict[str, Tensor]) -> list[StateEntry]:
    """Whole tensors, element by element in their logical order."""
    return [
        StateEntry(f"{prefix}.{name}", tensor.contiguous().flatten(), 0, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _write_shard(folder: Path, rank: int, entries: list[StateEntry]) -> _Written:
    """Write what this process has; returns its part of the index."""
    if not entries:
        return _Written({}, {})
    file = f"shard-{rank}.safetensors"
    keys = [key(entry.name, entry.start) for entry in entries]
    data = {name: entry.tensor.detach().cpu().contiguous().clone() for name, entry in zip(keys, entries, strict=True)}
    write_tensors(data, folder / file)
    tensors: dict[str, Entry] = {}
    for name, entry in zip(keys, entries, strict=True):
        piece = Piece(file, name, entry.start, entry.start + entry.tensor.numel())
        tensors.setdefault(entry.name, Entry([*entry.shape], [])).pieces.append(piece)
    return _Written({file: described(folder / file)}, tensors)


def _merged(parts: list[_Written]) -> tuple[dict[str, File], dict[str, Entry]]:
    files: dict[str, File] = {}
    tensors: dict[str, Entry] = {}
    for part in parts:
        files |= part.files
        for name, entry in part.tensors.items():
            tensors.setdefault(name, Entry(entry.shape, [])).pieces.extend(entry.pieces)
    return files, tensors


def stored(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{1,18}", path.name, re.ASCII)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def clear_unfinished(folder: Path) -> None:
    """Remove what processes were writing when they died."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` and the best one."""
    for path in stored(folder)[keep:]:
        if path.name != f"step-{best_step}":
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is tried again


def load_newest(training: Training, folder: Path) -> list[str]:
    """Restore the newest good checkpoint, the same on every process; returns a line on every bad one.

    Bad ones are set aside under another name, never deleted. None at all leaves the training at step 0; if there are
    some but none is good, that is an error.
    """
    names = training.team.shared([path.name for path in stored(folder)] if training.team.leads else [])
    problems: list[str] = []
    for name in names:
        problem = _try(training, folder / name)
        if problem is None:
            if training.team.leads:
                for bad in names[: len(problems)]:
                    _set_aside(folder / bad)
            return problems
        problems.append(problem)
    if problems:
        raise CheckpointError(f"none of the checkpoints can be used ({problems[0]}); restore one, or start again")
    return []


def _try(training: Training, path: Path) -> str | None:
    """Load a checkpoint on every process, or return why one of them could not: files may vanish at any moment."""
    problem: CheckpointError | None = None
    try:
        load(training, path, same_recipe=True)
    except CheckpointError as error:
        problem = error
    found = [other for other in training.team.gather_objects(problem) if other is not None]
    wrong = [other for other in found if not isinstance(other, DamagedCheckpoint)]
    if wrong:
        raise wrong[0]
    return str(found[0]) if found else None


def _set_aside(path: Path) -> None:
    try:
        path.rename(next(name for name in names_aside(path) if not name.exists()))
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is damaged and must be set aside: {error}; move it away") from None


def load(training: Training, path: Path, same_recipe: bool = False) -> None:
    """Restore one checkpoint into a training of the same task and model, on any processes.

    `same_recipe` refuses one that was trained by another recipe.
    """
    index = verified_index(path)
    if path.name != f"step-{index.progress.step}":
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: it was written after step {index.progress.step}")
    if same_recipe:  # one of the two may have been changed since
        try:
            trained_by = Recipe(**index.recipe)
        except (TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: its recipe: {error}") from None
        for name in differing_fields(trained_by, training.recipe):
            raise DamagedCheckpoint(
                f"checkpoint {path} was trained with {name}={getattr(trained_by, name)}, the run's recipe says "
                f"{getattr(training.recipe, name)}"
            )
    with Shards(path, index) as shards:
        tensors = {name: shards.whole(f"model.{name}") for name in _fitting(path, index, training)}
        for name, tensor in training.strategy.model.tensors().items():
            if tensor.dtype != tensors[name].dtype:
                raise _misfit(path, f"{name} is of {tensor.dtype}, stored is {tensors[name].dtype}")
        best = [name.removeprefix("best.") for name in index.tensors if name.startswith("best.")]
        best_tensors = {name: shards.whole(f"best.{name}").to(training.team.device) for name in best}
        try:
            training.strategy.load_state(index.tensors, shards.read)
            training.noise.restore(index.noise)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise _misfit(path, str(error)) from None
    training.strategy.load(tensors)
    training.best = best_tensors
    training.restore(index.progress)


def _fitting(path: Path, index: Index, training: Training) -> list[str]:
    """The names of the model's tensors, which are all stored, in their shapes, and no others."""
    expected = {name: [*tensor.shape] for name, tensor in training.strategy.model.tensors().items()}
    for prefix in ("model.", "best."):
        found = {
            name.removeprefix(prefix): entry.shape for name, entry in index.tensors.items() if name.startswith(prefix)
        }
        if not found and prefix == "best.":
            continue
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                shapes = [shape or "missing" for shape in (expected.get(name), found.get(name))]
                raise _misfit(path, f"{name} has shape {shapes[0]}, stored is {shapes[1]}")
    return [*expected]


def _misfit(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} does not fit this model: {reason}; resume the run it belongs to")


def model_tensors(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint, without a training to load them into."""
    index = verified_index(path)
    with Shards(path, index) as shards:
        names = [name for name in index.tensors if name.startswith("model.")]
        return {name.removeprefix("model."): shards.whole(name) for name in names}
