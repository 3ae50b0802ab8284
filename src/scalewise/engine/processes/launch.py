"""Several processes on this machine, through torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from scalewise.engine.placement import DeviceName
from scalewise.engine.processes import heartbeat, last_words
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.fork_server import ForkServer, forking_from, set_name
from scalewise.engine.processes.heartbeat import FILE, HEARTBEAT, disconnect
from scalewise.engine.processes.last_words import FOLDER, LAUNCHER
from scalewise.engine.processes.team import Team, joined
from scalewise.errors import Failed, LostContact, ProcessFailed, ScalewiseError

PROCESS = "scalewise-{rank}"  # its name, where processes are listed
HOST = "127.0.0.1"
WATCH_SECONDS = 0.2
MONITOR_SECONDS = 0.1
POLL_SECONDS = 0.05
SUCCESS = (0, 3)
RESUME = "continue from the last checkpoint with --resume"


@dataclass(frozen=True)
class Elasticity:
    """What to do about processes that die."""

    max_restarts: int = 0
    min_processes: int | None = None  # the fewest to continue with; None for all
    emergency_seconds: float = 20.0  # for the others to finish their step and save an emergency checkpoint
    say: Callable[[str], None] = lambda line: None  # shows a line to the user


def launch(
    processes: int,
    arguments: Sequence[str],
    threads: int,
    elasticity: Elasticity,
    fork_server: ForkServer | None,
) -> int:
    """Run `scalewise …` in several processes that take part in one job; returns the exit code.

    `arguments` are the command line without the program's name. Processes that are forked from a `fork_server` need
    not import torch again.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable(logging.ERROR)  # the agent's own words on children and signals; ours follow
    with tempfile.TemporaryDirectory(prefix="scalewise-") as name:
        folder = Path(name)
        os.environ[FOLDER] = name
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            return _run(processes, arguments, folder, elasticity, fork_server)
        finally:
            del os.environ[FOLDER], os.environ[LAUNCHER]


def _run(
    processes: int, arguments: Sequence[str], folder: Path, elasticity: Elasticity, fork_server: ForkServer | None
) -> int:
    parameters = RendezvousParameters("c10d", f"{HOST}:0", folder.name, 1, 1, local_addr=HOST)
    spec = WorkerSpec(
        role="scalewise",
        local_world_size=processes,
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        args=("-m", "scalewise", *arguments),
        max_restarts=elasticity.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr=HOST,
    )
    # only the first process prints; what the others print is kept for when one of them dies
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=dict.fromkeys(range(1, processes), Std.ERR))
    agent = Agent(spec, logs, folder, elasticity, fork_server)
    try:
        result = agent.run()
    except SignalException as error:
        report = last_words.read(folder).get(0, {})
        raise Failed(str(report.get("message", "stopped by a signal")), 128 + int(error.sigval)) from None
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        raise last_words.failure(folder, agent.codes(result), RESUME)
    if (folder / last_words.DOCUMENT).exists():
        print((folder / last_words.DOCUMENT).read_text(), file=sys.__stdout__, flush=True)
    return int(last_words.read(folder).get(0, {}).get("exit_code", 0))


@contextmanager
def taking_part(device: DeviceName) -> Iterator[Team]:
    """This process's team in the job it was started in.

    It ends with that job. If it fails, it leaves an exit report before the others notice that it is gone.
    """
    end_with_launcher()
    with joined(device) as team:
        try:
            with translating():
                yield team
        except ScalewiseError as error:
            last_words.leave_exit_report(error.exit_code, str(error), isinstance(error, LostContact))
            raise


def end_with_launcher() -> None:
    """End this process with its job.

    When the launching process is gone, this one ends at once, so that nobody writes into the run of a dead job. When
    another process has died, this one closes its connections, and ends as soon as its step fails.
    """
    if LAUNCHER not in os.environ:
        return
    if "RANK" in os.environ:
        set_name(PROCESS.format(rank=os.environ["RANK"]))
    folder = last_words.own_folder()
    if folder is not None:
        HEARTBEAT.share(folder / FILE.format(rank=os.environ["RANK"]))
    threading.Thread(target=_watch, args=(int(os.environ[LAUNCHER]), folder), daemon=True).start()


def _watch(launcher: int, folder: Path | None) -> None:
    broken = None if folder is None else folder / last_words.BROKEN
    while os.getppid() == launcher:
        if broken is not None and broken.exists():
            if not HEARTBEAT.last.trains:
                os._exit(1)
            disconnect("it has died")
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


class Agent(LocalElasticAgent):
    """The agent of one machine, whose processes leave their exit reports in a folder.

    When one dies, the others may save an emergency checkpoint of their last whole step before they are ended.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        folder: Path,
        elasticity: Elasticity,
        fork_server: ForkServer | None,
    ) -> None:
        super().__init__(spec, logs)
        self._folder, self._elasticity, self._fork_server = folder, elasticity, fork_server
        self._fruitless = 0  # starts in a row that ended without a new step
        self._last_step = 0
        self._ended: set[int] = set()  # those that took too long to save

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        last_words.clear(self._folder)
        self._ended.clear()
        with forking_from(self._fork_server):
            started: dict[int, int] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        if any(_codes(self._pcontext).values()):
            self._end_others(self._pcontext)
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        if last_words.read(self._folder).get(0, {}).get("exit_code") in SUCCESS:  # all is written and said
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._decide(self.codes(result))
        return result

    def codes(self, result: RunResult) -> dict[int, int]:
        """The exit codes of the processes that failed by themselves."""
        return {rank: failure.exitcode for rank, failure in result.failures.items() if rank not in self._ended}

    def _end_others(self, processes: SubprocessContext) -> None:
        """Signal the other processes that one has died, and wait until they have saved an emergency checkpoint."""
        (self._folder / last_words.BROKEN).touch()
        deadline = time.monotonic() + self._elasticity.emergency_seconds
        while time.monotonic() < deadline:
            ended, last_heartbeats = _codes(processes), heartbeat.heartbeats(self._folder)
            if not any(last.trains and rank not in ended for rank, last in last_heartbeats.items()):
                break
            time.sleep(POLL_SECONDS)
        for rank, handler in processes.subprocess_handlers.items():
            if handler.proc.poll() is None:
                handler.proc.send_signal(signal.SIGKILL)
                self._ended.add(rank)

    def _decide(self, codes: dict[int, int]) -> None:
        """Whether to start again, and with how many processes."""
        if not isinstance(last_words.failure(self._folder, codes, ""), ProcessFailed):  # it would end in the same way
            self._remaining_restarts = 0
        if self._remaining_restarts == 0:
            return
        step = max((last.step for last in heartbeat.heartbeats(self._folder).values()), default=0)
        self._fruitless = 0 if step > self._last_step else self._fruitless + 1
        self._last_step = max(step, self._last_step)
        spec = self._worker_group.spec
        least = self._elasticity.min_processes or spec.local_world_size
        if self._fruitless > 1 and spec.local_world_size > least:
            spec.local_world_size -= 1
        number = spec.max_restarts - self._remaining_restarts + 1
        several = "processes" if spec.local_world_size > 1 else "process"
        then = f"restart {number} of at most {spec.max_restarts}, on {spec.local_world_size} {several}"
        self._elasticity.say(str(last_words.failure(self._folder, codes, then)))


def _codes(processes: PContext) -> dict[int, int]:
    """Exit codes of the processes that have ended, by number."""
    assert isinstance(processes, SubprocessContext)
    codes = {rank: handler.proc.poll() for rank, handler in processes.subprocess_handlers.items()}
    return {rank: code for rank, code in codes.items() if code is not None}
