"""Long-lived processes that train one run after another, several at the same time.

Each process is spawned and imports torch once; what it keeps from job to job is up to the `Work`. A Ctrl-C reaches only
the parent, which passes it on as SIGTERM: a process then saves its run after the step and ends. Processes end with
their parent, whatever ends it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Generic, Protocol, Self, TypeVar

from scalewise.engine.processes.last_words import how_it_ended, last_lines, redirect_output
from scalewise.engine.processes.signals import Stop

JobT = TypeVar("JobT")
JobToDo = TypeVar("JobToDo", contravariant=True)
MessageT = TypeVar("MessageT")
MessageToSend = TypeVar("MessageToSend", covariant=True)


class Work(Protocol[JobToDo, MessageToSend]):
    """What the processes do with jobs; pickled into each of them once."""

    @property
    def folder(self) -> Path:
        """Where the processes' logs go."""

    def perform(self, job: JobToDo, send: Callable[[MessageToSend], None], stop: Stop) -> MessageToSend:
        """Do a job, in the process: `send` says how far it is, the value how it ended."""

    def died(self, job: JobToDo, reason: str) -> MessageToSend:
        """What becomes of a job whose process died."""

    def stopped(self, job: JobToDo) -> MessageToSend:
        """What becomes of a job whose process ended because it was asked to."""


@dataclass
class _Member(Generic[JobT]):
    """A process, the way to it, and the job it is on."""

    process: SpawnProcess
    connection: Connection
    log: Path
    job: JobT | None = None


class Pool(Generic[JobT, MessageT]):
    """Processes that share some jobs out."""

    def __init__(self, size: int, work: Work[JobT, MessageT]) -> None:
        self._work = work
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member[JobT]] = []
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
            with contextlib.suppress(OSError):
                if member.log.stat().st_size == 0:
                    member.log.unlink()
        self._members.clear()

    def stop(self, number: int) -> None:
        """Ask every process to save its run and end; may be called in a signal handler."""
        self.stopping = number
        for member in self._members:
            if member.process.is_alive():
                member.process.terminate()

    def run(self, jobs: Iterable[JobT]) -> Iterator[MessageT]:
        """Do all jobs, one per process at a time; yields how far they are and how they end."""
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
                    yield self._receive(member)

    def _hand_out(self, waiting: deque[JobT]) -> None:
        while waiting:
            idle = next((member for member in self._members if member.job is None), None)
            if idle is None and len(self._members) == self._size:
                return
            member = idle or self._start()
            member.job = waiting.popleft()
            with contextlib.suppress(OSError):  # it has just died; receiving from it will show that
                member.connection.send(member.job)

    def _start(self) -> _Member[JobT]:
        mine, theirs = self._context.Pipe()
        self._started += 1
        log = self._work.folder / f"process-{self._started}.log"
        process = self._context.Process(target=_serve, args=(theirs, self._work, log), name=f"process {self._started}")
        resource_tracker.ensure_running()  # started with the first process, it would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # it inherits the blocked signal: a terminal sends Ctrl-C to everybody, and this process decides
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        member = _Member[JobT](process, mine, log)
        self._members.append(member)
        if self.stopping:  # the signal came while it was being started
            process.terminate()
        return member

    def _receive(self, member: _Member[JobT]) -> MessageT:
        """The next message of a process; one that has died is let go, and its job has failed."""
        assert member.job is not None
        try:
            ended, message = member.connection.recv()
        except (EOFError, OSError):
            return self._removed(member, member.job)
        if ended:
            member.job = None
        received: MessageT = message
        return received

    def _removed(self, member: _Member[JobT], job: JobT) -> MessageT:
        member.process.join()
        self._members.remove(member)
        member.connection.close()
        code = member.process.exitcode or 0
        if self.stopping:
            return self._work.stopped(job)
        said = member.log.read_text(errors="replace") if member.log.is_file() else ""
        reason = f"{member.process.name} (pid {member.process.pid}) {how_it_ended(code)}{last_lines(said)}"
        return self._work.died(job, reason)


class InProcess(Generic[JobT, MessageT]):
    """A pool without processes, for work that only this process can do: one job after another."""

    def __init__(self, work: Work[JobT, MessageT]) -> None:
        self._work, self._stop = work, Stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    @property
    def stopping(self) -> int:
        """The signal that has asked to stop."""
        return self._stop.signal

    def stop(self, number: int) -> None:
        """Save the run after its step and end; may be called in a signal handler."""
        self._stop.ask(number)

    def run(self, jobs: Iterable[JobT]) -> Iterator[MessageT]:
        """Do all jobs; yields how far they were and how they end."""
        for job in jobs:
            if self._stop.signal:
                return
            sent: list[MessageT] = []
            ended = self._work.perform(job, sent.append, self._stop)
            yield from sent
            yield ended


def _serve(connection: Connection, work: Work[JobT, MessageT], log: Path) -> None:
    """What a process of the pool does: jobs, until nobody sends any more."""
    stop = Stop()
    idle = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(number)
        if idle.is_set():
            sys.exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    redirect_output(log)
    _end_with_parent()

    def send(message: MessageT) -> None:
        connection.send((False, message))

    with contextlib.suppress(EOFError, OSError):  # the parent has closed its end
        while not stop.signal:
            idle.set()
            job: JobT = connection.recv()
            idle.clear()
            connection.send((True, work.perform(job, send, stop)))


def _end_with_parent() -> None:
    """End this process when the parent is gone, so that nobody keeps writing into its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
