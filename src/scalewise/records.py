"""What a run says about itself: frozen values, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scalewise.errors import RunFolderError


@dataclass(frozen=True)
class Step:
    """One update of the weights."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: float
    samples: int
    lr: float
    loss: float
    metrics: dict[str, float]
    seconds: float
    input_seconds: float = 0.0
    gradient_norm: float | None = None
    noise_scale: float | None = None
    progress: float = 0.0
    gain: float | None = None


@dataclass(frozen=True)
class Epoch:
    """The end of a pass over the training data, and of training."""

    kind: ClassVar[str] = "epoch"
    step: int
    epoch: float
    samples: int
    lr: float
    train: dict[str, float]
    validation: dict[str, float] | None
    best: bool
    seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Result:
    """The outcome of a run; `to_json` is what `train --json` prints."""

    kind: ClassVar[str] = "result"
    run: str | None
    task: str
    workers: int
    processes: int
    threads: int
    worker_batch: int
    global_batch: int
    steps: int
    epochs: float
    samples: int
    optimizer: str
    lr: dict[str, float]
    train: dict[str, float]
    validation: dict[str, float] | None
    test: dict[str, float]
    seconds: float
    samples_per_second: float
    exact: bool
    weights_sha256: str
    noise_scale: dict[str, float | bool | None] | None
    derived: list[dict[str, Any]] = field(default_factory=list)
    best_sha256: str | None = None
    target_reached: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Every key of the contract; `best_sha256` and `target_reached` only where they mean something."""
        optional = ("best_sha256", "target_reached")
        values = {key: value for key, value in asdict(self).items() if key not in optional or value is not None}
        document: dict[str, Any] = finite(values)
        return document


@dataclass(frozen=True)
class Failure:
    """Why a run ended early, stored as its last record."""

    kind: ClassVar[str] = "failure"
    step: int
    reason: str


Record = Step | Epoch | Result


def finite(value: Any) -> Any:  # noqa: ANN401  (any JSON value)
    """The same JSON value with null for infinities and not-a-numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(record: Record | Failure) -> str:
    """One record as one line of JSON."""
    return json.dumps(finite({"kind": record.kind, **asdict(record)}), allow_nan=False)


class RecordWriter:
    """Appends records to a file, in batches, so that a step never waits for the disk."""

    def __init__(self, path: Path, batch: int = 64) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._batch = batch
        self._waiting: list[str] = []

    def write(self, record: Record | Failure) -> None:
        """Add one record; anything but a step also flushes."""
        self._waiting.append(line(record))
        if not isinstance(record, Step) or len(self._waiting) >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Hand what is waiting to the operating system."""
        self._file.write("".join(text + "\n" for text in self._waiting))
        self._waiting.clear()
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line torn by a crash is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, 1):
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise RunFolderError(f"{path}, line {number} must be JSON: {error.msg}; restore or remove it") from None


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`, which a resumed run will write again."""
    if not path.exists():
        return
    kept = [json.dumps(record) + "\n" for record in read(path) if record["kind"] != "result" and record["step"] <= step]
    write_atomically(path, "".join(kept))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that readers see the old or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
