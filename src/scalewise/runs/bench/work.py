"""What a job of several processes is started with: its work, and where it runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from scalewise.engine.placement import DeviceName

if TYPE_CHECKING:
    from scalewise.engine.processes.team import Team

START, SOCKET = "start.pickle", "socket"
FIRST_PORT = 29600

RequestT = TypeVar("RequestT", contravariant=True)
ReplyT = TypeVar("ReplyT", covariant=True)


class Work(Protocol[RequestT, ReplyT]):
    """What the processes of a job do with requests; pickled into each of them once."""

    def opened(self, team: Team) -> AbstractContextManager[Callable[[RequestT], ReplyT]]:
        """Get ready, in a process; the function does what is asked for, in all processes at the same time."""


@dataclass(frozen=True)
class Start:
    """One job.

    work: what it does.
    processes: how many in all.
    threads: computing threads of each.
    device: kind of device.
    addresses: of the hosts that share the processes evenly; none for this machine itself.
    number: of this job among those that run at the same time.
    """

    work: Work[Any, Any]
    processes: int
    threads: int
    device: DeviceName = "cpu"
    addresses: tuple[str, ...] = ()
    number: int = 0

    @property
    def nodes(self) -> int:
        """Machines that take part."""
        return max(1, len(self.addresses))

    @property
    def endpoint(self) -> str:
        """Where the launchers meet; on one machine any free port will do."""
        return f"{self.addresses[0]}:{FIRST_PORT + self.number}" if self.addresses else "127.0.0.1:0"

    def save(self, folder: Path) -> None:
        """Put it where the processes find it."""
        (folder / START).write_bytes(pickle.dumps(self))

    @staticmethod
    def load(folder: Path) -> Start:
        """What `save` wrote: by the command that started this process, in a folder of its own."""
        start: Start = pickle.loads((folder / START).read_bytes())
        return start
