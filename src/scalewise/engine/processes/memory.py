"""The memory of this process: what it holds, its limit, freed memory, and how running out of memory is recognized.

Two figures of /proc/self/status matter. `RssAnon` is resident and private to this process: what a container's limit
and the OOM killer count. `VmData` is what the process has allocated, touched or not: what RLIMIT_DATA limits. A process
allocates more than it touches (stacks of threads), so the limit is what may be *added*:

    RLIMIT_DATA = VmData + (allowed bytes − RssAnon)

Even when all of that is touched, the process stays within the allowed bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import platform
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # as malloc.h has them
LARGEST = 2**31 - 1
LARGE_BLOCK, MOST_BLOCKS = 128 << 10, 1 << 16  # bytes, and how many at a time: glibc's own first ideas of it
CHOSEN_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
STATUS = Path("/proc/self/status")


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system as soon as they are freed, and now what it has kept so far."""
    library = _malloc()
    if library is not None:
        library.mallopt(M_MMAP_MAX, MOST_BLOCKS)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step, which needs the same again.

    Otherwise a step allocates its activations again, page by page, zeroed by the kernel: a fifth to a third of a step
    at 512 images of 28×28 (docs/log.md).
    """
    library = _malloc()
    if library is not None:
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, LARGEST)


def _malloc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the user has set none of malloc's own variables; else nothing is done."""
    ours = platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in CHOSEN_BY_THE_USER)
    return ctypes.CDLL(None) if ours else None


def has_room_to_keep(processes: int) -> bool:
    """Whether each of the `processes` on this machine may keep what it frees.

    A step leaves gaps that do not fit the next one's allocations: at worst as much again as its peak.
    """
    if not STATUS.is_file():
        return True
    now = held()
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    rooms = [free_memory().bytes / processes]
    if limit != resource.RLIM_INFINITY:
        rooms.append(limit - now.writable)
    return min(rooms) >= now.highest


@dataclass(frozen=True)
class Held:
    """What this process holds, in bytes."""

    own: int  # in memory, and nobody else's
    writable: int  # asked for, touched or not
    highest: int  # the most of its own since the peak was last reset


def held() -> Held:
    """What this process holds now, and the most it has held."""
    rows = [line.split() for line in STATUS.read_text().splitlines()]
    found = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
    # the peak also counts pages of files, of which there are hardly more at the peak than now
    highest = found["VmHWM"] - found["RssFile"] - found["RssShmem"]
    return Held(found["RssAnon"], found["VmData"], max(found["RssAnon"], highest))


@dataclass(frozen=True)
class Free:
    """Bytes that are free, and who says so."""

    bytes: int
    source: str


def free_memory(root: Path = Path("/")) -> Free:
    """What this machine has free, or what its cgroup leaves, whichever is less; /proc and /sys are in `root`."""
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


# What torch, oneDNN and the C++ library say when an allocation fails; they have no type of their own for it on a CPU.
SAID = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "bad allocation",
    "annot allocate memory",
    "can't allocate memory",
    "out of memory",
    "not enough memory",
    "can't start new thread",
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that caused it, means out of memory."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, MemoryError | torch.OutOfMemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, RuntimeError) and says_out_of_memory(str(link)):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def says_out_of_memory(said: str) -> bool:
    """Whether the last lines of a process say out of memory."""
    return any(words in said for words in SAID)


DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
FIRST_TO_DIE = 1000  # the largest oom_score_adj
RESET_PEAK = "5"  # what clear_refs calls it


def reset_peak() -> None:
    """Reset the peak, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def release_freed() -> None:
    """Return freed memory to the system, so that it does not count as held."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory(allowed: int) -> None:
    """Limit this process to `allowed` bytes of its own: allocating more fails."""
    now = held()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max(0, now.writable + allowed - now.own)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def be_killed_first() -> None:
    """Have the OOM killer choose this process first, leave no core file, and end with the parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_DIE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
