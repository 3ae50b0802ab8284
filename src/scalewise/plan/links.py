"""The link between processes as two numbers: what `bench collectives` measures and `plan` reckons with.

A ring all-reduce of n bytes over P processes sends 2(P − 1) messages one after another, each with its latency α, and
2(P − 1) ÷ P of the bytes through every process's link (Thakur et al. 2005):

    seconds = 2·(P − 1)·α + 2·(P − 1) ÷ P · n ÷ bandwidth

The ordered reduction sends as many bytes (engine/sums/reductions.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from scalewise.errors import UsageError
from scalewise.files import read_json
from scalewise.records import write_atomically


@dataclass(frozen=True)
class Link:
    """What one process's link carries."""

    name: str
    latency_seconds: float  # α, of one message
    bytes_per_second: float  # bus bandwidth, each way
    source: str = ""  # how it is known: a command and its date, or a data sheet

    def reduction_seconds(self, count: int, processes: int) -> float:
        """How long it takes to sum `count` bytes over processes, each of which gets the whole sum.

        >>> round(Link("10 Gbit/s", latency_seconds=0.0, bytes_per_second=1.25e9).reduction_seconds(10**9, 2), 9)
        0.8
        """
        rounds = 2 * (processes - 1)
        return rounds * self.latency_seconds + rounds / processes * count / self.bytes_per_second


def save(path: Path, link: Link) -> None:
    """Write a link profile."""
    write_atomically(path, json.dumps({"kind": "link", **asdict(link)}, indent=2) + "\n")


def load(path: Path) -> Link:
    """Read a link profile, which may come from anyone."""
    names = [field.name for field in fields(Link)]
    try:
        content = read_json(path)
        link = Link(**{name: content[name] for name in names if name in content})
        if content["kind"] == "link" and _is_possible(link):
            return link
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        pass
    raise UsageError(
        f"a link profile must be JSON with kind link and {', '.join(names[:3])}, which {path} is not; "
        f"scalewise bench collectives writes one"
    )


def _is_possible(link: Link) -> bool:
    numbers, texts = (link.latency_seconds, link.bytes_per_second), (link.name, link.source)
    of_kind = all(type(one) in (int, float) for one in numbers) and all(isinstance(one, str) for one in texts)
    return of_kind and all(map(math.isfinite, numbers)) and numbers[0] >= 0 and numbers[1] > 0
