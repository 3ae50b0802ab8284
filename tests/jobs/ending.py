"""Processes that end as they are told to."""

from __future__ import annotations

import os
import signal
import sys


def end(folder: str) -> int:
    """End with the planted exit code, or killed; of several processes the last one is."""
    planted, size = os.environ["PLANTED"], int(os.environ.get("WORLD_SIZE", "1"))
    print(f"threads {os.environ['OMP_NUM_THREADS']}, of {size}, planted {planted}", file=sys.stderr, flush=True)
    if int(os.environ.get("RANK", "0")) != size - 1:
        return 0
    if planted == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(planted)


def place(word: str) -> str:
    """This process's place in its job."""
    if word == "fail":
        raise ValueError("planted")
    return f"{word} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
