"""MLflow: a SQLite file in the run's folder, unless MLFLOW_TRACKING_URI names another store."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.trackers import Report

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
AT_ONCE = 500  # numbers that are written together: a store takes a thousand


@contextlib.contextmanager
def track(run: Path) -> Iterator[Report]:
    """Write a run of the experiment `scalewise`; one of the same folder from before is deleted."""
    os.environ |= QUIET
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    folder = run / "mlflow"
    shutil.rmtree(folder, ignore_errors=True)
    store = os.environ.get("MLFLOW_TRACKING_URI")
    if store is None:
        folder.mkdir()
        store = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("scalewise")
    number = experiment.experiment_id if experiment else client.create_experiment("scalewise")
    place = str(run.resolve())
    for earlier in client.search_runs([number], filter_string=f"tags.folder = '{place}'"):
        client.delete_run(earlier.info.run_id)
    begun = client.create_run(number, run_name=run.name, tags={"folder": place}).info.run_id
    waiting: list[Metric] = []

    def report(step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        waiting.extend(Metric(name, value, now, step) for name, value in values.items())
        if len(waiting) >= AT_ONCE:
            flush()

    def flush() -> None:
        client.log_batch(begun, metrics=waiting)
        waiting.clear()

    try:
        yield report
    finally:
        flush()
        client.set_terminated(begun)
