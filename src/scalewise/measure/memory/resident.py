"""How much memory this process may hold, by Linux's own limits.

A process asks for more than it touches (stacks of threads), so the limit is set by how much may be *added* to what
engine/memory.py calls writable and own:

    RLIMIT_DATA = VmData + (allowed bytes − RssAnon)

Whatever is added, even when all of it is touched, then stays within what was allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import signal
from pathlib import Path

from scalewise.engine.memory import held

DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
FIRST_TO_DIE = 1000  # the largest oom_score_adj
FORGET_THE_PEAK = "5"  # what clear_refs calls it


def forget_peak() -> None:
    """Have the highest figure count from now on; where the kernel does not do that, it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(FORGET_THE_PEAK)


def release_freed() -> None:
    """Give back what was freed, so that it does not count as held and is not used again unseen."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def allow(allowed: int) -> None:
    """Stop this process from holding more than `allowed` bytes of its own: asking for more then fails."""
    now = held()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max(0, now.writable + allowed - now.own)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def stand_in_front() -> None:
    """Be the first to be killed when the machine runs out of memory, leave no core file, and end with the parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_DIE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
