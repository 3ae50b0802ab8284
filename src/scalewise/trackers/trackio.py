"""Trackio: a SQLite file in the run's folder, unless TRACKIO_DIR names another one; `trackio show` draws it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.trackers import Report


@contextlib.contextmanager
def track(run: Path) -> Iterator[Report]:
    """Write a run of the project `scalewise`."""
    shutil.rmtree(run / "trackio", ignore_errors=True)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRACKIO_DIR", str((run / "trackio").resolve()))
    import trackio

    open_run = trackio.init("scalewise", name=run.name, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    try:
        yield lambda step, values: open_run.log(dict(values), step=step)
    finally:
        trackio.finish()
