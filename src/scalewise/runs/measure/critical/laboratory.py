"""Where trials are done: a folder that remembers them, and the processes that train several at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from scalewise.engine.placement import slots
from scalewise.engine.processes import signals
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.pool import InProcess, Pool
from scalewise.engine.processes.signals import Stop
from scalewise.errors import Failed, Interrupted, ScalewiseError
from scalewise.runs.measure.critical.trials import Curve, Trial, follow, stored
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin, Task


@dataclass(frozen=True)
class Done:
    """A trial that has come to its end."""

    trial: Trial
    curve: Curve


@dataclass(frozen=True)
class Broken:
    """A trial that failed."""

    trial: Trial
    reason: str
    exit_code: int


@dataclass(frozen=True)
class Stopped:
    """A trial that a signal stopped; its state is saved."""

    trial: Trial


Message = Done | Broken | Stopped


@dataclass(frozen=True)
class Trying:
    """The work of the processes: each loads the task once."""

    origin: Origin | None
    folder: Path
    tasks: list[Task] = field(default_factory=list)

    def perform(self, trial: Trial, send: Callable[[Message], None], stop: Stop) -> Message:
        """Train or resume one trial; failures are messages too."""
        try:
            return Done(trial, follow(self._task(), trial, self.folder, stop))
        except Interrupted:
            return Stopped(trial)
        except ScalewiseError as error:
            return Broken(trial, str(error), error.exit_code)
        except Exception as error:
            known = translated(error)
            return Broken(trial, str(known), known.exit_code)

    def died(self, trial: Trial, reason: str) -> Broken:
        """A failed trial."""
        return Broken(trial, reason, 1)

    def stopped(self, trial: Trial) -> Stopped:
        """A trial to resume."""
        return Stopped(trial)

    def _task(self) -> Task:
        if not self.tasks:
            assert self.origin is not None
            self.tasks.append(load_task(self.origin.spec, self.origin.settings, self.origin.data))
        return self.tasks[0]


class Laboratory:
    """A folder of trials, and the processes that do them.

    Processes must know where to load the task from: trials of a task without an origin are done here, one by one.
    """

    def __init__(self, task: Task, folder: Path, jobs: int | None) -> None:
        self._folder = folder / "trials"
        self._folder.mkdir(parents=True, exist_ok=True)
        size = jobs or slots("auto")
        self._pool: Pool[Trial, Message] | InProcess[Trial, Message]
        if task.origin is None or size == 1:
            self._pool = InProcess(Trying(task.origin, self._folder, [task]))
        else:
            self._pool = Pool(size, Trying(task.origin, self._folder))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._pool)
        self._stack.enter_context(signals.stopping(self._pool.stop))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def curves(self, trials: Sequence[Trial]) -> list[Curve]:
        """The curves of some trials, in their order: read where they are stored, else trained."""
        found = {trial.name: stored(trial, self._folder) for trial in trials}
        for message in self._pool.run([trial for trial in trials if found[trial.name] is None]):
            if isinstance(message, Broken):
                raise Failed(f"trial {message.trial.name}: {message.reason}", message.exit_code)
            if isinstance(message, Done):
                found[message.trial.name] = message.curve
        if self._pool.stopping:
            raise Interrupted(
                f"{signals.name(self._pool.stopping)} stopped the measurement; its trials are saved in "
                f"{self._folder.parent}, the same command with that folder continues",
                self._pool.stopping,
            )
        curves = [found[trial.name] for trial in trials]
        return [curve for curve in curves if curve is not None]
