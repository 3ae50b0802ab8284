"""The models and data that are measured."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from scalewise import Task, load_task


@dataclass(frozen=True)
class Case:
    """A task and how many samples one worker gets per step."""

    task: str
    worker_batch: int

    @property
    def title(self) -> str:
        return f"{self.task} × {self.worker_batch}"

    def load(self, data: Path | None) -> Task:
        return _load(self.task, data)


# Augmentation is off: it is a scalewise function, and all contestants must do the same work.
SETTINGS = {"cifar10-small": ["augmented=false"]}

ONE_WORKER = [Case("fashion-mnist", 64), Case("fashion-mnist", 512), Case("cifar10-small", 64)]
LECTURE = Case("cifar10", 64)  # 482,442 parameters, without batch norm
TWO_PROCESSES = [*ONE_WORKER, LECTURE]
MANY_WORKERS = [Case("fashion-mnist", 256), Case("cifar10-small", 256), Case("cifar10", 256)]


@functools.cache
def _load(task: str, data: Path | None) -> Task:
    return load_task(task, SETTINGS.get(task, []), data=data)


def data_folder() -> Path | None:
    """`$SCALEWISE_DATA`, or the folder beside the repository that the tests use, or scalewise's usual places."""
    if os.environ.get("SCALEWISE_DATA"):
        return Path(os.environ["SCALEWISE_DATA"]).resolve()
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return beside if beside.is_dir() else None
