"""JSON that anyone may have written: asking it for what is not there, or is of another kind, gives nothing."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# A page is made for people, who see no more than this: larger documents are not read, of larger records every Nth.
LARGEST_DOCUMENT = 32_000_000
LARGEST_RECORDS = 48_000_000
LONGEST_LINE = 1_000_000
MOST_READ = 2_000_000_000
LONGEST_TEXT = 2_000
LARGEST_NUMBER = 1e100  # beyond, sums and differences of what is drawn would overflow


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
