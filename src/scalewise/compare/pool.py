"""Long-lived processes that train one run after another, several at the same time.

Each process is spawned, imports torch once and loads the task once per settings. A Ctrl-C reaches only the parent,
which passes it on as SIGTERM: a process then saves its run after the step and ends. Processes end with their parent,
whatever ends it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from scalewise.compare.jobs import Failure, Job, Message, Outcome, Setup, Stop, Stopped
from scalewise.errors import ScalewiseError

if TYPE_CHECKING:
    from scalewise.tasks.task import Task

LAST_LINES = 10


@dataclass
class _Member:
    """A process, the way to it, and the job it is on."""

    process: SpawnProcess
    connection: Connection
    log: Path
    job: Job | None = None


class Pool:
    """The processes of a comparison."""

    def __init__(self, size: int, setup: Setup) -> None:
        self._setup = setup
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []
        self._started = 0
        self._size = size
        self.stopping = 0  # the signal that has asked to stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._members:
            member.connection.close()  # an idle process ends when nobody can ask it any more
            if member.job is not None:
                member.process.kill()
        for member in self._members:
            member.process.join()
            _remove_if_empty(member.log)
        self._members.clear()

    def stop(self, number: int) -> None:
        """Ask every process to save its run and end; may be called in a signal handler."""
        self.stopping = number
        for member in self._members:
            if member.process.is_alive():
                member.process.terminate()

    def run(self, jobs: Iterable[Job]) -> Iterator[Message]:
        """Do all jobs, as many at a time as there are processes; says how far they are and how they end."""
        waiting = deque(jobs)
        while waiting or any(member.job for member in self._members):
            if not self.stopping:
                self._hand_out(waiting)
            busy = [member for member in self._members if member.job is not None]
            if not busy:
                return
            ready = wait([member.connection for member in busy])
            for member in busy:
                if member.connection in ready:
                    yield self._hear(member)

    def _hand_out(self, waiting: deque[Job]) -> None:
        while waiting:
            idle = next((member for member in self._members if member.job is None), None)
            if idle is None and len(self._members) == self._size:
                return
            member = idle or self._start()
            member.job = waiting.popleft()
            with contextlib.suppress(OSError):  # it has just died; hearing from it will tell
                member.connection.send(member.job)

    def _start(self) -> _Member:
        mine, theirs = self._context.Pipe()
        self._started += 1
        log = self._setup.folder / f"process-{self._started}.log"
        process = self._context.Process(target=_serve, args=(theirs, self._setup, log), name=f"process {self._started}")
        resource_tracker.ensure_running()  # started with the first process, it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # it inherits the blocked signal: a terminal sends Ctrl-C to everybody, and this process decides
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        member = _Member(process, mine, log)
        self._members.append(member)
        if self.stopping:  # the signal came while it was being started
            process.terminate()
        return member

    def _hear(self, member: _Member) -> Message:
        """The next message of a process; one that has died is let go, and its job has failed."""
        assert member.job is not None
        try:
            message: Message = member.connection.recv()
        except (EOFError, OSError):
            return self._bury(member)
        if isinstance(message, Outcome | Stopped):
            member.job = None
        return message

    def _bury(self, member: _Member) -> Message:
        job = member.job
        assert job is not None
        member.process.join()
        self._members.remove(member)
        member.connection.close()
        code = member.process.exitcode or 0
        if self.stopping:
            return Stopped(job)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"{member.process.name} (pid {member.process.pid}) {how}{_last_lines(member.log)}"
        return Outcome(job, None, None, Failure(reason, 1, False), [])


def _last_lines(log: Path) -> str:
    """The last things a process said, indented under the message."""
    if not log.is_file():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "".join([", its last lines:", *(f"\n  {line}" for line in lines[-LAST_LINES:])]) if lines else ""


def _remove_if_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()


def _serve(connection: Connection, setup: Setup, log: Path) -> None:
    """What a process of the pool does: jobs, until nobody sends any more."""
    stop = Stop()
    idle = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(number)
        if idle.is_set():
            sys.exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    _speak_into(log)
    _end_with_parent()
    tasks: dict[tuple[str, ...], Task] = {}
    with contextlib.suppress(EOFError, OSError):  # the parent has closed its end
        while not stop.signal:
            idle.set()
            job: Job = connection.recv()
            idle.clear()
            connection.send(_performed(job, setup, tasks, connection, stop))


def _performed(
    job: Job, setup: Setup, tasks: dict[tuple[str, ...], Task], connection: Connection, stop: Stop
) -> Outcome | Stopped:
    from scalewise.compare.runs import perform
    from scalewise.tasks.load import load_task

    settings = job.line.plan.settings
    try:
        if settings not in tasks:
            tasks[settings] = load_task(setup.task_spec, settings, setup.data)
    except ScalewiseError as error:
        return Outcome(job, None, None, Failure(str(error), error.exit_code, False), [])
    return perform(job, tasks[settings], setup, connection.send, stop)


def _speak_into(log: Path) -> None:
    """Send whatever a task or a library prints into a file: the terminal shows the table."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_parent() -> None:
    """End this process when the parent is gone, so that nobody goes on writing into its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
