"""What is sent to the processes that try worker batches, and what they note."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from scalewise.engine.placement import Placement
from scalewise.recipe import Recipe
from scalewise.tasks.task import Origin

JOB = "job.pickle"


@dataclass(frozen=True)
class Job:
    """What to try.

    task: where to load it from, or the pickled task.
    recipe, placement, processes: as they are to be trained; the recipe is complete.
    allowed: bytes that each process may hold of its own.
    batch: samples at once through the model; None begins with the fewest and doubles them until the growth is known.
    most: the most samples of interest.
    """

    task: Origin | bytes
    recipe: Recipe
    placement: Placement
    processes: int
    allowed: int
    batch: int | None
    most: int


@dataclass(frozen=True)
class Parts:
    """Bytes that a process needs whatever the worker batch, by counting, and those that backward keeps per sample."""

    weights: int
    gradients: int
    optimizer: int
    saved_per_sample: float


@dataclass(frozen=True)
class Note:
    """What a process tells of its trial.

    ended: "running", "done", "out of memory" or "failed"; with `message` and `exit_code` when failed.
    baseline: bytes of its own that it held before training: Python, torch and the task's data.
    points: samples at once, and the peak above the baseline that they took.
    smallest: the fewest samples that can go through the model at once.
    parts: after a trace.
    """

    ended: str = "running"
    baseline: int = 0
    points: list[list[int]] = field(default_factory=list)
    smallest: int = 1
    parts: Parts | None = None
    message: str = ""
    exit_code: int = 0
    lost_contact: bool = False


def notes_in(folder: Path) -> dict[int, Note]:
    """The notes by process."""
    return {int(path.stem.split("-")[1]): _note(path) for path in folder.glob("note-*.json")}


def _note(path: Path) -> Note:
    fields = json.loads(path.read_text())
    parts = fields.pop("parts")
    return Note(**fields, parts=Parts(**parts) if parts else None)
