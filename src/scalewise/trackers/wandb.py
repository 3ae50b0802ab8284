"""Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` uploads what is in the run's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.trackers import Report

QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


@contextlib.contextmanager
def track(run: Path) -> Iterator[Report]:
    """Write an offline run, one row a step; records of the same step share it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import wandb

    shutil.rmtree(run / "wandb", ignore_errors=True)
    settings = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
    project = os.environ.get("WANDB_PROJECT", "scalewise")
    with wandb.init(project=project, name=run.name, dir=str(run), settings=settings) as open_run:
        yield lambda step, values: open_run.log(dict(values), step=step)
