"""Experiment trackers that also receive a run's numbers, when asked with `--track`.

Each writes into the run's folder, unless the user has configured it otherwise, and reaches no network by itself. What
arrives is what metrics.jsonl holds: a resumed run reports everything again from the start, into an empty folder.
May import: records and errors; the tracker's own library when it is used.
Public: `tracking`, `TrackerName`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from scalewise.records import Failure, Record, line, read

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Report = Callable[[int, Mapping[str, float]], None]  # (step, numbers by name)

MLFLOW_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
MLFLOW_BATCH = 500  # numbers that are written together: a store takes a thousand
WANDB_QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


@contextlib.contextmanager
def tracking(names: Sequence[TrackerName], metrics: Path, step: int) -> Iterator[Callable[[Record], None]]:
    """A function that reports every record to the trackers; what a run has stored up to `step` is reported first.

    `metrics` is the run's metrics.jsonl, and `step` the last one that is done, from which a resumed run continues.
    """
    with contextlib.ExitStack() as open_trackers:
        reports: list[Report] = []
        for name in names:
            shutil.rmtree(metrics.parent / name, ignore_errors=True)
            reports.append(open_trackers.enter_context(TRACKERS[name](metrics.parent)))

        def report_all(stored: Mapping[str, object]) -> None:
            for report in reports:
                report(*numbers(stored))

        for stored in read(metrics) if names and metrics.exists() else ():
            if stored["kind"] not in (Failure.kind, "result") and stored["step"] <= step:
                report_all(stored)
        yield lambda record: report_all(json.loads(line(record))) if reports else None


def numbers(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a stored record, and every number in it by its path.

    >>> numbers({"kind": "epoch", "step": 7, "train": {"loss": 0.5}, "best": True, "validation": None})
    (7, {'epoch/train/loss': 0.5, 'epoch/best': 1.0})
    """
    content = {key: value for key, value in record.items() if key not in ("kind", "step")}
    return int(record.get("step", record.get("steps", 0))), dict(_flat(record["kind"], content))


def _flat(path: str, value: Any) -> Iterator[tuple[str, float]]:  # noqa: ANN401  (any JSON value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{path}/{key}", item)
    elif isinstance(value, bool | int | float):
        yield path, float(value)


@contextlib.contextmanager
def _tensorboard(run: Path) -> Iterator[Report]:
    """Event files, with numbers as precise as they are stored; `tensorboard --logdir runs` shows all runs."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run / "tensorboard")

    def report(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    try:
        yield report
    finally:
        writer.close()


@contextlib.contextmanager
def _trackio(run: Path) -> Iterator[Report]:
    """A SQLite file with the project `scalewise`, unless TRACKIO_DIR names another one; `trackio show` draws it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRACKIO_DIR", str((run / "trackio").resolve()))
    import trackio

    open_run = trackio.init("scalewise", name=run.name, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    try:
        yield lambda step, values: open_run.log(dict(values), step=step)
    finally:
        trackio.finish()


@contextlib.contextmanager
def _wandb(run: Path) -> Iterator[Report]:
    """Weights & Biases, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

    One row a step: records of the same step share it.
    """
    for name, value in WANDB_QUIET.items():
        os.environ.setdefault(name, value)
    import wandb

    settings = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
    project = os.environ.get("WANDB_PROJECT", "scalewise")
    with wandb.init(project=project, name=run.name, dir=str(run), settings=settings) as open_run:
        yield lambda step, values: open_run.log(dict(values), step=step)


@contextlib.contextmanager
def _mlflow(run: Path) -> Iterator[Report]:
    """A SQLite file with the experiment `scalewise`, unless MLFLOW_TRACKING_URI names another store.

    An earlier MLflow run of the same folder is deleted.
    """
    os.environ |= MLFLOW_QUIET
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    store = os.environ.get("MLFLOW_TRACKING_URI")
    if store is None:
        folder = run / "mlflow"
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
        if len(waiting) >= MLFLOW_BATCH:
            flush()

    def flush() -> None:
        client.log_batch(begun, metrics=waiting)
        waiting.clear()

    try:
        yield report
    finally:
        flush()
        client.set_terminated(begun)


TRACKERS: dict[TrackerName, Callable[[Path], contextlib.AbstractContextManager[Report]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
