"""What `sw.watch` writes, a file per process: who is watched, then one JSON object a step.

Numbers that cost something are taken on some steps only and are None on the others.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from scalewise.errors import RunFolderError
from scalewise.records import finite, read

_FILE = re.compile(r"process-(\d+)\.jsonl")
_ENCODER = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True)
class WatchedProcess:
    """A process, its model and its optimizer."""

    kind: ClassVar[str] = "process"
    process: int
    processes: int
    optimizer: str
    parameters: int
    reduces: bool = False  # gradients are averaged over processes where the watcher can see it (DDP)
    sharded: bool = False  # each process holds a part of the parameters (FSDP2): squared norms add up over processes
    batch_norm_layers: int = 0
    batch_norm_momentum: float | None = None  # the smallest; None without batch norm, or where it averages all batches
    batch_norm_synchronised: bool = False


@dataclass(frozen=True)
class WatchedStep:
    """One call of the optimizer's step, as seen by one process."""

    kind: ClassVar[str] = "step"
    step: int
    lr: float
    samples: list[int]  # per micro batch, i.e. per forward pass in training mode
    seconds: float
    inputs: str | None = None  # a fingerprint a sample, packed by `pack`; at most of the first 64 of each micro batch
    loss: float | None = None
    loss_finite: bool = True
    first_square: float | None = None  # ‖gradient of the first backward pass‖², before any averaging over processes
    passes: int | None = None  # backward; fewer than micro batches where the model is called several times for one loss
    square: float | None = None  # ‖gradient‖² after the last pass, before clipping; this process's part under FSDP2
    gradient_finite: bool | None = None
    part_samples: float | None = None  # of each part of a step with one backward pass
    part_square: float | None = None  # ‖mean gradient‖² of these parts
    averaging: list[list[float]] | None = None  # per micro batch, output positions with a gradient, and Σ|gradient|
    top_label: list[int] | None = None  # samples with the commonest label, that label, and samples looked at
    weights: list[float] | None = None  # some, after the step
    weight_norm: float | None = None  # of all of them
    statistics_gap: float | None = None  # how far batch norm's running statistics are from this micro batch's
    statistics_batches: int | None = None  # that the first batch-norm layer has seen
    statistics_layers: int | None = None  # batch-norm layers in training mode, which alone take statistics
    statistics_group: int | None = None  # the smallest of their groups of samples
    statistics_momentum: float | None = None  # and their smallest momentum


@dataclass(frozen=True)
class WatchedLabels:
    """How many samples of each label a process has seen on the steps looked at."""

    kind: ClassVar[str] = "labels"
    counts: list[int]


Observation = WatchedProcess | WatchedStep | WatchedLabels
_Kind = TypeVar("_Kind", WatchedProcess, WatchedStep, WatchedLabels)


@dataclass(frozen=True)
class Watched:
    """Everything that one process wrote."""

    process: WatchedProcess
    steps: list[WatchedStep]
    labels: list[int]


def line(observation: Observation) -> str:
    """One observation as one line of JSON, without what was not looked at."""
    known = {name: value for name, value in vars(observation).items() if value is not None}
    document = {"kind": observation.kind, **known}
    try:
        return _ENCODER.encode(document)
    except ValueError:  # a number that is not finite
        return _ENCODER.encode(finite(document))


def file_of(folder: Path, process: int) -> Path:
    """Where a process writes."""
    return folder / f"process-{process}.jsonl"


def read_folder(folder: Path) -> list[Watched]:
    """What every process of the newest job wrote, in order; files of an earlier, larger job are left out."""
    first = _read_file(file_of(folder, 0))
    others = [
        _read_file(path)
        for path in folder.iterdir()
        if (match := _FILE.fullmatch(path.name)) and 0 < int(match[1]) < first.process.processes
    ]
    return [first, *sorted(others, key=lambda one: one.process.process)]


def _read_file(path: Path) -> Watched:
    lines = list(read(path))
    try:
        process = _made(WatchedProcess, lines[0])
        steps = [_made(WatchedStep, one) for one in lines if one["kind"] == "step"]
        labels = [_made(WatchedLabels, one).counts for one in lines if one["kind"] == "labels"]
    except (IndexError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a file that sw.watch wrote ({error!r}); watch the run again") from None
    return Watched(process, steps, labels[-1] if labels else [])


def _made(kind: type[_Kind], values: dict[str, Any]) -> _Kind:
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def pack(fingerprints: np.ndarray) -> str:
    """32-bit fingerprints as text.

    >>> unpack(pack(np.array([7, 2**32 - 1]))).tolist()
    [7, 4294967295]
    """
    return base64.b64encode(fingerprints.astype("<u4").tobytes()).decode("ascii")


def unpack(text: str) -> np.ndarray:
    """What `pack` was given."""
    return np.frombuffer(base64.b64decode(text), dtype="<u4")
