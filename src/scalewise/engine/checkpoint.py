"""Checkpoints: safetensors shards and a JSON index, by tensor name. Nothing is pickled.

    checkpoints/step-120/
        index.json                 progress, and for every tensor its shape and where its pieces are
        shard-0.safetensors        what process 0 held: parameters, buffers, optimizer state
        shard-1.safetensors        with a sharded optimizer: what process 1 held of its state

A checkpoint is written into a temporary folder, synced, and renamed, so it is there as a whole or not at all. The
index holds each shard's SHA-256; it is checked before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalewise.engine.loop import Training
from scalewise.engine.pace import Progress
from scalewise.engine.team import Team
from scalewise.engine.update import StateEntry
from scalewise.errors import CheckpointError

FORMAT = 1
Index = dict[str, Any]


def save(training: Training, folder: Path) -> Path:
    """Write the training state of all processes; every process calls it at the same step."""
    try:
        return _save(training, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"a checkpoint could not be written into {folder}: {error}; free disk space and resume"
        ) from None


def _save(training: Training, folder: Path) -> Path:
    team, progress = training.team, training.progress
    final = folder / f"step-{progress.step}"
    temporary = folder / f".step-{progress.step}.tmp"
    if team.leads:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    team.barrier()
    entries = training.strategy.state()
    if team.leads:
        entries += _tensors("model", training.strategy.model.tensors()) + _tensors("best", training.best)
    pieces = _gather(_write_shard(temporary, team.rank, entries), team)
    if team.leads:
        index = {
            "format": FORMAT,
            "progress": asdict(progress),
            "noise": training.noise.state(),
            "files": {name: digest for shard in pieces for name, digest in shard["files"].items()},
            "tensors": _merged(pieces),
        }
        _check_complete(temporary, index)
        _write_synced(temporary / "index.json", json.dumps(index).encode())
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        _sync_folder(folder)
    team.barrier()
    return final


def _tensors(prefix: str, tensors: dict[str, Tensor]) -> list[StateEntry]:
    """Whole tensors, element by element in their logical order."""
    return [
        StateEntry(f"{prefix}.{name}", tensor.contiguous().flatten(), 0, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _write_shard(folder: Path, rank: int, entries: list[StateEntry]) -> Index:
    """Write what this process has; returns its part of the index."""
    if not entries:
        return {"files": {}, "tensors": {}}
    file = f"shard-{rank}.safetensors"
    keys = [f"{entry.name}@{entry.start}" for entry in entries]
    data = {key: entry.tensor.detach().cpu().contiguous().clone() for key, entry in zip(keys, entries, strict=True)}
    save_file(data, folder / file)
    _sync_file(folder / file)
    tensors = {
        entry.name: {
            "shape": list(entry.shape),
            "pieces": [{"file": file, "key": key, "start": entry.start, "stop": entry.start + entry.tensor.numel()}],
        }
        for key, entry in zip(keys, entries, strict=True)
    }
    return {"files": {file: _sha256(folder / file)}, "tensors": tensors}


def _gather(part: Index, team: Team) -> list[Index]:
    if team.size == 1:
        return [part]
    parts: list[Index] = [{}] * team.size
    dist.all_gather_object(parts, part)
    return parts


def _merged(parts: list[Index]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {"shape": entry["shape"], "pieces": []})["pieces"] += entry["pieces"]
    return tensors


def _check_complete(folder: Path, index: Index) -> None:
    missing = [name for name in index["files"] if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"all processes must write into one folder, but {', '.join(missing)} did not appear in {folder}; with "
            f"--shard-optimizer on several machines --out must be on a shared file system"
        )


def stored(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def prune(folder: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` and the best one."""
    for path in stored(folder)[keep:]:
        if path.name != f"step-{best_step}":
            shutil.rmtree(path)


def load_newest(training: Training, folder: Path) -> list[str]:
    """Restore the newest good checkpoint, the same on every process; returns a line on every bad one.

    Bad ones are set aside under another name, never deleted. None at all leaves the training at step 0; if there are
    some but none is good, that is an error.
    """
    chosen: list[Any] = [None, []]
    if training.team.leads:
        chosen = [*_choose(folder)]
    if training.team.size > 1:
        dist.broadcast_object_list(chosen, 0)
    name, problems = chosen
    if name is not None:
        load(training, folder / name)
    elif problems:
        raise CheckpointError(f"none of the checkpoints can be used ({problems[0]}); restore one, or start anew")
    return list(problems)


def _choose(folder: Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint whose hashes are right, and what is wrong with the newer ones."""
    problems = []
    bad = []
    for path in stored(folder):
        try:
            _verified_index(path)
        except CheckpointError as error:
            problems.append(str(error))
            bad.append(path)
        else:
            for other in bad:
                _set_aside(other)
            return path.name, problems
    return None, problems


def _set_aside(path: Path) -> None:
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    path.rename(next(name for name in names if not name.exists()))


def load(training: Training, path: Path) -> None:
    """Restore one checkpoint into a training that was built from the same task and recipe, on any processes."""
    index = _verified_index(path)
    try:
        known = {field.name for field in fields(Progress)}
        progress = Progress(**{name: value for name, value in index["progress"].items() if name in known})
        with _Shards(path, index) as shards:
            model = training.strategy.model
            tensors = {name: shards.whole(f"model.{name}") for name in model.tensors()}
            for name, tensor in model.tensors().items():
                if tensor.shape != tensors[name].shape:
                    raise ValueError(f"{name} has shape {list(tensor.shape)}, stored is {list(tensors[name].shape)}")
            best = [name.removeprefix("best.") for name in index["tensors"] if name.startswith("best.")]
            best_tensors = {name: shards.whole(f"best.{name}").to(training.team.device) for name in best}
            training.strategy.load_state(index["tensors"], shards.read)
        training.noise.restore(index["noise"])
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {error}; resume the run it belongs to"
        ) from None
    model.load(tensors)
    training.best = best_tensors
    training.restore(progress)


def model_tensors(path: Path) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint, without a training to load them into."""
    index = _verified_index(path)
    with _Shards(path, index) as shards:
        names = [name for name in index["tensors"] if name.startswith("model.")]
        return {name.removeprefix("model."): shards.whole(name) for name in names}


def _verified_index(path: Path) -> Index:
    try:
        index = json.loads((path / "index.json").read_bytes())
        if index["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {index['format']}, this version reads {FORMAT}")
        for name, expected in index["files"].items():
            if Path(name).name != name or _sha256(path / name) != expected:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} does not have the SHA-256 of its index")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # ValueError: not JSON, not UTF-8
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None
    assert isinstance(index, dict)
    return index


class _Shards:
    """The shards of one checkpoint, open for reading by tensor name."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path, self._index = path, index
        self._files: dict[str, Any] = {}

    def __enter__(self) -> _Shards:
        for name in self._index["files"]:
            self._files[name] = safe_open(self._path / name, "pt").__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)

    def whole(self, name: str) -> Tensor:
        """A tensor in its shape."""
        shape = self._index["tensors"][name]["shape"]
        return self.read(name, 0, torch.Size(shape).numel()).reshape(shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, from however many pieces."""
        found = torch.cat([*self._parts(name, start, stop)])
        if len(found) != stop - start:
            raise CheckpointError(f"checkpoint {self._path} holds {len(found)} of {stop - start} elements of {name}")
        return found

    def _parts(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for piece in sorted(self._index["tensors"][name]["pieces"], key=lambda piece: int(piece["start"])):
            first, last = max(start, piece["start"]), min(stop, piece["stop"])
            if first < last or start == stop:  # a tensor without elements has one piece without elements
                stored = self._files[piece["file"]].get_slice(piece["key"])
                yield stored[first - piece["start"] : last - piece["start"]]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
