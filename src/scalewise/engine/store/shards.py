"""The files of a checkpoint, read without trusting them: shards of tensors, and an index of where everything is.

Whatever a file holds, reading it ends with its content or with a `DamagedCheckpoint`. Nothing is unpickled; the size of
a file is compared before it is read, and no tensor can be larger than the files it is said to lie in.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import _getdtype, save_file
from torch import Tensor

from scalewise import records
from scalewise.engine.pace import Progress
from scalewise.errors import DamagedCheckpoint
from scalewise.files import check_regular, first_problem, parse_json, read_bytes

FORMAT = 2
INDEX_FILE = "index.json"
MOST_INDEX_BYTES = 256 << 20
LENGTH_BYTES = 8  # of a shard's header, before it
_FILE_NAME = re.compile(r"shard-\d{1,6}\.safetensors")


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, and where they are."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A tensor: its shape, and its pieces."""

    shape: list[int]
    pieces: list[Piece]


@dataclass(frozen=True)
class File:
    """What a shard must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Where a run was, and where its tensors are."""

    progress: Progress
    noise: dict[str, list[float]]
    recipe: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Entry]
    records: list[str] = field(default_factory=list)  # the newest ones, where one process has saved what others lost

    def to_json(self) -> str:
        """As it is stored: with a hash of its own, so that no number in it can change unseen."""
        content = asdict(self)
        return json.dumps({"format": FORMAT, "sha256": _hash(content), "content": content})


_INDEX = TypeAdapter(Index)


def _hash(content: object) -> str:
    """Of a JSON value, however its text is spaced; numbers survive being written and read."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def verified_index(path: Path) -> Index:
    """The index of a checkpoint, whose files match it."""
    try:
        index = _read_index(path)
        for name, expected in index.files.items():
            check_regular(path / name, expected.bytes)
            size = (path / name).stat().st_size
            if size != expected.bytes:
                raise ValueError(f"{name} has {size:,} bytes, its index says {expected.bytes:,}")
            if described(path / name) != expected:
                raise ValueError(f"{name} does not have the SHA-256 of its index")
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {error}") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {error}") from None
    return index


def _read_index(path: Path) -> Index:
    try:
        document = parse_json(read_bytes(path / INDEX_FILE, MOST_INDEX_BYTES))
    except ValueError as error:  # not JSON, or not text at all
        raise ValueError(f"{INDEX_FILE} is not JSON: {error}") from None
    if not isinstance(document, dict) or "content" not in document:
        raise ValueError(f"{INDEX_FILE} is not an index")
    if document.get("format") != FORMAT:
        raise ValueError(f"{INDEX_FILE} has format {document.get('format')!r}, this version reads {FORMAT}")
    if document.get("sha256") != _hash(document["content"]):
        raise ValueError(f"{INDEX_FILE} does not have its own SHA-256")
    try:
        index = _INDEX.validate_python(document["content"])
    except ValidationError as error:
        raise ValueError(f"{INDEX_FILE}: {first_problem(error)}") from None
    _check_plausible(index)
    return index


def _check_plausible(index: Index) -> None:
    """Refuse an index that names files elsewhere, or tensors that its files cannot hold."""
    if index.progress.step < 0:
        raise ValueError(f"step {index.progress.step} is below 0")
    if None in map(records.parsed, index.records):
        raise ValueError("its records are none")
    for name, file in index.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a shard")
        if file.bytes < 0:
            raise ValueError(f"{name} has {file.bytes} bytes")
    most_elements = sum(file.bytes for file in index.files.values())  # one byte each, at least
    for name, entry in index.tensors.items():
        elements = math.prod(entry.shape)
        if any(size < 0 for size in entry.shape) or elements > most_elements:
            raise ValueError(f"{name} cannot have the shape {entry.shape}")
        covered = 0
        for piece in sorted(entry.pieces, key=lambda piece: piece.start):
            known = piece.file in index.files and piece.key == key(name, piece.start)
            if not known or piece.start != covered or piece.stop < piece.start:
                raise ValueError(f"{name} has pieces that do not make a whole")
            covered = piece.stop
        if covered != elements:
            raise ValueError(f"{name} has {covered} of {elements} elements")


def key(name: str, start: int) -> str:
    """Under which name a shard holds the elements of a tensor from `start` on."""
    return f"{name}@{start}"


def described(path: Path) -> File:
    """The index entry of a shard that was just written."""
    with path.open("rb") as file:
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class Shards:
    """The shards of one checkpoint, open for reading by tensor name.

    safetensors checks their headers, the elements are read here: it leaves a number in memory for every tensor that it
    reads (0.8), which adds up where runs are resumed again and again by one process.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self._path, self._index = path, index
        self._files = ExitStack()
        self._shards: dict[str, tuple[BinaryIO, int, Any]] = {}  # the file, where its elements begin, and its header

    def __enter__(self) -> Shards:
        try:
            for name in self._index.files:
                file = self._files.enter_context((self._path / name).open("rb"))
                with safe_open(self._path / name, "numpy"):
                    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                    self._shards[name] = file, LENGTH_BYTES + length, parse_json(file.read(length))
        except (OSError, ValueError, SafetensorError) as error:
            self._files.close()
            raise DamagedCheckpoint(f"checkpoint {self._path} cannot be read: {error}") from None
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def whole(self, name: str) -> Tensor:
        """A tensor in its shape."""
        shape = self._index.tensors[name].shape
        return self.read(name, 0, math.prod(shape)).reshape(shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor, from however many pieces."""
        try:
            found = torch.cat([*self._parts(name, start, stop)])
        except (RuntimeError, LookupError, TypeError, ValueError, OSError) as error:  # the shard holds something else
            raise DamagedCheckpoint(f"checkpoint {self._path} does not hold {name}: {error}") from None
        if found.shape != (stop - start,):
            raise DamagedCheckpoint(
                f"checkpoint {self._path} holds {list(found.shape)} of {stop - start} elements of {name}"
            )
        return found

    def _parts(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for piece in sorted(self._index.tensors[name].pieces, key=lambda piece: piece.start):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first >= last and start != stop:  # a tensor without elements has one piece without elements
                continue
            file, begin, header = self._shards[piece.file]
            stored = header[piece.key]
            kind, (low, high) = _getdtype(stored["dtype"]), stored["data_offsets"]
            if (high - low) != (piece.stop - piece.start) * kind.itemsize:
                raise ValueError(f"it has {stored['shape']} of {stored['dtype']}")
            file.seek(begin + low + (first - piece.start) * kind.itemsize)
            content = bytearray(file.read((last - first) * kind.itemsize))
            yield torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors, and have them on the disk.

    safetensors leaves reference cycles through ctypes behind (0.8), which hold memory until a full
    collection, rare in a long training. They are young objects, whose collection takes no time.
    """
    save_file(tensors, path, metadata)
    gc.collect(1)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
