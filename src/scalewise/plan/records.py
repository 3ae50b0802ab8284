"""What a plan can use of earlier work: measurements, trained runs and link profiles, read from their folders."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalewise import records
from scalewise.errors import RunFolderError, ScalewiseError
from scalewise.files import read_json
from scalewise.plan.hardware import Link, load_link
from scalewise.recipe import Recipe
from scalewise.stats.critical_batch import CriticalBatch, from_noise
from scalewise.stats.interval import Interval
from scalewise.stats.steps_law import Law, fit_law

MEASURED, RECIPE = "measure.json", "recipe.json"
WAITING = 0.2  # share of its steps' time that a run waits for input, from which on reading limits it


class OtherTask(RunFolderError):
    """Records of another task."""


@dataclass(frozen=True)
class TaskFacts:
    """What a plan needs to know of a task."""

    name: str
    spec: str
    settings: tuple[str, ...]
    samples: int
    parameter_bytes: int
    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class MemoryLine:
    """What a process holds at most: fixed + per_sample × samples that go through the model at once, in bytes."""

    fixed: float
    per_sample: float

    def peak(self, samples: int) -> float:
        """The bytes of so many samples."""
        return self.fixed + self.per_sample * samples

    def largest(self, room: float) -> float:
        """The samples with which the peak just fits; infinite where they need nothing.

        >>> MemoryLine(1_000.0, 10.0).largest(1_325)
        32.5
        """
        return (room - self.fixed) / self.per_sample if self.per_sample > 0 else math.inf


@dataclass(frozen=True)
class Measured:
    """What one measurement found; empty where it did not look."""

    path: Path
    optimizer: str
    noise: CriticalBatch | None  # by the noise scale
    direct: Law | CriticalBatch | None  # by a sweep, or by branches
    rates: tuple[tuple[int, float], ...]  # worker batch, samples per second
    largest_worker_batch: int | None
    device: str
    trained_global_batch: int  # the largest that a sweep trained at
    memory: MemoryLine | None


@dataclass(frozen=True)
class SeenRun:
    """What one trained run shows."""

    path: Path
    recipe: Recipe
    steps: int
    test: float | None  # the task's metric
    curve: tuple[tuple[int, float], ...]  # step, validation metric
    input_samples_per_second: float | None  # that could be read for a worker, where its steps waited for it
    raced: bool = False  # whether auto's race chose its recipe


@dataclass(frozen=True)
class Known:
    """Everything that the records say."""

    measured: tuple[Measured, ...] = ()
    runs: tuple[SeenRun, ...] = ()
    link: Link | None = None
    notes: tuple[str, ...] = ()

    def plus(self, other: Known) -> Known:
        """Both; what is newer comes last."""
        return Known(
            self.measured + other.measured, self.runs + other.runs, other.link or self.link, self.notes + other.notes
        )


def read_records(paths: Sequence[Path], facts: TaskFacts) -> Known:
    """All records at some paths: a file, a folder of a measurement or a run, or a folder with such folders in it."""
    known = Known()
    for path in paths:
        places = [*_places(path)]
        if not places:
            raise RunFolderError(
                f"--from needs records ({MEASURED} of scalewise measure, a run folder of scalewise train or compare, a "
                f"link profile of scalewise bench), found none at {path}; check the path, or leave it out to measure"
            )
        known = known.plus(_read_all(path, places, facts))
    return known


def _read_all(path: Path, places: Sequence[Path], facts: TaskFacts) -> Known:
    """What the records in a folder say; those of other tasks are left out, unless there are no others."""
    known, others, of_a_task = Known(), [], 0
    for place in places:
        try:
            found = _read(place, facts)
        except OtherTask as error:
            others.append(error)
        else:
            known, of_a_task = known.plus(found), of_a_task + (found.link is None)  # a link is of no task
    if others and not of_a_task:
        raise others[0]
    left_out = f"{len(others)} records of other tasks in {path} are left out"
    return known.plus(Known(notes=(left_out,))) if others else known


def _places(path: Path) -> Iterator[Path]:
    """The files that begin a record."""
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file for name in (MEASURED, RECIPE) for file in path.glob(f"**/{name}"))
        yield from sorted(file for file in path.glob("*.json") if _is_link(file))


def _is_link(file: Path) -> bool:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "link"


def _read(file: Path, facts: TaskFacts) -> Known:
    try:
        if file.name == RECIPE:
            return _read_run(file.parent, facts)
        if _is_link(file):
            return Known(link=load_link(file))
        return Known(measured=(_read_measurement(file, facts),))
    except ScalewiseError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise RunFolderError(
            f"--from needs records of scalewise, {file} holds none ({error!r}); leave it out or measure again"
        ) from None


def _read_measurement(file: Path, facts: TaskFacts) -> Measured:
    content = read_json(file)
    _check_same(file, [content["task"]], [facts.name])
    if (asked := file.with_name("request.json")).is_file():
        request = read_json(asked)
        _check_same(file, _words(request["task"], request["settings"]), _words(facts.spec, facts.settings))
    rungs = (content.get("verified") or {}).get("rungs") or []
    return Measured(
        path=file,
        optimizer=str(content["optimizer"]),
        noise=_noise(content),
        direct=_direct(content.get("verified")),
        rates=tuple(_pair(row, "worker_batch", "samples_per_second") for row in content["throughput"]),
        largest_worker_batch=int(_amount(content["largest_worker_batch"]) or 0) or None,
        device=str(content.get("device", "cpu")),
        trained_global_batch=max((int(rung["global_batch"]) for rung in rungs), default=0),
        memory=_memory_line(content.get("memory")),
    )  # fmt: skip


def _amount(value: float | None) -> float | None:
    """A number of samples, or of samples a second, that can be."""
    if value is not None and not 0 <= value < float("inf"):
        raise ValueError(f"{value} is no amount")
    return None if value is None else float(value)


def _noise(content: dict[str, Any]) -> CriticalBatch | None:
    """What the noise scale along a training says, in the coordinates of its optimizer."""
    stages = content.get("stages") or []
    kind = "preconditioned" if any(stage.get("preconditioned") for stage in stages) else "noise_scale"
    found = [(int(stage["step"]), _ends(stage[kind])) for stage in stages if stage[kind]]
    return from_noise(found, int(content["worker_batch"])) if found else None


def _ends(one: dict[str, Any]) -> Interval[float | None]:
    return Interval(_amount(one["value"]), _amount(one["low"]), _amount(one["high"]))


def _direct(verified: dict[str, Any] | None) -> Law | CriticalBatch | None:
    """What training said: the law through the points of a sweep, or the critical batch by branches."""
    if not verified:
        return None
    if "law" in verified:
        return fit_law(_pair(point, "global_batch", "steps") for point in verified["law"]["points"])
    found = _ends(verified["critical_batch"])
    return CriticalBatch(found.value, found.low, found.high, "branch")


def _pair(row: dict[str, Any], batch_name: str, name: str) -> tuple[int, float]:
    """A batch, and what was measured with it."""
    batch, value = int(row[batch_name]), float(row[name])
    if not (batch > 0 and 0 < value < math.inf):
        raise ValueError(f"{row} has no {batch_name} and {name} above 0")
    return batch, value


def _memory_line(memory: dict[str, Any] | None) -> MemoryLine | None:
    if memory is None:
        return None
    names = ("bytes_per_sample", "largest_worker_batch", "predicted_peak_bytes", "baseline_bytes")
    each, batch, peak, baseline = (_amount(memory[name]) or 0.0 for name in names)
    return MemoryLine(baseline + peak - each * batch, each)


def _read_run(folder: Path, facts: TaskFacts) -> Known:
    """A finished run; one that has not ended has nothing to say here."""
    stored = read_json(folder / RECIPE)
    _check_same(folder, _words(stored["task"], stored["settings"]), _words(facts.spec, facts.settings))
    if not (folder / "result.json").is_file():
        return Known(notes=(f"{folder} has not come to its end and is left out",))
    result = read_json(folder / "result.json")
    lines = [*records.read(folder / "metrics.jsonl")]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    values = [(line["step"], _finite(line["validation"][facts.metric])) for line in epochs if line["validation"]]
    test = _finite(result["test"].get(facts.metric))
    notes = () if test is not None else (f"{folder} came to no {facts.metric} on test data",)
    return Known(runs=(SeenRun(
        path=folder,
        recipe=Recipe(**stored["recipe"]),
        steps=int(epochs[-1]["step"]),
        test=test,
        curve=tuple((int(step), value) for step, value in values if value is not None),
        input_samples_per_second=_input_rate(result, lines),
        raced=bool((stored.get("search") or {}).get("trials")),
    ),), notes=notes)  # fmt: skip


def _finite(value: float | None) -> float | None:
    """A metric; None where training has diverged."""
    return None if value is None or not math.isfinite(value) else float(value)


def _input_rate(result: dict[str, Any], lines: list[dict[str, Any]]) -> float | None:
    """Samples a second for each worker, where the steps waited for them; None where they did not."""
    waited = sum(line.get("input_seconds") or 0.0 for line in lines if line["kind"] == "step")
    rate = float(result["samples_per_second"])
    trained = result["samples"] / rate
    return rate / result["processes"] if waited > WAITING * trained else None


def _words(spec: str, settings: Sequence[str]) -> list[str]:
    return [os.path.normpath(spec), *sorted(settings)]


def _check_same(path: Path, theirs: list[str], ours: list[str]) -> None:
    if theirs != ours:
        raise OtherTask(
            f"--from needs records of task {' '.join(ours)}, got {path} of task {' '.join(theirs)}; leave it out, or "
            f"plan for that task"
        )
