"""Threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def in_thread(
    target: Callable[..., object],
    args: tuple[object, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a thread that has started; a silent one keeps its errors to itself."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, got a {type(args).__name__}; write (argument,)")

    def called() -> None:
        with suppress(*([Exception] if silent else [])):
            target(*args)

    thread = threading.Thread(target=called, name=name, daemon=daemon)
    thread.start()
    return thread
