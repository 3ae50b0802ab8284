"""Where this process is, for whoever watches it: also after its death, also while it cannot answer."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FORMAT = struct.Struct("<qq")
FILE = "pulse-{rank}"


@dataclass(frozen=True)
class Beat:
    """The last whole step of a process, and whether it trains: has a state that is worth saving."""

    step: int = 0
    trains: bool = False


class Pulse:
    """The newest beat of this process, in memory that others may read."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_FORMAT.size)
        self._beat = Beat()
        self.cut: str | None = None  # why this process has cut its connections

    @property
    def beat(self) -> Beat:
        """Where this process is."""
        return self._beat

    @beat.setter
    def beat(self, beat: Beat) -> None:
        self._beat = beat
        _FORMAT.pack_into(self._memory, 0, beat.step, beat.trains)

    def share(self, path: Path) -> None:
        """Keep it in a file from now on."""
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(bytes(self._memory))
        with temporary.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        temporary.replace(path)


PULSE = Pulse()  # a process is in one place


def beats(folder: Path) -> dict[int, Beat]:
    """The last beat of every process that has shared its pulse in a folder, which may be cleared at any moment."""
    found = {}
    with suppress(FileNotFoundError):  # the folder, and below one of its files
        for path in folder.glob("pulse-*"):
            with suppress(FileNotFoundError):
                step, trains = _FORMAT.unpack(path.read_bytes())
                found[int(path.name.split("-")[1])] = Beat(step, bool(trains))
    return found


def hang_up(reason: str) -> None:
    """Cut this process's connections, so that whoever waits for one learns that there is nothing to wait for.

    gloo waits for a process that is unreachable until its timeout, and aborting the group does not end the wait.
    """
    PULSE.cut = PULSE.cut or reason
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):
            number = int(path.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                over_network = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
                if over_network and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo needs those
                    copy.shutdown(socket.SHUT_RDWR)
