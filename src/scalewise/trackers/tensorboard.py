"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.trackers import Report


@contextlib.contextmanager
def track(run: Path) -> Iterator[Report]:
    """Write event files, with numbers as precise as they are stored."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    writer = SummaryWriter(folder)

    def report(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    try:
        yield report
    finally:
        writer.close()
