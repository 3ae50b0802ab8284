"""Untrusted files: only regular files of limited size are read, and JSON only to a limited depth."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError

LARGEST_DOCUMENT = 16_000_000  # in memory, JSON may take 30 times that
LARGEST_LINE = LARGEST_DOCUMENT
LARGEST_RECORDS = 2_000_000_000


def read_bytes(path: Path, most_bytes: int = LARGEST_DOCUMENT) -> bytes:
    """The content of a file; a pipe, a device or a larger file is an `OSError`."""
    check_regular(path, most_bytes)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"{path} has more than {most_bytes:,} bytes")
    return content


def check_regular(path: Path, most_bytes: int) -> None:
    """Refuse what is not a regular file, or too large, before any of it is read."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a file")
    if found.st_size > most_bytes:
        raise OSError(f"{path} has {found.st_size:,} bytes, more than {most_bytes:,}")


def read_json(path: Path) -> Any:  # noqa: ANN401  (any JSON value)
    """The JSON value in a file: an `OSError` or a `ValueError` where it cannot be read."""
    return parse_json(read_bytes(path))


def parse_json(text: bytes | str) -> Any:  # noqa: ANN401
    """A JSON value.

    >>> parse_json(b'{"workers": 2}')
    {'workers': 2}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def first_problem(error: ValidationError) -> str:
    """Where a value is not what it must be, in one line."""
    first = error.errors()[0]
    where = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
    return ": ".join(filter(None, [where, first["msg"].removeprefix("Value error, ")]))
