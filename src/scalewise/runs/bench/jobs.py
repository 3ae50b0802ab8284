"""Jobs that stay alive and answer requests: several processes each, started through torch's elastic launcher.

The command asks a job's first process over a socket in the file system, which hosts in other network namespaces reach
as well. A job that nobody asks sleeps, so that several jobs can take turns and none is disturbed by another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from scalewise.engine.processes.last_words import FOLDER, failure
from scalewise.engine.processes.launch import LAUNCHER
from scalewise.errors import PlacementError, ScalewiseError
from scalewise.runs.bench.hosts import Host, hosts
from scalewise.runs.bench.work import SOCKET, Start
from scalewise.runs.measure.memory.children import JOB_VARIABLES

START_SECONDS = 180.0
POLL_SECONDS = 0.1
END_SECONDS = 15.0

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class Job(Generic[RequestT, ReplyT]):
    """Processes that do the same at the same time, whenever they are asked."""

    def __init__(self, start: Start, machines: Sequence[Host] = ()) -> None:
        """Nothing is started before `with`.

        Arguments:
            start: what and where.
            machines: the hosts of its addresses, if it has any.
        """
        self._start, self._machines = start, machines
        self._connection: Connection[Any, Any] | None = None
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(_temporary_folder()))
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self._folder / SOCKET))
            self._listener.listen(1)
            self._listener.settimeout(POLL_SECONDS)
            self._start.save(self._folder)
            stack.callback(self._kill)
            for node in range(self._start.nodes):
                self._launchers.append(self._launch(node))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._stack.close()

    def ask(self, request: RequestT) -> list[ReplyT]:
        """What every process answers, in process order; a process that dies fails the job."""
        try:
            connection = self._connected()
            connection.send(request)
            replies: list[ReplyT] = connection.recv()
        except (EOFError, OSError):
            raise self._failure() from None
        return replies

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "scalewise.runs.bench.launcher", str(self._folder), str(node)]
        if self._machines:
            command = self._machines[node].command(command)
        with (self._folder / f"launcher-{node}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches the command alone, which ends them
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not JOB_VARIABLES.match(name)}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        ours = {FOLDER: str(self._folder), LAUNCHER: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return kept | ours | {"OMP_NUM_THREADS": str(self._start.threads), "PYTHONPATH": path}

    def _connected(self) -> Connection[Any, Any]:
        """The way to the first process, once it is ready."""
        deadline = time.monotonic() + START_SECONDS
        while self._connection is None:
            with suppress(TimeoutError):
                self._connection = Connection(self._listener.accept()[0].detach())
            if self._connection is None and (time.monotonic() > deadline or not self._is_running()):
                raise EOFError
        return self._connection

    def _is_running(self) -> bool:
        return all(launcher.poll() is None for launcher in self._launchers)

    def _ended(self, seconds: float) -> bool:
        """Whether all launchers, and with them their processes, end in time."""
        deadline = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            for launcher in self._launchers:
                launcher.wait(max(0.0, deadline - time.monotonic()))
            return True
        return False

    def _failure(self) -> ScalewiseError:
        self._ended(END_SECONDS)
        codes = {
            int(rank): int(code)
            for path in self._folder.glob("codes-*.json")
            for rank, code in json.loads(path.read_text()).items()
        }
        return failure(self._folder, codes, f"one of {self._start.processes} that were timed together: start again")

    def _kill(self) -> None:
        """End what still runs: the launchers end their processes, and these end themselves without a launcher."""
        for launcher in self._launchers:
            launcher.terminate()
        if not self._ended(END_SECONDS):
            for launcher in self._launchers:
                launcher.kill()
                launcher.wait()


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder that processes on their way out may still write into while it is removed."""
    with tempfile.TemporaryDirectory(prefix="scalewise-", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def taking_turns(
    starts: Mapping[int, Start], host_count: int | None = None, rate: str | None = None
) -> Iterator[dict[int, Job[Any, Any]]]:
    """Jobs by their number of processes, all alive; on this machine, or spread over hosts with slow links.

    Arguments:
        starts: by the number of processes.
        host_count, rate: how many hosts share the processes, and what each one's link carries.
    """
    with ExitStack() as stack:
        machines = [] if host_count is None else stack.enter_context(hosts(host_count, rate))
        jobs = {}
        for number, (processes, start) in enumerate(starts.items()):
            chosen = machines[: min(processes, len(machines))]
            placed = replace(start, addresses=tuple(host.address for host in chosen), number=number)
            jobs[processes] = stack.enter_context(Job[Any, Any](placed, chosen))
        yield jobs


def check_counts(counts: Sequence[int], smallest: int, host_count: int | None) -> None:
    """Refuse numbers of processes that cannot be, or that the hosts cannot share evenly."""
    wrong = [count for count in counts if count < smallest]
    if wrong or not counts or len(set(counts)) < len(counts):
        shown = ",".join(map(str, counts)) or "none"
        raise PlacementError(f"processes must be different whole numbers from {smallest} on, got {shown}; change them")
    if host_count is None:
        return
    if host_count < 2:
        raise PlacementError(f"hosts must be at least 2, to have a link between them, got {host_count}; change --hosts")
    uneven = [count for count in counts if count % min(count, host_count)]
    if uneven:
        raise PlacementError(
            f"processes must spread evenly over hosts, got {uneven[0]} on {host_count}; use multiples of --hosts"
        )
