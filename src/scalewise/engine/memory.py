"""How the C library treats freed memory, where the default costs training dearly."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # as malloc.h has them
LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step, which needs the same again.

    By default large blocks go back to the system at once, and a step gets its activations anew, page by page, zeroed by
    the kernel: a fifth to a third of a step at 512 images of 28×28 (docs/log.md). It costs memory: what a step leaves
    has gaps that do not fit the next one's needs, up to the peak over again (cifar10). Nothing is done when the user
    has set one of malloc's own variables.
    """
    chosen = any(
        name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
    )
    if platform.libc_ver()[0] == "glibc" and not chosen:
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, LARGEST)
