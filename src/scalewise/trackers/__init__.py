"""Experiment trackers that also receive a run's numbers, when asked with `--track`: interchangeable siblings.

Each writes into the run's folder, unless the user has configured it otherwise, and reaches no network by itself. What
arrives is what metrics.jsonl holds: a resumed run reports everything again from the start, into a fresh place.
May import: records and errors; the tracker's own library when it is used.
Public: `tracking`, `TrackerName`; a tracker is a module with `track(run)`, a context that yields a `Report`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from scalewise.records import Failure, Record, line, read

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Report = Callable[[int, Mapping[str, float]], None]  # (step, numbers by name)
Track = Callable[[Path], contextlib.AbstractContextManager[Report]]


@contextlib.contextmanager
def tracking(names: Sequence[TrackerName], metrics: Path, step: int) -> Iterator[Callable[[Record], None]]:
    """A function that reports every record to the trackers; what a run has stored up to `step` is reported first.

    Arguments:
        names: which trackers.
        metrics: the run's metrics.jsonl.
        step: the last one that is done, from which a resumed run continues.
    """
    with contextlib.ExitStack() as open_trackers:
        reports: list[Report] = []
        for name in names:
            track: Track = importlib.import_module(f"scalewise.trackers.{name}").track
            reports.append(open_trackers.enter_context(track(metrics.parent)))

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
