"""Reading as phases: samples that note how long they took to fetch, here or in a loader process.

A loader process has its own memory, so it appends what it noted to a file of its own, batch by batch.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from scalewise.engine.data.samples import Augmented, DatasetSamples, Samples, Subset
from scalewise.runs.profile.spans import Label, Recorder, Segment, segments
from scalewise.tasks.task import Batch

READ, TO_MEMORY, PREPROCESS = Label("read"), Label("transport to memory"), Label("preprocess")


class TimedSamples:
    """The same samples, with a span around each part of a fetch."""

    def __init__(self, samples: Samples, recorder: Recorder, folder: Path) -> None:
        """Files of loader processes go to `folder`."""
        self.in_memory = samples.in_memory
        self._samples = timed(samples, recorder)
        self._recorder, self._folder = recorder, folder
        self._owner = self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._samples)

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """The samples; what was noted in a loader process is written down there."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._recorder.forget()
        loads = self._process != self._owner
        if not loads:
            self._recorder.own_lane("beside")  # where it is not the thread of the step
        batch = self._samples.fetch(indices, epochs)
        if loads:
            _write(self._folder / f"{self._process}.jsonl", segments(self._recorder.take()[0].events))
        return batch

    def describe(self, index: int) -> str:
        """A sample, for people."""
        return self._samples.describe(index)


def timed(samples: Samples, recorder: Recorder) -> Samples:
    """Samples whose reading, collating and augmenting are spans: the same code, with its parts wrapped."""
    samples = copy.copy(samples)
    if isinstance(samples, Augmented):
        samples.samples = timed(samples.samples, recorder)
        samples._augment = recorder.around(PREPROCESS, samples._augment)
    elif isinstance(samples, Subset):
        samples.samples = timed(samples.samples, recorder)
    elif isinstance(samples, DatasetSamples):
        samples.dataset = _TimedDataset(samples.dataset, recorder)
        samples.fetch = recorder.around(TO_MEMORY, samples.fetch)  # type: ignore[method-assign]
    else:
        samples.fetch = recorder.around(READ, samples.fetch)  # type: ignore[method-assign]
    return samples


class _TimedDataset:
    """A user's data set with a span around `__getitem__`."""

    def __init__(self, dataset: Any, recorder: Recorder) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._get = recorder.around(READ, dataset.__getitem__)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self._get(index)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (whatever else it offers, as `describe`)
        return getattr(self._dataset, name)


@dataclass(frozen=True)
class Loader:
    """A loader process and what it did when, batch by batch."""

    number: int
    batches: list[list[Segment]]

    def between(self, start: float, stop: float) -> Iterator[Segment]:
        """What it did in a stretch of time, cut off at its ends."""
        for piece in (piece for batch in self.batches for piece in batch):
            if piece.start < stop and piece.stop > start:
                yield Segment(piece.label, max(piece.start, start), min(piece.stop, stop))


def read_loaders(folder: Path) -> list[Loader]:
    """All loader processes that wrote into the folder, by process number."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    return [Loader(number, list(_read(file))) for number, file in enumerate(files)]


def _write(file: Path, found: list[Segment]) -> None:
    rows = [[piece.label.phase, piece.start, piece.stop] for piece in found]
    with file.open("a") as out:
        out.write(json.dumps(rows) + "\n")


def _read(file: Path) -> Iterator[list[Segment]]:
    for line in file.read_text().splitlines():
        if line.endswith("]]"):  # else its process ended while it wrote
            yield [Segment(Label(phase), start, stop) for phase, start, stop in json.loads(line)]
