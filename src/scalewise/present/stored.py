"""Run folders and their JSON, which anyone may have written: they are read as far as they can be.

Asking a stored value for what is not there, or is of another kind, gives nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from scalewise.errors import RunFolderError
from scalewise.present.words import Shown, number

# A page is made for people, who see no more than this: larger documents are not read, of larger records every Nth.
LARGEST_DOCUMENT = 32_000_000
LARGEST_RECORDS = 48_000_000
LONGEST_LINE = 1_000_000
MOST_READ = 2_000_000_000
LONGEST_TEXT = 2_000
LARGEST_NUMBER = 1e100  # beyond, sums and differences of what is drawn would overflow

Kind = Literal["train", "compare", "measure", "bench", "profile", "plan", "forecast", "tune"]
# What makes a folder one of a kind, in the order in which they are looked for.
DOCUMENTS: dict[str, Kind] = {
    "tune.json": "tune",
    "plan.json": "plan",
    "forecast.json": "forecast",
    "profile.json": "profile",
    "bench.json": "bench",
    "compare.json": "compare",
    "measure.json": "measure",
    "recipe.json": "train",
}
TRAIN_FILES = ("recipe.json", "env.json", "metrics.jsonl", "result.json")
DEEPEST, MOST = 4, 2_000  # folders to look for runs in, and runs to list


@dataclass(frozen=True)
class Stored:
    """A JSON value of unknown shape."""

    value: object = None

    def part(self, *names: str) -> Stored:
        """The value under these keys, one within the other."""
        value = self.value
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return Stored(value)

    def parts(self, *names: str) -> list[Stored]:
        """The items of the list under these keys."""
        value = self.part(*names).value
        return [Stored(item) for item in value] if isinstance(value, list | tuple) else []

    def items(self) -> list[tuple[str, Stored]]:
        """The keys of an object and their values."""
        if not isinstance(self.value, dict):
            return []
        return [(name[:LONGEST_TEXT], Stored(item)) for name, item in self.value.items()]

    @property
    def is_object(self) -> bool:
        """Whether there is anything to ask."""
        return isinstance(self.value, dict)

    def number(self, *names: str) -> float | None:
        """A finite number."""
        value = self.value
        for name in names:  # as in `part`, in place: this is asked of every number of every step
            value = value.get(name) if isinstance(value, dict) else None
        if type(value) is not float and type(value) is not int:  # bool is neither
            return None
        return float(value) if -LARGEST_NUMBER <= value <= LARGEST_NUMBER else None

    def estimate(self, *names: str) -> tuple[float | None, float | None, float | None]:
        """A value and the ends of its interval."""
        part = self.part(*names)
        return part.number("value"), part.number("low"), part.number("high")

    def ranged(self, name: str) -> tuple[float | None, float | None, float | None]:
        """A value and the ends of its interval, under keys of their own."""
        return self.number(name), self.number(f"{name}_low"), self.number(f"{name}_high")

    def numbers(self, *names: str) -> list[float | None]:
        """A list of numbers, with None where an item is none."""
        return [item.number() for item in self.parts(*names)]

    def text(self, *names: str) -> str:
        """A text, cut where it is longer than anybody reads; empty if there is none."""
        value = self.part(*names).value
        return value[:LONGEST_TEXT] if isinstance(value, str) else ""

    def flag(self, *names: str) -> bool | None:
        """True or false."""
        value = self.part(*names).value
        return value if isinstance(value, bool) else None

    def shown(self) -> str:
        """Whatever it is, as text."""
        if isinstance(self.value, str):
            return self.text()
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return "not a finite number"
        try:
            text = json.dumps(self.value)
        except (ValueError, RecursionError):
            text = "too large to show"
        return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def number_of(*names: str, shown: Shown = number) -> Callable[[Stored], str]:
    """A column of a table: the number under these keys, in words."""
    return lambda row: shown(row.number(*names))


def text_of(*names: str) -> Callable[[Stored], str]:
    """A column of a table: the text under these keys."""
    return lambda row: row.text(*names)


def open_regular(path: Path, inside: Path) -> int | None:
    """A descriptor of a regular file that is really inside a folder; None for anything else.

    Symbolic links that lead out, pipes, devices and folders are nothing.
    """
    try:
        resolved = path.resolve(strict=True)
        if not resolved.is_relative_to(inside.resolve(strict=True)):
            return None
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError, RuntimeError):
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def read_document(path: Path, inside: Path) -> tuple[Stored, str]:
    """The JSON object in a file, and what is wrong with it: empty if nothing is, or there is no such file."""
    descriptor = open_regular(path, inside)
    if descriptor is None:
        return Stored(), f"{path.name} is not a file of this folder" if path.is_symlink() else ""
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(LARGEST_DOCUMENT + 1)
    if len(text) > LARGEST_DOCUMENT:
        return Stored(), f"{path.name} is larger than {LARGEST_DOCUMENT // 1_000_000} MB and was not read"
    found = parsed(text)
    return (found, "") if found.is_object else (Stored(), f"{path.name} is not a JSON object")


def read_records(path: Path, inside: Path) -> tuple[list[Stored], str]:
    """The records in a file of one JSON object a line, and what is wrong with it.

    A torn last line is left out silently: a run that is going on, or crashed, has one. Other bad lines are counted.
    Of a very large file every Nth step is read.
    """
    descriptor = open_regular(path, inside)
    if descriptor is None:
        return [], f"{path.name} is not a file of this folder" if path.is_symlink() else ""
    every = max(1, math.ceil(os.fstat(descriptor).st_size / LARGEST_RECORDS))
    found, torn, line = [], 0, b""
    with os.fdopen(descriptor, "rb") as file:
        for line in _chosen(file, every):
            record = parsed(line)
            if record.is_object:
                found.append(record)
            elif line.strip():
                torn += 1
    torn -= bool(line.strip()) and not line.endswith(b"\n") and not parsed(line).is_object
    problems = [f"{torn} lines of {path.name} are torn and were left out"] if torn else []
    if every > 1:
        problems.append(f"{path.name} is large: one of {every} steps is shown")
    return found, "; ".join(problems)


def _chosen(file: BinaryIO, every: int) -> Iterator[bytes]:
    """Every Nth line of steps, and all others; a line that nobody could have meant is cut into pieces."""
    steps = 0
    while file.tell() < MOST_READ and (line := file.readline(LONGEST_LINE)):
        if every > 1 and (b'"kind": "step"' in line or len(line) == LONGEST_LINE):
            steps += 1
            if steps % every:
                continue
        yield line


def parsed(text: bytes) -> Stored:
    """A JSON value, or nothing."""
    try:
        return Stored(json.loads(text))
    except (ValueError, RecursionError):
        return Stored()


@dataclass(frozen=True)
class Run:
    """What a folder says: its document, and of a training also recipe, environment and records."""

    name: str
    path: Path
    kind: Kind
    document: Stored = field(default_factory=Stored)
    recipe: Stored = field(default_factory=Stored)
    environment: Stored = field(default_factory=Stored)
    records: tuple[Stored, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Stored]:
        """The records of one kind."""
        return [record for record in self.records if record.value.get("kind") == kind]  # type: ignore[attr-defined]


def kind_of(path: Path) -> Kind | None:
    """Which kind of run a folder holds; None if it is no run folder."""
    return next((kind for name, kind in DOCUMENTS.items() if (path / name).is_file()), None)


def document_name(kind: Kind) -> str:
    """The file with what a finished run of this kind has found."""
    return "result.json" if kind == "train" else next(name for name, own in DOCUMENTS.items() if own == kind)


def read_run(path: Path, name: str | None = None, inside: Path | None = None) -> Run:
    """Everything a page shows of a folder. Files that lead out of `inside`, by default the folder, are not read."""
    kind = kind_of(path)
    if kind is None:
        raise RunFolderError(_refusal(path))
    own, root = name or path.name or path.resolve().name, inside or path
    document, problem = read_document(path / document_name(kind), root)
    if kind != "train":
        return Run(own, path, kind, document, problems=(problem,) if problem else ())
    recipe, second = read_document(path / "recipe.json", root)
    environment, third = read_document(path / "env.json", root)
    records, fourth = read_records(path / "metrics.jsonl", root)
    problems = tuple(one for one in (problem, second, third, fourth) if one)
    return Run(own, path, kind, document, recipe, environment, tuple(records), problems)


def _refusal(path: Path) -> str:
    rule = f"a run must be a folder with one of {', '.join(DOCUMENTS)}, found"
    if not path.is_dir():
        return f"{rule} no folder {path}; check the path"
    names = " ".join(str(path / one) for one in [*find_runs(path)][:3])
    if names:
        look = f"name them, as in scalewise report {names}, or look at all with scalewise serve {path}"
        return f"{rule} runs in {path} but not in itself; {look}"
    return f"{rule} none of them in {path}; check the path"


def find_runs(root: Path) -> dict[str, Kind]:
    """The run folders under a folder by their path in it, newest first; runs within runs are not looked for."""
    found: list[tuple[float, str, Kind]] = []
    waiting = [(root, 0)]
    while waiting and len(found) < MOST:
        folder, depth = waiting.pop()
        for path in _subfolders(folder):
            kind = kind_of(path)
            if kind is not None:
                found.append((changed(path), path.relative_to(root).as_posix(), kind))
            elif depth + 1 < DEEPEST:
                waiting.append((path, depth + 1))
    return {name: kind for _, name, kind in sorted(found, key=lambda one: (-one[0], one[1]))}


def _subfolders(folder: Path) -> list[Path]:
    """Folders in a folder; links are not followed, since they may lead out or around."""
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def changed(path: Path) -> float:
    """When a run's files were last written."""
    return max((time for _, time, _ in fingerprint(path)), default=0) / 1e9


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes whenever a run's files do: their times and sizes."""
    found = []
    for name in dict.fromkeys((*DOCUMENTS, *TRAIN_FILES)):
        with contextlib.suppress(OSError):
            state = (path / name).lstat()
            found.append((name, state.st_mtime_ns, state.st_size))
    return tuple(found)


def is_safe(path: Path, inside: Path) -> bool:
    """Whether other readers may read a training's files: each is missing, or a regular file in the folder and small."""
    for name in TRAIN_FILES:
        if not (path / name).exists() and not (path / name).is_symlink():
            continue
        descriptor = open_regular(path / name, inside)
        if descriptor is None:
            return False
        length = os.fstat(descriptor).st_size
        os.close(descriptor)
        if length > LARGEST_RECORDS:
            return False
    return True
