"""The heartbeat of this process: its last step, readable by others even after it dies or while it hangs."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILE = "heartbeat-{rank}"


@dataclass(frozen=True)
class Heartbeat:
    """The last whole step of a process, and whether it trains: has a state that is worth saving."""

    step: int = 0
    trains: bool = False


class _Memory(ctypes.LittleEndianStructure):
    _fields_ = (("step", ctypes.c_int64), ("trains", ctypes.c_int64))


class OwnHeartbeat:
    """The last heartbeat of this process, in memory that others can read."""

    def __init__(self) -> None:
        self.memory = _Memory()  # a training step writes into it
        self.lost: str | None = None  # why this process closed its connections

    @property
    def last(self) -> Heartbeat:
        """Where this process is."""
        return Heartbeat(self.memory.step, bool(self.memory.trains))

    @last.setter
    def last(self, heartbeat: Heartbeat) -> None:
        self.memory.step, self.memory.trains = heartbeat.step, heartbeat.trains

    def share(self, path: Path) -> None:
        """Keep it in a file from now on."""
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(bytes(self.memory))
        with temporary.open("r+b") as file:
            self.memory = _Memory.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Memory)))
        temporary.replace(path)


HEARTBEAT = OwnHeartbeat()  # a process is in one place


def heartbeats(folder: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of every process that shares it in a folder, which may be cleared at any moment."""
    found = {}
    with suppress(FileNotFoundError):  # the folder, and below one of its files
        for path in folder.glob("heartbeat-*"):
            with suppress(FileNotFoundError):
                read = _Memory.from_buffer_copy(path.read_bytes())
                found[int(path.name.split("-")[1])] = Heartbeat(read.step, bool(read.trains))
    return found


def disconnect(reason: str) -> None:
    """Close this process's connections, so that no process keeps waiting for one of them.

    gloo waits for a process that is unreachable until its timeout, and aborting the group does not end the wait.
    """
    HEARTBEAT.lost = HEARTBEAT.lost or reason
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):
            number = int(path.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                over_network = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
                if over_network and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo needs those
                    copy.shutdown(socket.SHUT_RDWR)
