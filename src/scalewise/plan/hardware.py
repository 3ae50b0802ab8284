"""What is planned for: links, prices, durations and speeds, as people write them and as numbers.

A link between processes is two numbers, which `bench collectives` measures. A ring all-reduce of n bytes over P
processes sends 2(P − 1) messages one after another, each with its latency α, and 2(P − 1) ÷ P of the bytes through
every process's link (Thakur et al. 2005):

    seconds = 2·(P − 1)·α + 2·(P − 1) ÷ P · n ÷ bandwidth

The ordered reduction sends as many bytes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, FiniteFloat, TypeAdapter

from scalewise.errors import UsageError
from scalewise.files import parse_json, read_bytes
from scalewise.records import write_atomically


@dataclass(frozen=True)
class Link:
    """What one process's link carries."""

    name: str
    latency_seconds: Annotated[FiniteFloat, Field(ge=0)]  # α, of one message
    bytes_per_second: Annotated[FiniteFloat, Field(gt=0)]  # bus bandwidth, each way
    source: str = ""  # how it is known: a command and its date, or a data sheet

    def reduction_seconds(self, count: int, processes: int) -> float:
        """How long it takes to sum `count` bytes over processes, each of which gets the whole sum.

        >>> round(Link("10 Gbit/s", latency_seconds=0.0, bytes_per_second=1.25e9).reduction_seconds(10**9, 2), 9)
        0.8
        """
        rounds = 2 * (processes - 1)
        return rounds * self.latency_seconds + rounds / processes * count / self.bytes_per_second


@dataclass(frozen=True)
class Hardware:
    """What is planned for."""

    link: Link
    node_link: Link
    node_devices: int = 1
    device_speed: float = 1.0
    price_per_hour: float | None = None
    overlap: float | None = None
    input_samples_per_second: float | None = None
    memory_bytes: int | None = None  # of a device; by default what was free where it was measured


def save_link(path: Path, link: Link) -> None:
    """Write a link profile."""
    write_atomically(path, json.dumps({"kind": "link", **asdict(link)}, indent=2) + "\n")


def load_link(path: Path) -> Link:
    """Read a link profile, which may come from anyone."""
    try:
        content = read_bytes(path)
        if parse_json(content)["kind"] == "link":
            return TypeAdapter(Link).validate_json(content, strict=True)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UsageError(
        f"a link profile must be JSON with kind link and name, latency_seconds, bytes_per_second, which {path} is not; "
        f"scalewise bench collectives writes one"
    )


SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
ETHERNET_LATENCY = 50e-6  # Assumption: one message over TCP within a data centre
NAMED = {  # each way, from data sheets; latencies are those of small NCCL messages, to the order of magnitude
    "nvlink": Link("nvlink", 5e-6, 300e9, "data sheet: NVLink 3, 12 links of 25 GB/s each way"),
    "pcie": Link("pcie", 10e-6, 31.5e9, "data sheet: PCIe 4.0, 16 lanes"),
    "infiniband": Link("infiniband", 5e-6, 25e9, "data sheet: InfiniBand HDR, 200 Gbit/s"),
}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|s|m|h|d)?")


def parse_link(text: str, flag: str = "--link") -> Link:
    """A link by its rate, its name, or a profile that `bench collectives` wrote.

    >>> parse_link("25gbit").bytes_per_second
    3125000000.0
    """
    name = text.lower()
    if name in NAMED:
        return NAMED[name]
    if found := _RATE.fullmatch(name):
        rate = float(found[1]) * {"g": 1e9, "m": 1e6}[found[2]] / 8
        if rate > 0:
            return Link(text, ETHERNET_LATENCY, rate, f"{text} at line rate, {ETHERNET_LATENCY * 1e6:g} µs a message")
    if not Path(text).is_file():
        raise UsageError(
            f"{flag} needs a rate as in 25gbit, one of {', '.join(NAMED)}, or a file with a link profile, got {text!r}"
        )
    return load_link(Path(text))


def parse_price(text: str) -> float:
    """Money for one device for an hour.

    >>> parse_price("2.50/h"), parse_price("0.02/min")
    (2.5, 1.2)
    """
    amount, _, unit = text.strip().lstrip("$€£").partition("/")
    price = _number(amount) * 3600 / SECONDS.get(unit.strip() or "h", math.nan)
    if not (math.isfinite(price) and price >= 0):
        raise UsageError(f"--price needs what one device costs an hour, 0 or more, as in 2.50/h, got {text!r}")
    return price


def _number(text: str) -> float:
    """Not a number where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_duration(text: str) -> float:
    """Seconds.

    >>> parse_duration("2h"), parse_duration("1h30m"), parse_duration("90")
    (7200.0, 5400.0, 90.0)
    """
    rest, total = text.strip().lower(), 0.0
    while found := _PART.match(rest):
        total += float(found[1]) * SECONDS[found[2] or "s"]
        rest = rest[found.end() :].strip()
    if rest or not 0 < total < math.inf:
        raise UsageError(f"--deadline needs a duration above 0, as in 2h, 90min or 1h30m, got {text!r}")
    return total


def parse_speed(text: str) -> float:
    """How many times faster.

    >>> parse_speed("10x"), parse_speed("0.5")
    (10.0, 0.5)
    """
    speed = _number(text.strip().lower().removesuffix("x"))
    if not (math.isfinite(speed) and speed > 0):
        raise UsageError(f"--device-speed needs a factor above 0, as in 10x, got {text!r}")
    return speed
