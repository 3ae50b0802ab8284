"""What arrives at a tracker is what metrics.jsonl holds, also after a resume; nothing leaves the machine."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from scalewise.records import read
from scalewise.trackers import numbers

Points = dict[tuple[str, int], list[float]]


def stored(run: Path) -> Points:
    """Every number of metrics.jsonl, once."""
    points: Points = defaultdict(list)
    for record in read(run / "metrics.jsonl"):
        step, values = numbers(record)
        for name, value in values.items():
            points[name, step].append(value)
    return points


def tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    points: Points = defaultdict(list)
    for path in sorted((run / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                points[value.tag, event.step].append(float(make_ndarray(value.tensor)))
    return points


def mlflow(run: Path) -> Points:
    points: Points = defaultdict(list)
    with sqlite3.connect(run / "mlflow" / "mlflow.db") as store:
        for name, step, value in store.execute(
            "select key, step, value from metrics natural join runs where lifecycle_stage = 'active'"
        ):
            points[name, step].append(value)
    return points


def trackio(run: Path) -> Points:
    points: Points = defaultdict(list)
    with sqlite3.connect(run / "trackio" / "scalewise.db") as store:
        for step, values in store.execute("select step, metrics from metrics"):
            for name, value in json.loads(values).items():
                points[name, step].append(value)
    return points


def wandb(run: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    points: Points = defaultdict(list)
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    store = DataStore()
    store.open_for_scan(str(path))
    while data := store.scan_data():
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                points[name, record.history.step.num].append(json.loads(item.value_json))
    return points


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "trackio": trackio,
    "wandb": wandb,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_everything_arrives_once_also_after_a_resume(scalewise, tmp_path):
    trackers = [word for name in READERS for word in ("--track", name)]
    words = ("train", "linear", "--workers", 2, "--processes", 1, "--quiet", *trackers)
    assert scalewise(*words, "--steps", 5, "--out", "run").code == 0
    outcome = scalewise(*words, "--steps", 8, "--resume", "run")
    assert outcome.code == 0, outcome.stderr
    run = tmp_path / "run"
    expected = stored(run)
    assert max(step for _, step in expected) == 8
    assert all(len(values) == 1 for values in expected.values())
    for name, reader in READERS.items():
        assert reader(run) == expected, name


def test_an_unknown_tracker_is_refused(scalewise_here):
    outcome = scalewise_here("train", "linear", "--track", "paper")
    assert outcome.code == 2
    assert "tensorboard" in outcome.stderr
