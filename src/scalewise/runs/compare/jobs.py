"""What is sent between the command and the processes that train: jobs there, progress and outcomes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalewise.engine.placement import DeviceName
from scalewise.recipe import Recipe
from scalewise.runs.compare.rows import Line


@dataclass(frozen=True)
class Setup:
    """What all jobs of a comparison share: the task and its data, the folder, and where they run."""

    task_spec: str
    data: Path | None
    folder: Path
    hold_out: bool
    device: DeviceName
    loaders: int | None


@dataclass(frozen=True)
class Job:
    """One run: a line of the table with a seed and a multiple of its learning rate."""

    line: Line
    seed: int
    multiple: float = 1.0
    trial: bool = False

    @property
    def name(self) -> str:
        """The name of its folder."""
        base = f"{self.line.name}-{self.line.workers}w"
        return f"tune-{base}-x{self.multiple:.3g}" if self.trial else f"{base}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Its name for people."""
        workers = f"{self.line.workers} worker{'' if self.line.workers == 1 else 's'}"
        what = f"learning rate × {self.multiple:.3g}" if self.trial else f"seed {self.seed}"
        return f"{self.line.name}, {workers}, {what}"


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    job: Job
    step: int
    steps: int


@dataclass(frozen=True)
class Failure:
    """Why a run has no result; `diverged` when its loss or weights became infinite, which it would do again."""

    reason: str
    exit_code: int
    diverged: bool


@dataclass(frozen=True)
class Outcome:
    """The end of a job: what `train --json` would print, or a failure.

    `recipe` holds the resolved recipe where it came that far; `curve` the task's metric by epoch.
    """

    job: Job
    recipe: Recipe | None
    result: dict[str, Any] | None
    failure: Failure | None
    curve: list[tuple[float, float, float | None]]  # (epoch, training metric, validation metric)
    stored: bool = False  # whether it was stored before


@dataclass(frozen=True)
class Stopped:
    """A job that a signal stopped; its state is saved."""

    job: Job


Message = Progress | Outcome | Stopped


@dataclass(frozen=True)
class Phase:
    """Some jobs are about to be done."""

    title: str
    jobs: list[Job]


def unfollowed(known: object, event: object) -> None:
    """Report nothing."""
