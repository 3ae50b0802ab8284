"""What the processes of a comparison do: they load the task once per settings and train its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scalewise.compare.jobs import Failure, Job, Message, Outcome, Setup, Stopped
from scalewise.engine.pool import Stop
from scalewise.errors import ScalewiseError

if TYPE_CHECKING:
    from scalewise.tasks.task import Task


@dataclass(frozen=True)
class Comparing:
    """The work of a comparison's pool."""

    setup: Setup
    tasks: dict[tuple[str, ...], Task] = field(default_factory=dict)  # by settings, filled in each process

    @property
    def folder(self) -> Path:
        """Where the processes' logs go."""
        return self.setup.folder

    def perform(self, job: Job, send: Callable[[Message], None], stop: Stop) -> Outcome | Stopped:
        """Train, go on with or read one run."""
        from scalewise.compare.runs import perform
        from scalewise.tasks.load import load_task

        settings = job.line.plan.settings
        try:
            if settings not in self.tasks:
                self.tasks[settings] = load_task(self.setup.task_spec, settings, self.setup.data)
        except ScalewiseError as error:
            return Outcome(job, None, None, Failure(str(error), error.exit_code, False), [])
        return perform(job, self.tasks[settings], self.setup, send, stop)

    def died(self, job: Job, reason: str) -> Outcome:
        """A failed run."""
        return Outcome(job, None, None, Failure(reason, 1, False), [])

    def stopped(self, job: Job) -> Stopped:
        """A run to go on with."""
        return Stopped(job)
