"""How much data, or how large a model, an error takes: a learning curve through errors that were seen.

The errors are those of a table, or of trainings of a task on shares of its data or of models of other sizes. Every
training is a run folder and deterministic, so one that is stored is not trained again. Fewer samples get more epochs,
as the root of how many fewer they are: as many as before would leave small shares untrained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Subset

from scalewise.engine.data import streams
from scalewise.engine.data.samples import TensorSamples, open_samples
from scalewise.engine.placement import DeviceName, Placement
from scalewise.engine.store.folder import RunFolder, RunRecipe, check_folder
from scalewise.errors import DataError, Interrupted, TaskError, UsageError
from scalewise.files import read_json
from scalewise.plan.model import Inputs, rows
from scalewise.recipe import Derived
from scalewise.records import finite, save_document
from scalewise.runs.request import (
    Begun,
    Notice,
    Notify,
    Settings,
    Subject,
    answering,
    begun_or_resumed,
    check_alone,
    check_counts,
    keywords_of,
    load_subject,
    request_from,
    silent,
    single_recipe,
    stopped,
)
from scalewise.runs.run import train_in
from scalewise.stats.learning_curve import LEAST_SIZES
from scalewise.stats.outlook import Outlook, Points, outlook, read_points
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Task

DOCUMENT_FILE = "forecast.json"
USUAL_SHARES, USUAL_SEEDS = "2,4,8,16,32", 3


@dataclass(frozen=True)
class ForecastRequest:
    """A forecast as it is asked for. The fields are the flags of `scalewise forecast`, whose help describes them.

    `given` are the fields of the recipe that are set.
    """

    source: str | Task
    target: float | None = None
    shares: str | Sequence[float] = USUAL_SHARES
    sizes: str | None = None
    seeds: int = USUAL_SEEDS
    set: Settings | None = None
    plan: Path | None = None
    data: Path | None = None
    device: DeviceName = "auto"
    out: Path | None = None
    resume: str | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_alone("forecast")
        check_counts(seeds=self.seeds)
        if self.target is not None and not 0 < self.target < float("inf"):
            raise UsageError(f"--target is an error above 0, got {self.target:g}")
        flag, asked = ("--sizes", self.size_settings) if self.sizes else ("--shares", self.parts)
        if self.table is None and len({*asked}) < LEAST_SIZES:
            raise UsageError(
                f"{flag} needs {LEAST_SIZES} or more, for a curve with three unknowns, got {len({*asked})}"
            )
        if self.table is not None and self.resume is not None:
            raise UsageError(f"--resume continues trainings, got a table of errors, {self.source}; drop it")

    @property
    def table(self) -> Path | None:
        """The table of errors; None where the source is a task."""
        if not isinstance(self.source, str):
            return None
        is_table = self.source.endswith(".csv") or (Path(self.source).is_file() and not self.source.endswith(".py"))
        return Path(self.source) if is_table else None

    @property
    def parts(self) -> list[float]:
        """The shares as parts of 1, rising."""
        words = self.shares.split(",") if isinstance(self.shares, str) else [str(share) for share in self.shares]
        try:
            found = sorted({float(word.strip().removesuffix("%")) / 100 for word in words})
        except ValueError:
            found = []
        if not found or not all(0 < share <= 1 for share in found):
            raise UsageError(f"--shares needs percentages above 0 and up to 100, as in 2,4,8,16, got {self.shares!r}")
        return found

    @property
    def size_settings(self) -> list[str]:
        """`width=16,32` as settings, one for each value."""
        if self.sizes is None:
            return []
        name, equals, values = self.sizes.partition("=")
        if not (name and equals and values):
            raise UsageError(f"--sizes needs a setting and its values, as in width=16,32,64, got {self.sizes!r}")
        return [f"{name.strip()}={value.strip()}" for value in values.split(",")]


@dataclass(frozen=True)
class Trained:
    """One training: how much it learned from, its test error, and how fast it was."""

    samples: int
    parameters: int
    seed: int
    error: float
    epochs: float
    samples_per_second: float


@dataclass(frozen=True)
class ForecastResult:
    """A learning curve, the trainings it goes through, and what its target takes; the folder where one was left."""

    outlook: Outlook
    trained: tuple[Trained, ...]
    takes: tuple[dict[str, Any], ...]
    folder: Path | None

    def to_json(self) -> dict[str, Any]:
        """What `forecast --json` prints."""
        content: dict[str, Any] = finite(
            {
                **({} if self.folder is None else {"run": str(self.folder)}),
                **self.outlook.to_json(),
                "trained": [asdict(one) for one in self.trained],
                "takes": self.takes,
            }
        )
        return content


@keywords_of(ForecastRequest)
def forecast(source: str | Path | Task, *, notify: Notify = silent, **options: Any) -> ForecastResult:  # noqa: ANN401
    """Forecast how much data, or how large a model, an error takes.

        >>> found = sw.forecast("errors.csv", target=0.05)  # doctest: +SKIP
        >>> found.outlook.needed.value  # doctest: +SKIP
        41250.0

    Arguments:
        source: a CSV file with columns samples (or parameters) and error; or a task, which is trained in this process:
            a built-in name, a file, or a `Task`.
        notify: called with each line on what is being done; a `Notice` is worth keeping.
        options: fields of `ForecastRequest`, named like the flags of the command, and fields of the recipe.
    """
    return answer(request_from(ForecastRequest, source, options), notify)


def answer(request: ForecastRequest, notify: Notify = silent) -> ForecastResult:
    """Read or train the errors, fit the curve, and store what it says."""
    known = None if request.plan is None else _read_plan(request.plan)
    if known is not None and request.target is None:
        notify(Notice("--plan says what a target takes: nothing, without --target"))
    if request.table is not None:
        if request.out is not None:
            check_folder(request.out)
        result = _result(request, read_points(request.table), [], known, request.out)
        if request.out is not None:
            request.out.mkdir(parents=True, exist_ok=True)
            save_document(request.out / DOCUMENT_FILE, result.to_json())
        return result
    subject = load_subject(request.source, request.set, request.data)
    if known is not None and known.task not in (None, subject.task.name):
        raise UsageError(
            f"--plan needs a plan of task {subject.task.name}, got {known.path} of task {known.task}; leave it out"
        )
    return _from_task(request, subject, known, notify)


def _from_task(request: ForecastRequest, subject: Subject, known: KnownPlan | None, notify: Notify) -> ForecastResult:
    """Errors from trainings of a task, in a folder that can be resumed."""
    name = f"forecast-{subject.task.name}"
    begun = Begun(subject.spec, subject.settings, request.given)
    begun, resumed = begun_or_resumed(begun, request.resume, request.out, name)
    recipe, derived = single_recipe(subject.task.recipe, begun.given, request.device)
    run = RunRecipe(subject.spec, subject.settings, recipe, derived)
    with answering(name, request.out, resumed, begun) as folder:
        where = request.seeds, folder, request.device, notify
        try:
            if request.sizes:
                trained = on_sizes(subject.task, run, request.size_settings, *where)
            else:
                trained = on_shares(subject.task, run, request.parts, *where)
        except Interrupted as error:
            raise stopped(error.exit_code - 128, "forecast", folder) from None
        result = _result(request, _points(request, trained, notify), trained, known, folder)
        save_document(folder / DOCUMENT_FILE, result.to_json())
    return result


def _points(request: ForecastRequest, trained: Sequence[Trained], notify: Notify) -> Points:
    """Errors by size; none at all on the test data is less than they can show, and no point of a curve."""
    pairs = [(float(one.parameters if request.sizes else one.samples), one.error) for one in trained]
    seen = tuple(pair for pair in pairs if pair[1] > 0)
    sizes = len({size for size, _ in seen})
    perfect = f"{len(pairs) - len(seen)} of {len(pairs)} trainings made no error on the test data"
    if len(seen) < len(pairs) and sizes < LEAST_SIZES:
        raise DataError(
            f"a learning curve needs errors at {LEAST_SIZES} or more sizes, got {sizes}: {perfect}; take smaller "
            f"{'--sizes' if request.sizes else '--shares'}, or more test data"
        )
    if len(seen) < len(pairs):
        notify(Notice(f"{perfect}, too few to show one, and are left out"))
    return Points("parameters" if request.sizes else "samples", seen)


def _result(
    request: ForecastRequest, points: Points, trained: Sequence[Trained], known: KnownPlan | None, folder: Path | None
) -> ForecastResult:
    found = outlook(points, request.target)
    return ForecastResult(found, tuple(trained), tuple(_takes(found, trained, known)), folder)


def _takes(found: Outlook, trained: Sequence[Trained], known: KnownPlan | None) -> list[dict[str, Any]]:
    """Samples to train on in all and seconds to the target: by a plan's rows, or with one worker as it was trained."""
    needed = found.needed
    if needed is None or needed.value is None or found.kind != "samples":
        return []
    if known is not None:
        return _planned(known, needed.value)
    if not trained:
        return []
    last = max(trained, key=lambda one: one.samples)
    epochs = last.epochs * (last.samples / needed.value) ** 0.5
    seen = epochs * needed.value
    return [{"workers": 1, "samples": seen, "seconds": seen / last.samples_per_second, "cost": None}]


@dataclass(frozen=True)
class KnownPlan:
    """What a forecast takes from a plan."""

    path: Path
    task: str | None
    inputs: Inputs
    workers: list[int]
    epochs: float


def _read_plan(path: Path) -> KnownPlan:
    """A plan that anyone may have written; its rows can be computed."""
    file = path / "plan.json" if path.is_dir() else path
    try:
        content = read_json(file)
        inputs, workers = Inputs(**content["inputs"]), [int(row["workers"]) for row in content["rows"]]
        rows(inputs, workers)
        return KnownPlan(path, content.get("task"), inputs, workers, float(content["recipe"]["epochs"]))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"--plan needs the folder of a plan, got {path} ({said}); scalewise plan makes one") from None


def _planned(known: KnownPlan, samples: float) -> list[dict[str, Any]]:
    """The rows of a plan, with the steps that one worker's epochs over that many samples are."""
    steps = known.epochs * samples / known.inputs.worker_batch
    scaled = dataclasses.replace(known.inputs, single_steps=steps, single_low=steps, single_high=steps)
    names = ("workers", "samples", "seconds", "cost")
    try:
        return [{name: getattr(row, name) for name in names} for row in rows(scaled, known.workers)]
    except OverflowError:  # more steps than there are numbers for
        return []


def on_shares(
    task: Task,
    run: RunRecipe,
    shares: Sequence[float],
    seeds: int,
    folder: Path,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> list[Trained]:
    """Train on shares of the data, between 0 and 1, each with some seeds, which choose the samples too."""
    samples = len(open_samples(task.train, 0, "training"))
    found = []
    for share in shares:
        count = max(1, round(share * samples))
        for seed in range(seeds):
            epochs = run.recipe.epochs * float(np.sqrt(samples / count))
            reason = f"forecast: {count:,} of {samples:,} training samples"
            changed = dataclasses.replace(
                run,
                recipe=run.recipe.replace(seed=seed, epochs=epochs, steps=None),
                derived=[*run.derived, Derived("epochs", epochs, reason)],
            )
            notify(f"{count:,} samples, seed {seed + 1} of {seeds}")
            place = folder / f"share-{share:g}-seed-{seed}"
            found.append(_trained(place, part_of(task, count, seed), changed, count, device))
    return found


def on_sizes(
    task: Task,
    run: RunRecipe,
    settings: Sequence[str],
    seeds: int,
    folder: Path,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> list[Trained]:
    """Train models of several sizes on all of the data: one for each `name=value` of the task's function."""
    if task.origin is None:
        raise UsageError(f"sizes needs a task that is loaded by name, got the task {task.name} itself; use shares")
    found = []
    for setting in settings:
        other = load_task(task.origin.spec, [*run.settings, setting], task.origin.data)
        samples = len(open_samples(other.train, 0, "training"))
        for seed in range(seeds):
            changed = dataclasses.replace(run, settings=[*run.settings, setting], recipe=run.recipe.replace(seed=seed))
            notify(f"{setting}, seed {seed + 1} of {seeds}")
            found.append(_trained(folder / f"{setting}-seed-{seed}", other, changed, samples, device))
    return found


def part_of(task: Task, count: int, seed: int) -> Task:
    """The task with `count` of its training samples; a smaller part of the same seed is in every larger one."""
    samples = open_samples(task.train, 0, "training")
    generator = np.random.Generator(np.random.PCG64(streams.key("subset", seed) & (2**63 - 1)))
    chosen = np.sort(generator.permutation(len(samples))[:count])
    if isinstance(samples, TensorSamples):
        places = torch.from_numpy(chosen)
        return dataclasses.replace(task, train=tree_map(lambda tensor: tensor[places.to(tensor.device)], samples.tree))
    return dataclasses.replace(task, train=Subset(task.train, chosen.tolist()))


def _trained(folder: Path, task: Task, run: RunRecipe, samples: int, device: DeviceName) -> Trained:
    place, recipe = RunFolder(folder), run.recipe
    train_in(place, task, run, Placement(device=device))
    result = json.loads(place.result.read_text())
    with streams.undisturbed():
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
    error, speed = _error(result["test"], task), result["samples_per_second"]
    return Trained(samples, parameters, recipe.seed, error, recipe.epochs, speed)


def _error(test: dict[str, float], task: Task) -> float:
    """What is left to learn: 1 − accuracy, or the metric itself where less is better."""
    assert task.metric is not None
    value = test[task.metric]
    if not task.higher_is_better:
        return value
    if task.metric != "accuracy":
        raise TaskError(
            f"a learning curve needs an error, got metric {task.metric}, of which more is better; give the task "
            f"higher_is_better=False if less of it is better, or metric='accuracy' or 'loss'"
        )
    return 1 - value
