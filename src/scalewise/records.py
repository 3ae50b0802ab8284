"""The records of a run: frozen values, stored as one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scalewise.errors import RunFolderError
from scalewise.files import LARGEST_LINE, LARGEST_RECORDS, check_regular, parse_json

# Metrics between 0 and 1 that people read as percentages, and whose complement is an error.
SHARES = ("accuracy",)


@dataclass(frozen=True)
class Step:
    """One update of the weights.

    Arguments:
        step: its number, from 1.
        epoch, samples: passes over the training data and samples seen, this step included.
        lr: the learning rate of this step.
        loss, metrics: means over the global batch, before the update.
        seconds: since training began.
        input_seconds: that this step waited for samples.
        gradient_norm: of the global gradient; None where no norms are taken.
        noise_scale: in samples, averaged over the last steps; None where it is not measured or not known yet.
        progress: single-worker-equivalent samples, of which schedules are functions.
        gain: single-worker steps that this one is worth (AdaScale).
    """

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
    """The end of a pass over the training data, and of training.

    Arguments:
        step, epoch, samples: where training stands.
        lr: of the last step.
        train: means of the loss and the metrics over the steps since the last such record.
        validation: loss and metrics on validation data; None where there are none.
        best: whether validation is the best so far.
        seconds: since training began.
        samples_per_second: of training so far, without evaluation.
    """

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
    search: dict[str, Any] | None = None  # steps, samples and seconds that auto took before step 0
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
    worker: int | None = None
    parameter: str | None = None
    samples: tuple[int, ...] = ()


Record = Step | Epoch | Result
OF_A_STEP = (Step.kind, Epoch.kind, Failure.kind)  # records that carry the step after which they were made


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
    """Appends records to a file, in batches, so that a step never waits for the disk.

    What could not be written, on a full disk, waits for the next time, from the byte at which it stopped.
    """

    def __init__(self, path: Path, batch: int = 64) -> None:
        self._file = path.open("ab", buffering=0)
        self._batch = batch
        self._count = 0
        self._waiting = b""

    def write(self, record: Record | Failure) -> None:
        """Add one record; anything but a step also flushes."""
        self._waiting += line(record).encode() + b"\n"
        self._count += 1
        if not isinstance(record, Step) or self._count >= self._batch:
            self.flush()

    def flush(self) -> None:
        """Hand what is waiting to the operating system."""
        self._count = 0
        while self._waiting:
            written = self._file.write(self._waiting)
            self._waiting = self._waiting[written:]

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line torn by a crash is left out."""
    torn = ""
    for number, (text, record) in enumerate(_lines(path), 1):
        if torn:
            raise RunFolderError(torn)
        if record is not None:
            yield record
        else:
            shown = text[:40].decode(errors="replace")
            torn = (
                f"{path}, line {number} must be a record in JSON with its kind and step, got {shown!r}; "
                "restore or remove it"
            )


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line, and the record it holds if it does."""
    try:
        check_regular(path, LARGEST_RECORDS)
        with path.open("rb") as file:
            while text := file.readline(LARGEST_LINE):
                yield text, parsed(text)
    except OSError as error:
        raise RunFolderError(f"{path} must be a readable file of records: {error}; restore or remove it") from None


def parsed(text: bytes | str) -> dict[str, Any] | None:
    """The record in a line; None where it holds something else."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return None
    return None if value["kind"] in OF_A_STEP and type(value.get("step")) is not int else value


def keep_until(path: Path, step: int) -> str | None:
    """Drop the records after `step`, which a resumed run writes again; returns a line on what else was dropped.

    Lines that are not records, of a file that was damaged, are left out; the file as it was is set aside. The last line
    may have been torn by a crash, which is no damage.
    """
    if not path.exists():
        path.unlink(missing_ok=True)  # a link to nowhere, which writing would follow
        return None
    records = [record for _, record in _lines(path)]
    kept = [record for record in records if record and record["kind"] in OF_A_STEP and record["step"] <= step]
    bad = [number for number, record in enumerate(records[:-1], 1) if record is None]
    dropped = None
    if bad:
        aside = _copy_aside(path)
        dropped = f"{path}: {len(bad)} lines, the first of them {bad[0]}, are not records; {aside.name} has them"
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
    return dropped


def names_aside(path: Path) -> Iterator[Path]:
    """Where something damaged may be kept beside its place."""
    return (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))


def _copy_aside(path: Path) -> Path:
    for aside in names_aside(path):
        with suppress(FileExistsError), aside.open("xb") as copy, path.open("rb") as damaged:
            shutil.copyfileobj(damaged, copy)
            return aside
    raise RunFolderError(f"{path} was damaged a thousand times; remove the damaged ones beside it")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content so that readers see the old or the new, never a part; nothing is left of a failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process that had this number, or a link put there to be followed
    try:
        with temporary.open("xb") as file:
            # JSON may hold halves of characters
            file.write(content if isinstance(content, bytes) else content.encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        temporary.unlink(missing_ok=True)
        raise


def save_document(path: Path, document: dict[str, Any]) -> str:
    """Write a result as `--json` prints it; returns that text."""
    text = json.dumps(finite(document), indent=2)
    write_atomically(path, text + "\n")
    return text
