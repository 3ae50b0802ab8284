"""This process's workers in turns, where layers need numbers of all workers in the middle of a pass.

Every worker runs in a thread of its own, but only one at a time: a worker that needs the numbers of all workers stores
its own, passes the turn on, and continues when all have stored theirs. So each worker computes alone, at its fixed
shape and with its own random numbers, and the bytes do not depend on the number of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from scalewise.engine.data import streams
from scalewise.engine.processes.team import Team
from scalewise.errors import PlacementError, TaskError

Result = TypeVar("Result")


class _Abandoned(Exception):
    """Another worker failed."""


def check_lockstep(device: torch.device, workers_here: int) -> None:
    """Refuse devices whose backward passes share one thread: the first worker to wait in it would stop them all."""
    if device.type != "cpu" and workers_here > 1:
        raise PlacementError(
            f"--batch-norm sync needs one worker per process on {device.type}, got {workers_here}; raise --processes "
            f"to the number of workers, or use --device cpu or --batch-norm worker"
        )


class Lockstep:
    """The workers of this process, which wait for each other wherever one calls `exchange`."""

    def __init__(self, team: Team, counts: list[int]) -> None:
        self._team, self._counts = team, counts
        self._here = counts[team.rank]
        self._numbers: list[Tensor | None] = [None] * self._here
        self._gathered: Tensor | None = None
        self._turn = 0
        self._changed = threading.Condition()
        self._own = threading.local()
        self._ended: list[int] = []
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Call one function per worker, in lockstep; what they return, in order."""
        assert len(functions) == self._here
        results: dict[int, Result] = {}
        self._turn, self._error, self._ended = 0, None, []
        threads_each = torch.get_num_threads()

        def work(place: int) -> None:
            self._own.place = place
            torch.set_num_threads(threads_each)  # OpenMP's setting belongs to a thread
            try:
                self._wait_for_turn()
                results[place] = functions[place]()
                self._ended.append(place)
            except _Abandoned:
                pass
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._pass_on()

        with streams.undisturbed():
            threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(self._here)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        return [results[place] for place in range(self._here)]

    def exchange(self, numbers: Tensor) -> tuple[Tensor, bool]:
        """The numbers of all workers, (worker, number), and whether the caller is this process's first worker."""
        place: int = self._own.place
        if self._ended:
            raise TaskError(
                "batch norm over all workers needs every worker to pass the same layers, one passed fewer; use "
                "--batch-norm worker with a model whose layers depend on its input"
            )
        self._numbers[place] = numbers.detach()
        if place == self._here - 1:
            rows = torch.stack([row for row in self._numbers if row is not None])
            self._gathered = self._team.gather_rows(rows, self._counts).wait() if self._team.size > 1 else rows
        random_numbers = streams.random_state()
        self._pass_on()
        self._wait_for_turn()
        streams.set_random_state(random_numbers)
        assert self._gathered is not None
        return self._gathered, place == 0

    def _pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._here
            self._changed.notify_all()

    def _wait_for_turn(self) -> None:
        place: int = self._own.place
        with self._changed:
            self._changed.wait_for(lambda: self._turn == place or self._error is not None)
        if self._error is not None:
            raise _Abandoned
