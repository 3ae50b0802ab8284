"""One run in a folder at a time: a lock that goes with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalewise.errors import RunFolderError

LOCK_FILE = ".lock"
MOST_NOTE_BYTES = 200
_held: set[int] = set()


def _forget() -> None:
    """Release inherited locks in a forked process, which may outlive the one that holds them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Keep a run folder for this process; refuse one that another run, here or in another process, is using.

    The system drops the lock when the process ends, so the file, which stays, means nothing by itself.
    """
    descriptor = _opened(folder / LOCK_FILE)
    _held.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def _opened(path: Path) -> int:
    """The file, which is written: a link put there would have another one overwritten."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise RunFolderError(f"{path} must be a plain file, got something else; remove it") from None


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(
            f"{folder} is in use by another run{_holder(descriptor)}; wait for it or stop it, or use another --out"
        ) from None
    except OSError:  # a file system without locks: the run continues without one
        return
    with suppress(OSError):  # who holds it, for the message above; left out on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)


def _holder(descriptor: int) -> str:
    noted = os.pread(descriptor, MOST_NOTE_BYTES, 0).decode(errors="replace")
    return f" ({noted})" if noted.isprintable() and noted else ""
