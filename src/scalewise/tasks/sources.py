"""Where published data sets are found, checked and downloaded from. Imports no torch; nothing is unpickled.

A data set is a few files of known content. They are looked for, plain, gzipped or in their archive, in

    --data, $SCALEWISE_DATA, ./data, ~/.cache/scalewise, ~/.keras/datasets, ~/data, /usr/share/datasets

in scalewise's own layout and in those of torchvision and Keras, and downloaded when they are in none of these places.
Whatever is found is checked: size, labels, SHA-256. The SHA-256 is that of the content, however it is compressed.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from scalewise.errors import DataError
from scalewise.records import write_atomically

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
        labels = np.frombuffer(content, np.uint8)[file.labels.offset :: file.labels.stride]
        wrong = np.flatnonzero(labels >= file.labels.classes)
        if len(wrong):
            raise DataError(
                f"labels in {path} must be 0 to {file.labels.classes - 1}, got {labels[wrong[0]]} at sample "
                f"{wrong[0]}; download it again or remove it"
            )
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(
            f"data file {path} must have SHA-256 {file.sha256[:16]}…, got {digest[:16]}…; it is damaged or another "
            f"data set's: download it again or remove it"
        )
    return content


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


def _from_archive(source: Source, path: Path, content: bytes | None = None) -> dict[str, bytes]:
    """The files out of a tar archive, gzipped or not, by their names alone; nothing else in it is looked at.

    `content` is that of an archive that is not stored at `path`.
    """
    contents: dict[str, bytes] = {}
    wanted = {file.name: file for file in source.files}
    most_bytes = ARCHIVE_FACTOR * sum(file.size for file in source.files) + BLOCK
    try:
        with path.open("rb") if content is None else io.BytesIO(content) as stored:
            packed = stored.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            stored.seek(0)
            unpacked = _Bounded(gzip.GzipFile(fileobj=stored) if packed else stored, most_bytes)
            with tarfile.open(fileobj=unpacked, mode="r|") as archive:
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
        # this user's other processes on this machine are kept out meanwhile
        with (Path(tempfile.gettempdir()) / f"scalewise-{os.getuid()}-{source.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
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


def _fetch_all(source: Source, folder: Path, address: str, progress: Progress | None) -> dict[str, bytes]:
    if source.archive:
        packed = _fetch(f"{address}/{source.archive}", 2 * sum(file.size for file in source.files), progress)
        contents = _from_archive(source, folder / source.archive, packed)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
        return contents
    contents = {}
    for file in source.files:
        path = folder / f"{file.name}.gz"
        packed = _fetch(f"{address}/{path.name}", 2 * file.size, progress)
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(file.size + 1)
        except (EOFError, zlib.error) as error:
            raise OSError(f"what was downloaded is damaged: {error}") from None
        contents[file.name] = _check(file, content, path)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, packed)
    return contents


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


_TEN = Labels(offset=8, stride=1, classes=10)
MNIST_PARTS = {"train": 60_000, "t10k": 10_000}


def _mnist_files(*sha256: str) -> tuple[DataFile, ...]:
    """The four files of a data set in MNIST's layout, from the hashes of their contents."""
    hashes = iter(sha256)
    files: list[DataFile] = []
    for part, samples in MNIST_PARTS.items():
        files.append(DataFile(f"{part}-images-idx3-ubyte", 16 + samples * 784, next(hashes)))
        files.append(DataFile(f"{part}-labels-idx1-ubyte", 8 + samples, next(hashes), _TEN))
    return tuple(files)


FASHION_MNIST = Source(
    name="fashion-mnist",
    files=_mnist_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    folders=("fashion-mnist", "FashionMNIST/raw"),
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
MNIST = Source(
    name="mnist",
    files=_mnist_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    folders=("mnist", "MNIST/raw"),
    address="https://ossci-datasets.s3.amazonaws.com/mnist",
    arrays=(
        "mnist.npz",
        {
            "x_train": "train-images-idx3-ubyte",
            "y_train": "train-labels-idx1-ubyte",
            "x_test": "t10k-images-idx3-ubyte",
            "y_test": "t10k-labels-idx1-ubyte",
        },
    ),
)

CIFAR_RECORD = 1 + 3 * 32 * 32  # a label and the red, green and blue planes
_CIFAR_HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Source(
    name="cifar10",
    files=tuple(
        DataFile(name, 10_000 * CIFAR_RECORD, sha, Labels(0, CIFAR_RECORD, 10)) for name, sha in _CIFAR_HASHES.items()
    ),
    folders=("cifar-10-batches-bin",),
    address="https://www.cs.toronto.edu/~kriz",
    archive="cifar-10-binary.tar.gz",
)
