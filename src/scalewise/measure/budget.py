"""How much memory there is to use: as a person writes it, and as this machine and its cgroup have it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scalewise.errors import UsageError

PREFIXES = ("", "k", "m", "g", "t")
UNITS = {f"{prefix}b": 1000**power for power, prefix in enumerate(PREFIXES)} | {
    f"{prefix}ib": 1024**power for power, prefix in enumerate(PREFIXES) if prefix
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Free:
    """Bytes that are free, and who says so."""

    bytes: int
    source: str


def parse_bytes(text: str, flag: str = "--memory") -> int:
    """An amount of memory as a person writes it: decimal units (kB, MB, GB, TB) or binary ones (KiB, MiB, GiB, TiB).

    >>> parse_bytes("512MB"), parse_bytes("2GiB"), parse_bytes("1.5 gb")
    (512000000, 2147483648, 1500000000)
    """
    found = _AMOUNT.fullmatch(text)
    unit = UNITS.get(found[2].lower()) if found else None
    amount = int(float(found[1]) * unit) if found and unit else 0
    if amount < 1:
        raise UsageError(
            f"{flag} must be an amount of memory above 0 with its unit (MB, GB, MiB, GiB, …), got {text!r}; "
            f"write for example {flag} 4GB"
        )
    return amount


def show_bytes(amount: float) -> str:
    """An amount of memory, for people.

    >>> show_bytes(1_234_567_890), show_bytes(52_400), show_bytes(12)
    ('1.23 GB', '52.4 kB', '12 B')
    """
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(amount) >= 1000**power:
            return f"{amount / 1000**power:.3g} {prefix}B"
    return f"{amount:.0f} B"


def free_memory(root: Path = Path("/")) -> Free:
    """What this machine has free, or what its cgroup leaves, whichever is less.

    Arguments:
        root: where /proc and /sys are.
    """
    candidates = [Free(_table(root / "proc/meminfo")["MemAvailable"] * 1024, "free memory of this machine")]
    candidates += [Free(amount, "what the cgroup's limit leaves") for amount in _left_by_cgroups(root)]
    return min(candidates, key=lambda free: free.bytes)


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What is left in each cgroup that this process is in, up to the root, of version 1 or 2.

    Files that the kernel only keeps in memory while nobody needs it do not count as used.
    """
    mounted = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for folder in _upwards(mounted / "memory", path):
                yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            for folder in (*_upwards(mounted, path), *_upwards(mounted / "unified", path)):
                yield from _left(folder, "memory.max", "memory.current", "inactive_file")


def _upwards(mounted: Path, path: str) -> list[Path]:
    """The folders of a cgroup and of those it lies in; within a container some of them cannot be seen."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mounted.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _left(folder: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    try:
        allowed, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        kept = _table(folder / "memory.stat").get(cached, 0)
    except (OSError, ValueError):  # no such controller here
        return
    if allowed != "max":
        yield max(0, int(allowed) - max(0, used - kept))


def _table(path: Path) -> dict[str, int]:
    """Names and numbers, as /proc/meminfo and memory.stat have them."""
    rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
