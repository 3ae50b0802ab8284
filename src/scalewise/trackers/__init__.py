"""Experiment trackers that a run also tells its numbers to, when asked with `--track`: interchangeable siblings.

Each writes into the run's folder, unless the person has configured it otherwise, and reaches no network by itself. What
arrives is what metrics.jsonl holds: a resumed run tells everything again from the start, into a fresh place.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from scalewise.records import Failure, Record, line, read
from scalewise.trackers.numbers import numbers

TrackerName = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Tell = Callable[[int, Mapping[str, float]], None]  # (step, numbers by name)
Track = Callable[[Path], contextlib.AbstractContextManager[Tell]]


@contextlib.contextmanager
def tracking(names: Sequence[TrackerName], metrics: Path, step: int) -> Iterator[Callable[[Record], None]]:
    """A function that tells every record to the trackers; what a run has stored up to `step` is told first.

    Arguments:
        names: which trackers.
        metrics: the run's metrics.jsonl.
        step: the last one that is done, from which a resumed run goes on.
    """
    with contextlib.ExitStack() as open_trackers:
        tellers: list[Tell] = []
        for name in names:
            track: Track = importlib.import_module(f"scalewise.trackers.{name}").track
            tellers.append(open_trackers.enter_context(track(metrics.parent)))

        def tell(stored: Mapping[str, object]) -> None:
            for teller in tellers:
                teller(*numbers(stored))

        for stored in read(metrics) if names and metrics.exists() else ():
            if stored["kind"] not in (Failure.kind, "result") and stored["step"] <= step:
                tell(stored)
        yield lambda record: tell(json.loads(line(record))) if tellers else None
