"""What a learning curve says: its three regions, the error at other sizes, and what a target takes.

Hestness et al. 2017 draw a curve in three regions: with little data the model is no better than a guess, then comes the
power law, and at last what no amount of data removes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scalewise.errors import DataError
from scalewise.files import read_bytes
from scalewise.stats.interval import Interval
from scalewise.stats.learning_curve import LEAST_SIZES, LearningCurve, fit

AHEAD = (2, 4, 10)  # times the largest size seen


@dataclass(frozen=True)
class Outlook:
    """A fitted curve, the points it was fitted to by size, and what is asked of it."""

    kind: Kind
    points: tuple[tuple[float, float], ...]
    curve: LearningCurve
    small: float | None  # sizes below this are in the small-data region; None where no point is
    irreducible: float | None  # the size from which on γ is more than half of the error; None where γ is not known
    target: float | None

    @property
    def needed(self) -> Interval[float | None] | None:
        """The size for the target."""
        return None if self.target is None else self.curve.size_for(self.target)

    @property
    def unreachable(self) -> bool:
        """Whether the best curve never comes down to the target."""
        if self.target is None or self.needed is None or self.needed.value is not None:
            return False
        is_flat = not self.curve.beta.value
        return not is_flat or self.curve.at(self.points[-1][0]).value > self.target

    def to_json(self) -> dict[str, Any]:
        """What `forecast --json` prints, without what the command itself adds."""
        curve, needed = self.curve, self.needed
        ahead = [factor * self.points[-1][0] for factor in AHEAD]
        return {
            "kind": self.kind,
            "alpha": curve.alpha.value,
            "beta": curve.beta.value,
            "gamma": {**curve.gamma.to_json(), "identified": curve.identified},
            "intervals": {name: getattr(curve, name).to_json() for name in ("alpha", "beta", "gamma")},
            "spread": curve.spread,
            "target": self.target,
            "needed": needed and {"samples": needed.value, "low": needed.low, "high": needed.high},
            "unreachable": self.unreachable,
            "regions": {"small_until": self.small, "irreducible_from": self.irreducible},
            "ahead": [{"size": size, **curve.at(size).to_json()} for size in ahead],
            "points": [
                {"size": size, "error": error, "fitted": curve.at(size).to_json()} for size, error in self.points
            ],
        }


def outlook(points: Points, target: float | None = None) -> Outlook:
    """Fit a curve to what follows the power law, and look ahead.

    The smallest sizes are left out one by one while their errors lie below what the rest lets expect there: a guess
    limits the error of a model that has learned nothing yet.
    """
    pairs = sorted(points.pairs)
    sizes = sorted({size for size, _ in pairs})
    curve, first = fit(pairs), 0
    while len(sizes) - first > LEAST_SIZES:
        rest = fit([pair for pair in pairs if pair[0] > sizes[first]])
        logs = [math.log(error) for size, error in pairs if size == sizes[first]]
        if sum(logs) / len(logs) >= math.log(rest.at(sizes[first]).low):
            break
        curve, first = rest, first + 1
    small = sizes[first] if first else None
    known = curve.identified and curve.gamma.value
    irreducible = curve.size_for(2 * curve.gamma.value).value if known else None  # where α·m^β has come down to γ
    return Outlook(points.kind, tuple(pairs), curve, small, irreducible, target)


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
