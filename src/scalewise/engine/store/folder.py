"""A run folder: the recipe, the environment, the records, the checkpoints and the result of one run."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch.utils._pytree import tree_flatten

from scalewise.engine.data.samples import Samples
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.errors import RunFolderError
from scalewise.files import first_problem, parse_json, read_bytes, read_json
from scalewise.nn.batch_norm import averaging_layers, smallest_momentum
from scalewise.recipe import Derived, Recipe, Search, differing_fields
from scalewise.records import write_atomically

NAME_BYTES = 255  # of a file or folder, on every usual file system
UNNAMED = "none"  # torchrun's name for a job that was given none
_STAMP = re.compile(r"-(\d{8}-\d{6})(?:-(\d{1,9}))?", re.ASCII)


class RunFolder:
    """The paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.json"  # the resolved recipe, the task and its settings
        self.environment = path / "env.json"  # versions, processor and placement
        self.metrics = path / "metrics.jsonl"  # one record a line
        self.checkpoints = path / "checkpoints"  # by step
        self.model = path / "model.safetensors"  # the trained parameters and buffers, for `load_state_dict`
        self.result = path / "result.json"  # what `train --json` printed


@dataclass(frozen=True)
class RunRecipe:
    """What recipe.json says: which task with which settings, how it is learned, and how that was derived."""

    task: str
    settings: list[str]
    recipe: Recipe
    derived: list[Derived]
    hold_out: bool = False
    search: Search | None = None


_RUN_RECIPE = TypeAdapter(RunRecipe)


def check_folder(out: Path | None) -> None:
    """Refuse a place for a new run that is in use or cannot be written."""
    place = out or Path("runs")
    if len(os.fsencode(place.name)) > NAME_BYTES:
        raise RunFolderError(f"--out needs a name of at most {NAME_BYTES} bytes, got {len(place.name)}; shorten it")
    # what a process left behind that died while it wrote its first file does not count
    if out is not None and out.exists() and (not out.is_dir() or any(out.glob("[!.]*"))):
        raise RunFolderError(
            f"--out {out} must be a new or empty folder, found one in use; choose another, or --resume {out}"
        )
    check_writable(next(path for path in (place.absolute(), *place.absolute().parents) if path.exists()))


def check_writable(folder: Path) -> None:
    """Refuse a folder that takes no files: by the system's answer and, for root, by its mode, set on purpose."""
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_mode & 0o222):
        raise RunFolderError(f"{folder} is no writable folder; fix its permissions or pass another --out")


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
    raise RunFolderError(f"runs/ already has 999 runs of {task} from this second; pass --out")


def begin(folder: RunFolder, run: RunRecipe, device: str, processes: int) -> None:
    """Write what is known before the first step; a resumed run keeps the environment it was begun in."""
    content = dataclasses.asdict(run) | {"recipe": run.recipe.model_dump()}
    content = {name: value for name, value in content.items() if value not in (None, False)}  # only what was asked for
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
    """What identifies the job of this process; None outside of one that restarts its processes."""
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
        content = parse_json(read_bytes(folder.recipe))
        if isinstance(content, dict) and "pilot" in content:  # its name before auto raced
            content["search"] = content.pop("pilot")
        return _RUN_RECIPE.validate_json(json.dumps(content), strict=True)
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
            f"{' '.join([wanted.task, *wanted.settings])}; resume it with its own task, or start again without --resume"
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
            f"--patience and --target hold a tenth out, or no longer do: give the task validation data, or start again"
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


HASHED_SAMPLES = 256


def data_sha256(samples: Samples) -> str | None:
    """The hash of some samples, evenly spread, which differs for other data; None where they are not in memory."""
    if not samples.in_memory:
        return None
    indices = torch.linspace(0, len(samples) - 1, min(len(samples), HASHED_SAMPLES)).long()
    leaves, _ = tree_flatten(samples.fetch(indices, torch.zeros_like(indices)))
    return sha256({str(number): leaf for number, leaf in enumerate(leaves)})


def add_facts(environment: Path, training: Training) -> None:
    """Add `model` and `task` to env.json, unless they are there from before a resume."""
    known = read_json(environment) if environment.is_file() else {}
    if "model" not in known:
        task = {"samples": len(training.samples), "recipe": training.task.recipe.model_dump()}
        data = data_sha256(training.samples)
        if data is not None:
            task["data_sha256"] = data
        model = training.strategy.model.module
        layers = averaging_layers(model)  # with the smallest momentum, as torch defines it
        norm = {"layers": len(layers), "momentum": smallest_momentum(layers)} if layers else None
        facts = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "batch_norm": norm}
        content = {**known, "model": facts, "task": task}
        write_atomically(environment, json.dumps(content, indent=2) + "\n")


LOCK_FILE = ".lock"
MOST_NOTE_BYTES = 200
_held: set[int] = set()


def _forget() -> None:
    """Release inherited locks in a forked process, which may outlive the one that holds them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep a run folder for this process; refuse one that another run, here or in another process, is using.

    The system drops the lock when the process ends, so the file, which stays, means nothing by itself.
    """
    path = folder / LOCK_FILE
    try:  # it is written: a link put there would have another file overwritten
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise RunFolderError(f"{path} must be a plain file, got something else; remove it") from None
    _held.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        noted = os.pread(descriptor, MOST_NOTE_BYTES, 0).decode(errors="replace")
        holder = f" ({noted})" if noted.isprintable() and noted else ""
        raise RunFolderError(
            f"{folder} is in use by another run{holder}; wait for it or stop it, or use another --out"
        ) from None
    except OSError:  # a file system without locks: the run continues without one
        return
    with suppress(OSError):  # who holds it, for the message above; left out on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
