"""Where published data sets are found, checked and downloaded from. Imports no torch; nothing is unpickled.

A data set is a few files of known content. They are looked for, plain, gzipped or in their archive, in

    --data, $SCALEWISE_DATA, ./data, ~/.cache/scalewise, ~/.keras/datasets, ~/data, /usr/share/datasets

in scalewise's own layout and in those of torchvision and Keras, and downloaded when they are in none of these places.
Whatever is found is checked: size, labels, SHA-256. The SHA-256 is that of the content, however it is compressed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import logging
import math
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from scalewise.errors import DataError

Progress = Callable[[str, int, int], None]  # (what, bytes so far, bytes in all or 0)
BLOCK = 1 << 20
ARCHIVE_FACTOR = 2  # of an archive, what it may unpack to for each byte of its files
GZIP_MAGIC = b"\x1f\x8b"
LONGEST_HEADER = 4096  # of an array
PLAIN_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others may ask for gigabytes to unpack a byte
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Labels:
    """Where a file holds labels: every `stride`th byte from `offset` on; they are below `classes`."""

    offset: int
    stride: int
    classes: int


@dataclass(frozen=True)
class DataFile:
    """One file: its name, and the size and SHA-256 of its uncompressed content."""

    name: str
    size: int
    sha256: str
    labels: Labels | None = None


@dataclass(frozen=True)
class Source:
    """A published data set."""

    name: str  # as in `scalewise tasks`
    files: tuple[DataFile, ...]
    folders: tuple[str, ...]  # where under a root it may lie; downloads go into the first
    address: str  # the official one of the files, or of the archive
    archive: str | None = None  # the name of an archive that holds all files
    arrays: tuple[str, Mapping[str, str]] | None = None  # Keras's file, and which array in it is which file's content


def read(source: Source, data: Path | None = None, progress: Progress | None = None) -> dict[str, bytes]:
    """The checked content of every file of a data set, by file name.

    `data` is where to look first, and where to download to; `progress` receives how far a download is.
    """
    incomplete: list[str] = []
    for root, explicit in _roots(data):
        if explicit and not root.is_dir():
            incomplete.append(f"{root} is not a folder")
        try:
            contents = _from_root(source, root, incomplete)
        except DataError:
            if explicit:
                raise
            continue  # a damaged file in another program's cache is not the user's mistake
        if contents is not None:
            return contents
    place = data or _environment_path("SCALEWISE_DATA") or _cache()
    return _download(source, place / source.folders[0], incomplete, progress)


def find(source: Source, data: Path | None = None) -> Path | None:
    """Where a data set is, by the names of its files; None when it is nowhere."""
    for root, _ in _roots(data):
        for folder in _folders(source, root):
            if all(_stored(folder, file.name) for file in source.files):
                return folder
        for name in (source.archive, source.arrays[0] if source.arrays else None):
            if name and (root / name).is_file():
                return root / name
    return None


def _roots(data: Path | None) -> list[tuple[Path, bool]]:
    """Where to look, in order, and whether the user named the place."""
    named = [data, _environment_path("SCALEWISE_DATA")]
    keras = _environment_path("KERAS_HOME") or Path.home() / ".keras"
    usual = [Path("data"), _cache(), keras / "datasets", Path.home() / "data", Path("/usr/share/datasets")]
    return [(path, True) for path in named if path is not None] + [(path, False) for path in usual]


def _environment_path(name: str) -> Path | None:
    return Path(os.environ[name]).expanduser() if os.environ.get(name) else None


def _cache() -> Path:
    return (_environment_path("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalewise"


def _folders(source: Source, root: Path) -> list[Path]:
    """Where under a root the files may lie, or the root itself."""
    return [*(root / name for name in source.folders), root]


def _stored(folder: Path, name: str) -> Path | None:
    """A file, plain or gzipped."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _from_root(source: Source, root: Path, incomplete: list[str]) -> dict[str, bytes] | None:
    """The checked contents if they are all under this root; a note on what is missing when some are."""
    for folder in _folders(source, root):
        found = {file: _stored(folder, file.name) for file in source.files}
        missing = [file.name for file, path in found.items() if path is None]
        if not missing:
            return {file.name: _check(file, _content(path, file.size), path) for file, path in found.items() if path}
        if len(missing) < len(found):
            incomplete.append(f"{folder} lacks {', '.join(missing)}")
    if source.archive and (path := root / source.archive).is_file():
        return _from_archive(source, path)
    if source.arrays and (path := root / source.arrays[0]).is_file():
        return _from_arrays(source, path)
    return None


def _content(path: Path, size: int) -> bytes:
    """A file's uncompressed content, but never more than a byte beyond what it should be."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(size + 1)
    except EOFError:
        raise DataError(f"data file {path} is truncated: its compressed data end early; download it again") from None
    except (OSError, zlib.error) as error:
        raise DataError(f"data file {path} must be readable: {error}; download it again") from None


def _check(file: DataFile, content: bytes, path: Path) -> bytes:
    """Refuse content that is not the published one: by size, by labels, by SHA-256."""
    if len(content) != file.size:
        word = "truncated: it" if len(content) < file.size else "too long: it"
        found = f"{len(content):,}" if len(content) < file.size else f"more than {file.size:,}"
        raise DataError(
            f"data file {path} is {word} must hold {file.size:,} bytes, got {found}; download it again or remove it"
        )
    if file.labels is not None:
        _check_labels(file.labels, content, path)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(
            f"data file {path} must have SHA-256 {file.sha256[:16]}…, got {digest[:16]}…; it is damaged or another "
            f"data set's: download it again or remove it"
        )
    return content


def _check_labels(labels: Labels, content: bytes, path: Path) -> None:
    found = np.frombuffer(content, np.uint8)[labels.offset :: labels.stride]
    wrong = np.flatnonzero(found >= labels.classes)
    if len(wrong):
        raise DataError(
            f"labels in {path} must be 0 to {labels.classes - 1}, got {found[wrong[0]]} at sample {wrong[0]}; download "
            f"it again or remove it"
        )


class _Bounded(io.RawIOBase):
    """A stream that ends with an error instead of going on for ever, as what a small archive unpacks to may."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most_bytes: int) -> None:
        self._stream, self._left = stream, most_bytes

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Some bytes, as long as there may be any."""
        found = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(found)
        if self._left < 0:
            raise OSError("it unpacks to more than it may")
        return found


def _from_archive(source: Source, path: Path) -> dict[str, bytes]:
    """The files out of a tar archive, gzipped or not, by their names alone; nothing else in it is looked at."""
    contents: dict[str, bytes] = {}
    wanted = {file.name: file for file in source.files}
    most_bytes = ARCHIVE_FACTOR * sum(file.size for file in source.files) + BLOCK
    try:
        with _opened(path) as unpacked, tarfile.open(fileobj=_Bounded(unpacked, most_bytes), mode="r|") as archive:
            for member in archive:
                file = wanted.get(Path(member.name).name)
                stream = archive.extractfile(member) if file and member.isfile() else None
                if file and stream:
                    contents[file.name] = _check(file, stream.read(file.size + 1), path / file.name)
    except DataError:
        raise
    except Exception as error:  # whatever tarfile makes of a broken file
        raise DataError(f"data archive {path} must be readable: {error}; download it again or remove it") from None
    missing = wanted.keys() - contents.keys()
    if missing:
        raise DataError(f"data archive {path} lacks {', '.join(sorted(missing))}; download it again or remove it")
    return contents


def _opened(path: Path) -> BinaryIO | gzip.GzipFile:
    with path.open("rb") as file:
        packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(path) if packed else path.open("rb")


def _from_arrays(source: Source, path: Path) -> dict[str, bytes]:
    """The files' contents rebuilt from the arrays that Keras stores."""
    assert source.arrays is not None
    files = {file.name: file for file in source.files}
    try:
        with zipfile.ZipFile(path) as arrays:
            return {
                name: _check(files[name], _idx(_array(arrays, array, files[name].size)), path / array)
                for array, name in source.arrays[1].items()
            }
    except DataError:
        raise
    except Exception as error:  # whatever zipfile and numpy make of a broken file
        raise DataError(f"data file {path} must hold Keras's arrays: {error}; download it again or remove it") from None


def _array(arrays: zipfile.ZipFile, name: str, most_bytes: int) -> np.ndarray:
    """An array of bytes out of an .npz file; its header is compared before anything of its size is made."""
    member = arrays.getinfo(f"{name}.npy")
    if member.compress_type not in PLAIN_METHODS:
        raise ValueError(f"{name} must be stored or deflated, got zip method {member.compress_type}")
    with arrays.open(member) as stream:
        header = io.BytesIO(stream.read(LONGEST_HEADER))
        version = np.lib.format.read_magic(header)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, kind = read_header(header)
        size = math.prod(shape)
        if kind != np.uint8 or by_columns or not 0 <= size <= most_bytes:
            raise ValueError(f"{name} must be at most {most_bytes:,} bytes, got {list(shape)} of {kind}")
        content = header.read() + stream.read(most_bytes + 1)
    if len(content) != size:
        raise ValueError(f"{name} must hold {size:,} bytes, got {len(content):,}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format of LeCun et al.: magic number, dimensions, data."""
    header = np.array([0x0800 + array.ndim, *array.shape], ">u4")
    return header.tobytes() + array.astype(np.uint8).tobytes()


def _download(source: Source, folder: Path, incomplete: list[str], progress: Progress | None) -> dict[str, bytes]:
    """Fetch what is missing, check it, and store it; other processes of this machine wait and find it."""
    address = os.environ.get("SCALEWISE_MIRROR", source.address).rstrip("/")
    try:
        with _alone(source):
            found = _from_root(source, folder.parent, [])
            return found or _fetch_all(source, folder, address, progress)
    except OSError as error:  # urllib's errors are OSErrors too
        reason = getattr(error, "reason", None) or error
        names = ", ".join(f"{file.name}[.gz]" if not source.archive else file.name for file in source.files)
        notes = f" ({'; '.join(incomplete)})" if incomplete else ""
        raise DataError(
            f"{source.name} needs its data files {names}: found in none of the usual places{notes}, and {address} "
            f"cannot be downloaded ({reason}); put them into a folder and pass --data FOLDER or set SCALEWISE_DATA"
        ) from None


@contextlib.contextmanager
def _alone(source: Source) -> Iterator[None]:
    """Keep this user's other processes on this machine out while a data set is downloaded."""
    with (Path(tempfile.gettempdir()) / f"scalewise-{os.getuid()}-{source.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_all(source: Source, folder: Path, address: str, progress: Progress | None) -> dict[str, bytes]:
    if source.archive:
        packed = _fetch(f"{address}/{source.archive}", 2 * sum(file.size for file in source.files), progress)
        with _temporary(folder / source.archive, packed) as archive:
            contents = _from_archive(source, archive)
        for name, content in contents.items():
            _store(folder / name, content)
        return contents
    contents = {}
    for file in source.files:
        path = folder / f"{file.name}.gz"
        packed = _fetch(f"{address}/{path.name}", 2 * file.size, progress)
        with gzip.open(io.BytesIO(packed)) as stream:
            contents[file.name] = _check(file, _unpacked(stream, file.size), path)
        _store(path, packed)
    return contents


def _unpacked(stream: gzip.GzipFile, size: int) -> bytes:
    try:
        return stream.read(size + 1)
    except (EOFError, zlib.error) as error:
        raise OSError(f"what was downloaded is damaged: {error}") from None


def _fetch(address: str, most: int, progress: Progress | None) -> bytes:
    """Download one file into memory, but no more than `most` bytes."""
    logging.getLogger("scalewise").info("downloading %s", address)
    data = bytearray()
    with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        while block := answer.read(BLOCK):
            data += block
            if len(data) > most:
                raise OSError(f"more than {most:,} bytes came")
            if progress is not None:
                progress(address.rpartition("/")[2], len(data), total)
    if total and len(data) != total:
        raise OSError(f"{len(data):,} of {total:,} bytes came")
    return bytes(data)


@contextlib.contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _store(path: Path, content: bytes) -> None:
    """Write a file so that it exists as a whole or not at all."""
    with _temporary(path, content) as temporary:
        temporary.replace(path)
