"""Measured errors by size, read from a CSV file that anyone may have written."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scalewise.documents import read_bytes
from scalewise.errors import DataError

Kind = Literal["samples", "parameters"]
SIZE_NAMES: dict[str, Kind] = {
    "samples": "samples",
    "m": "samples",
    "data": "samples",
    "size": "samples",
    "parameters": "parameters",
    "params": "parameters",
}
LARGEST = 1e18  # squares and powers of it are still numbers
ERROR_NAMES = ("error", "test_error", "loss", "test_loss")


@dataclass(frozen=True)
class Points:
    """(size, error) pairs, and what the sizes count."""

    kind: Kind
    pairs: tuple[tuple[float, float], ...]


def read_points(path: Path) -> Points:
    """The points of a CSV file: columns samples (or parameters) and error by name, or the first two without names."""
    try:
        lines = [line for line in csv.reader(read_bytes(path).decode("utf-8-sig").splitlines()) if any(line)]
    except FileNotFoundError:
        raise DataError(
            f"{path} must be a task or a CSV file of sizes and errors, found neither; check the name"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"a CSV file of sizes and errors must be readable text, got {path}: {error}") from None
    if not lines:
        raise DataError(f"{path} must hold lines of samples,error, got none; write one line for each training")
    names = [name.strip().lower() for name in lines[0]]
    if _is_number(names[0]):
        return Points("samples", _pairs(path, lines, 0, 1, first=1))
    size = next((place for place, name in enumerate(names) if name in SIZE_NAMES), None)
    error_at = next((place for place, name in enumerate(names) if name in ERROR_NAMES), None)
    if size is None or error_at is None:
        raise DataError(
            f"{path} needs a column samples (or parameters) and a column error, got {', '.join(names)}; name them so"
        )
    return Points(SIZE_NAMES[names[size]], _pairs(path, lines[1:], size, error_at, first=2))


def _pairs(
    path: Path, lines: Sequence[Sequence[str]], size: int, error: int, first: int
) -> tuple[tuple[float, float], ...]:
    pairs = []
    for number, line in enumerate(lines, first):
        try:
            pair = float(line[size]), float(line[error])
        except (ValueError, IndexError):
            raise DataError(f"{path}, line {number} needs a size and an error, got {','.join(line)!r}") from None
        if not all(0 < value <= LARGEST for value in pair):
            raise DataError(
                f"{path}, line {number} needs a size and an error above 0 and up to {LARGEST:g}, got {','.join(line)!r}"
            )
        pairs.append(pair)
    return tuple(pairs)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
