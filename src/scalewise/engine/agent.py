"""torch's elastic agent for the processes of one machine: it restarts what may end better, and says so."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from scalewise.engine import outcomes, pulse
from scalewise.engine.nursery import Nursery, starting_from
from scalewise.errors import ProcessFailed

POLL_SECONDS = 0.05
SUCCESS = (0, 3)


@dataclass(frozen=True)
class Elasticity:
    """What to do about processes that die.

    Arguments:
        max_restarts: how often processes are started again.
        min_processes: with how few the run may go on; None for as many as it began with.
        survivor_seconds: how long those that live may take to come to the end of their step and save its state.
        say: tells the person.
    """

    max_restarts: int = 0
    min_processes: int | None = None
    survivor_seconds: float = 20.0
    say: Callable[[str], None] = lambda line: None


class Agent(LocalElasticAgent):
    """The agent of one machine, whose processes leave their outcomes in a folder.

    When one dies, the others are told, and may save the state of their last whole step before they are ended.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: DefaultLogsSpecs,
        folder: Path,
        elasticity: Elasticity,
        nursery: Nursery | None = None,
    ) -> None:
        super().__init__(spec, logs)
        self._folder, self._elasticity, self._nursery = folder, elasticity, nursery
        self._fruitless = 0  # starts in a row that ended without a new step
        self._last_step = 0
        self._ended: set[int] = set()  # survivors that took too long

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        outcomes.clear(self._folder)
        self._ended.clear()
        with starting_from(self._nursery):
            started: dict[int, int] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        if any(_codes(self._pcontext).values()):
            self._end_survivors(self._pcontext)
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        if outcomes.read(self._folder).get(0, {}).get("exit_code") in SUCCESS:  # all is written and said
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        self._decide(self.codes(result))
        return result

    def codes(self, result: RunResult) -> dict[int, int]:
        """The exit codes of the processes that failed by themselves."""
        return {rank: failure.exitcode for rank, failure in result.failures.items() if rank not in self._ended}

    def _end_survivors(self, processes: SubprocessContext) -> None:
        """Tell them that one has died, and wait until they have saved what they have."""
        outcomes.break_off(self._folder)
        deadline = time.monotonic() + self._elasticity.survivor_seconds
        while self._saves(processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for rank, handler in processes.subprocess_handlers.items():
            if handler.proc.poll() is None:
                handler.proc.send_signal(signal.SIGKILL)
                self._ended.add(rank)

    def _saves(self, processes: SubprocessContext) -> bool:
        """Whether there is a process that trains and has not ended."""
        ended = _codes(processes)
        return any(beat.trains and rank not in ended for rank, beat in pulse.beats(self._folder).items())

    def _decide(self, codes: dict[int, int]) -> None:
        """Whether to start again, and with how many processes."""
        if not isinstance(outcomes.reason(self._folder, codes, ""), ProcessFailed):  # it would end in the same way
            self._remaining_restarts = 0
        if self._remaining_restarts == 0:
            return
        step = max((beat.step for beat in pulse.beats(self._folder).values()), default=0)
        self._fruitless = 0 if step > self._last_step else self._fruitless + 1
        self._last_step = max(step, self._last_step)
        spec = self._worker_group.spec
        least = self._elasticity.min_processes or spec.local_world_size
        if self._fruitless > 1 and spec.local_world_size > least:
            spec.local_world_size -= 1
        number = spec.max_restarts - self._remaining_restarts + 1
        several = "processes" if spec.local_world_size > 1 else "process"
        then = f"restart {number} of at most {spec.max_restarts}, on {spec.local_world_size} {several}"
        self._elasticity.say(str(outcomes.reason(self._folder, codes, then)))


def _codes(processes: PContext) -> dict[int, int]:
    """Exit codes of the processes that have ended, by number."""
    assert isinstance(processes, SubprocessContext)
    codes = {rank: handler.proc.poll() for rank, handler in processes.subprocess_handlers.items()}
    return {rank: code for rank, code in codes.items() if code is not None}
