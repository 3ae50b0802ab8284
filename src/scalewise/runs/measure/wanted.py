"""What is to be measured."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from scalewise.engine.placement import DeviceName
from scalewise.errors import RunFolderError, UsageError
from scalewise.files import read_json
from scalewise.records import finite, write_atomically

Part = Literal["noise", "memory", "throughput"]
Verify = Literal["branch", "sweep"]
RANDOM = "random"


@dataclass(frozen=True)
class Wanted:
    """What is measured, and where.

    Arguments:
        skip: parts that are left out.
        layers: also the noise scale of every layer.
        verify: how the critical batch is measured by training as well.
        target: the validation loss that a sweep trains to.
        seeds: runs of `verify` at each global batch; of a sweep at least.
        most_seeds: runs of a sweep at each global batch at most.
        memory: bytes that the largest worker batch may take; None for what is free.
        processes: that share the memory.
        sharpness: of `weights`, of the runs of `between`, or of a run that is trained for it.
        weights: a run folder, or its checkpoint.
        between: two run folders, for the loss on the line between them.
        plane: a third run folder or "random", for the loss on a plane as well.
        samples: that sharpness and the loss between runs are means over.
        device: kind of device.
    """

    skip: Collection[Part] = ()
    layers: bool = False
    verify: Verify | None = None
    target: float | None = None
    seeds: int | None = None
    most_seeds: int | None = None
    memory: int | None = None
    processes: int | None = None
    sharpness: bool = False
    weights: Path | None = None
    between: tuple[Path, Path] | None = None
    plane: str | None = None
    samples: int = 1024
    device: DeviceName = "auto"

    def __post_init__(self) -> None:
        counts = {"seeds": self.seeds, "most-seeds": self.most_seeds, "processes": self.processes}
        for name, count in (counts | {"samples": self.samples}).items():
            if count is not None and count < 1:
                raise UsageError(f"--{name} must be at least 1, got {count}")
        self._check_parts()
        self._check_verification()
        if self.weights is not None and not self.sharpness:
            raise UsageError(f"--weights says whose sharpness is measured, got {self.weights} alone; add --sharpness")
        if self.plane is not None and self.between is None:
            raise UsageError(f"--plane needs two runs that lie in it, got {self.plane} alone; add --between RUN RUN")

    def _check_parts(self) -> None:
        if {*self.skip} == {*get_args(Part)} and not self.sharpness and self.between is None:
            raise UsageError(
                f"something must be left to measure, got {' '.join(f'--skip {part}' for part in get_args(Part))}; drop "
                f"one of them, or add --sharpness or --between RUN RUN"
            )
        if self.layers and "noise" in self.skip:
            raise UsageError("--layers is the noise scale of every layer, got --skip noise too; drop one of them")

    def _check_verification(self) -> None:
        if self.target is not None and not math.isfinite(self.target):
            raise UsageError(f"--target must be a finite loss, got {self.target:g}; give a number, or leave it out")
        if self.target is not None and self.verify != "sweep":
            raise UsageError(f"--target is the loss that a sweep trains to, got {self.target:g}; add --verify sweep")
        if self.seeds is not None and self.verify is None:
            raise UsageError(f"--seeds are the runs of --verify, got {self.seeds}; add --verify sweep or branch")
        if self.most_seeds is not None and self.verify != "sweep":
            raise UsageError(f"--most-seeds bounds the runs of a sweep, got {self.most_seeds}; add --verify sweep")
        if self.most_seeds is not None and self.most_seeds < (self.seeds or 1):
            raise UsageError(f"--most-seeds must be at least --seeds, {self.seeds}, got {self.most_seeds}; raise it")
        if self.verify is not None and "noise" in self.skip:
            raise UsageError(f"--verify {self.verify} checks the noise scale, got --skip noise too; drop one of them")

    @property
    def runs(self) -> list[Path]:
        """The runs whose weights are looked at: those of `between`, the third one of `plane`, `weights`."""
        third = [] if self.plane is None or self.plane == RANDOM else [Path(self.plane)]
        return [*(self.between or ()), *third, *([] if self.weights is None else [self.weights])]


REQUEST_FILE, DOCUMENT_FILE = "request.json", "measure.json"


@dataclass(frozen=True)
class Request:
    """What a measurement is of. It makes the runs in its folder what they are, so it may not change on resume."""

    task: str
    settings: list[str]
    given: dict[str, Any]  # recipe fields set on the command line
    recipe: str | None  # the file that it started from


def save_request(folder: Path, request: Request) -> None:
    """Remember what was asked for."""
    write_atomically(folder / REQUEST_FILE, json.dumps(asdict(request), indent=2) + "\n")


def resumed_request(folder: Path, wanted: Request) -> Request:
    """The request that a folder was begun with; another task or recipe is refused, leaving the recipe out is not."""
    stored = _load(folder)
    if not wanted.given:
        wanted = replace(wanted, given=stored.given)
    for name, before in asdict(stored).items():
        after = getattr(wanted, name)
        if before != after:
            raise RunFolderError(
                f"{folder} was begun with {name}={before}, got {after}; on resume task and recipe may not change: "
                f"repeat the first command with --resume, or start anew without it"
            )
    return stored


def _load(folder: Path) -> Request:
    file = folder / REQUEST_FILE
    if not file.is_file():
        raise RunFolderError(f"--resume {folder} must be the folder of a measurement, found no {REQUEST_FILE} in it")
    try:
        return Request(**read_json(file))
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} must be a stored request, got something else: {error}") from None


def save_document(folder: Path, document: dict[str, Any]) -> str:
    """Write what --json prints; returns it."""
    text = json.dumps(finite(document), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    return text
