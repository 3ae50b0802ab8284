"""The watchdog: finds processes that hang, names them and ends them, so that a hang is a death like any other.

A process makes progress when it ends a step, computes (it or its loader processes use a hundredth of the time or more),
or reads or writes files. Waiting for other processes is no progress. Two threads in every process wake up eight times
in the time that is allowed: one exchanges heartbeats with the others through the job's store, the other looks for
- this process, if it makes no progress and does not wait for others: a deadlock;
- another one whose heartbeat has stopped: stopped, or unreachable;
- everybody, if all wait for each other.
A silent process of the same agent is killed after it was asked for its Python stack. Contact with one elsewhere is cut,
and its own agent sees to it. What goes unnoticed: a process that computes for ever within one step.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from scalewise.engine.processes import last_words
from scalewise.engine.processes.heartbeat import HEARTBEAT, disconnect
from scalewise.engine.processes.team import Team
from scalewise.engine.sums.tree import workers_of
from scalewise.recipe import Recipe

KEY, STACK = "scalewise/heartbeat/{rank}", "stack-{rank}.txt"  # in the store, and in the job's folder
LOOKS = 8  # in the time that is allowed
SHARE = 0.01  # of the time: computing less is none
STACK_SECONDS = 3.0
LEAVE_SECONDS = 1.0
STACK_LINES = 12
EXCHANGES = ("scalewise.engine.processes.team", "scalewise.engine.sums.reductions", "torch.distributed")


@dataclass(frozen=True)
class Status:
    """What a process reports to the others."""

    number: int  # one more each time
    step: int
    waits: bool  # for other processes, and without progress for longer than allowed
    left: bool
    process: int
    agent: int
    machine: str


class Watchdog:
    """Watches the processes of a job: one without progress for so many seconds counts as dead."""

    def __init__(self, team: Team, store: Store, seconds: float) -> None:
        self._team, self._store, self._seconds = team, store, seconds
        self.recipe: Recipe | None = None
        self._leaving = threading.Event()
        self._waits = False
        self._heard: tuple[float, list[Status]] = (time.monotonic(), [])
        self._main = threading.main_thread().ident
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._report, self._check)]

    def start(self) -> None:
        """Begin, on every process."""
        self._store.set(KEY.format(rank=self._team.rank), self._status(0))
        self._team.barrier()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Report that this process leaves, if the store can be reached."""
        self._leaving.set()
        self._threads[0].join(timeout=LEAVE_SECONDS)

    def _status(self, number: int) -> str:
        left, step = self._leaving.is_set(), HEARTBEAT.last.step
        return json.dumps(
            asdict(Status(number, step, self._waits, left, os.getpid(), os.getppid(), last_words.machine()))
        )

    def _report(self) -> None:
        keys = [KEY.format(rank=rank) for rank in range(self._team.size)]
        number, left = 0, False
        while not left:
            left = self._leaving.wait(self._seconds / LOOKS)
            number += 1
            with suppress(RuntimeError):  # the store is gone; _check notices that nothing is heard
                self._store.set(keys[self._team.rank], self._status(number))
                self._heard = time.monotonic(), [Status(**json.loads(text)) for text in self._store.multi_get(keys)]

    def _check(self) -> None:
        looked = began = time.monotonic()
        progress, peers = _Progress(began), _Peers(began)
        while not self._leaving.wait(self._seconds / LOOKS):
            now = time.monotonic()
            if now - looked > self._seconds / 2:  # this process was stopped itself, perhaps with all the others
                progress, peers = _Progress(now), _Peers(now)
            looked = now
            stuck = progress.idle_seconds(now) > self._seconds
            self._waits = stuck and _waits_for_others()
            if stuck and not self._waits:
                self._die()
            peers.update(*self._heard, now)
            for rank, status in peers.silent(self._seconds):
                self._end(rank, status)
            if now - peers.last > self._seconds:
                disconnect(f"the job's store was not heard of for {self._seconds:g} s")
            if now - peers.moving > self._seconds:
                disconnect(f"all processes have waited for each other for {2 * self._seconds:g} s")

    def _die(self) -> None:
        """End this process, which is stuck in a place that is not for waiting."""
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.format_stack(frame)
        lines = [line.rstrip() for entry in reversed(stack) for line in entry.splitlines()]
        self._note(self._team.rank, "made no progress", lines)
        os.kill(os.getpid(), signal.SIGKILL)

    def _end(self, rank: int, status: Status) -> None:
        """End a process whose heartbeat stopped: kill it here, or disconnect from it."""
        if (status.machine, status.agent) != (last_words.machine(), os.getppid()) or not _is_sibling(status.process):
            disconnect(f"{self._name(rank)} was not heard of for {self._seconds:g} s after step {status.step}")
            return
        self._note(rank, "said nothing", _stack_of(rank, status.process))
        with suppress(ProcessLookupError):
            os.kill(status.process, signal.SIGKILL)

    def _note(self, rank: int, what: str, stack: list[str]) -> None:
        message = f"{self._name(rank)} {what} for {self._seconds:g} s and was killed"
        lines, folder = stack[:STACK_LINES], last_words.own_folder()
        if folder is None:
            print(f"scalewise: {message}", *lines, sep="\n  ", file=sys.stderr, flush=True)
        else:
            last_words.leave_watchdog_report(folder, rank, message, lines)

    def _name(self, rank: int) -> str:
        """A process, and its workers once they are known."""
        if self.recipe is None or self.recipe.workers < self._team.size:
            return f"process {rank}"
        return f"process {rank} ({workers_of(rank, self._team.size, self.recipe.workers)})"


class _Peers:
    """When the other processes last sent a heartbeat, and whether one of them makes progress."""

    def __init__(self, now: float) -> None:
        self._began = self.last = self.moving = now
        self._statuses: dict[int, tuple[Status, float]] = {}

    def update(self, when: float, statuses: list[Status], now: float) -> None:
        """Store the newest heartbeats, and when they came."""
        self.last = max(when, self._began)
        for rank, status in enumerate(statuses):
            known = self._statuses.get(rank)
            if known is None or known[0].number != status.number:
                self._statuses[rank] = status, self.last
        if not statuses or not all(status.waits for status in statuses):
            self.moving = now

    def silent(self, seconds: float) -> list[tuple[int, Status]]:
        """Those whose heartbeat stopped for this time while others went on, and that have not left."""
        return [
            (rank, status)
            for rank, (status, when) in self._statuses.items()
            if self.last - when > seconds and not status.left
        ]


class _Progress:
    """When this process last made progress."""

    def __init__(self, now: float) -> None:
        self._process = psutil.Process()
        self._seen = (HEARTBEAT.last, 0, self._computed())
        self._looked = self._moved = now

    def idle_seconds(self, now: float) -> float:
        """Seconds without progress."""
        heartbeat, stored, computed = HEARTBEAT.last, self._stored(), self._computed()
        last_heartbeat, last_stored, last_computed = self._seen
        busy = computed - last_computed > SHARE * (now - self._looked)
        if heartbeat != last_heartbeat or stored != last_stored or busy:
            self._moved = now
        self._seen, self._looked = (heartbeat, stored, computed), now
        return now - self._moved

    def _computed(self) -> float:
        """Processor seconds of this process and its loader processes, without those that looking for these takes.

        That is a look at every process of the machine: on a large one it would pass for progress.
        """
        total = time.process_time() - time.thread_time()
        for child in self._process.children():
            with suppress(psutil.Error):
                times = child.cpu_times()
                total += times.user + times.system
        return total

    def _stored(self) -> int:
        with suppress(AttributeError, psutil.Error):  # not on every system
            counters = self._process.io_counters()
            return int(counters.read_bytes + counters.write_bytes)
        return 0


@contextmanager
def watched(team: Team, seconds: float) -> Iterator[Watchdog | None]:
    """Run the watchdog: a process that hangs is ended, by itself or by another; with 0 seconds nobody is watched."""
    if not seconds or not dist.is_initialized():
        yield None
        return
    store = _get_default_store().clone()  # type: ignore[attr-defined]  # a connection of its own; stubs lack it
    watch = Watchdog(team, store, seconds)
    folder = last_words.own_folder()  # stacks are for the launching process, else for all to see
    everyone = nullcontext(sys.__stderr__ or sys.stderr)
    with everyone if folder is None else (folder / STACK.format(rank=team.rank)).open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()
            faulthandler.unregister(signal.SIGUSR2)


def _is_sibling(process: int) -> bool:
    """Whether a process was started by the agent that started this one."""
    with suppress(psutil.Error):
        return psutil.Process(process).ppid() == os.getppid()
    return False


def _stack_of(rank: int, process: int) -> list[str]:
    """The Python stack of another process, written by its signal handler even if it cannot do anything else."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGUSR2)
        os.kill(process, signal.SIGCONT)  # a stopped process answers no signal
    folder = last_words.own_folder()
    if folder is None:
        return []
    path, deadline = folder / STACK.format(rank=rank), time.monotonic() + STACK_SECONDS
    written, before = 0, -1
    while time.monotonic() < deadline and not 0 < written == before:  # it comes thread by thread
        time.sleep(0.2)
        written, before = path.stat().st_size if path.exists() else 0, written
    threads = path.read_text().split("\n\n") if path.exists() else []
    return threads[-1].splitlines()[1:] if threads else []  # the last one is the main thread


def _waits_for_others() -> bool:
    """Whether some thread of this process is in an exchange with other processes."""
    modules = [frame.f_globals.get("__name__", "") for frame in sys._current_frames().values()]
    return any(str(name).startswith(EXCHANGES) for name in modules)
