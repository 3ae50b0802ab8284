"""Where two runs part: the first step, worker and tensor in which they differ, and possible reasons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scalewise.engine.parallel.model import sha256
from scalewise.engine.placement import DeviceName
from scalewise.engine.processes.failures import translating
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import RunFolder, RunRecipe, read_recipe, stored_environment
from scalewise.errors import DamagedCheckpoint, RunFolderError
from scalewise.files import read_json
from scalewise.recipe import Recipe
from scalewise.runs import replay
from scalewise.runs.replay import Replay, recorded_steps, stored_task
from scalewise.runs.request import Notify, silent

Stage = Literal["start", "samples", "loss", "gradient", "update"]
TIMES = ("seconds", "input_seconds", "samples_per_second")
PLACES = ("processes", "cores", "job")  # on which the result does not depend
MOST_STEPS_BACK = 3


@dataclass(frozen=True)
class Reason:
    """Something recorded that differs and may be why."""

    what: str
    left: Any
    right: Any


@dataclass(frozen=True)
class Parting:
    """Where two runs differ first when they are computed again here: nowhere if `stage` is None."""

    step: int
    stage: Stage | None
    worker: int | None
    tensor: str | None


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and where that ends."""

    compared_steps: int  # whose records both have
    record_step: int | None  # the first whose records differ
    record_fields: dict[str, tuple[Any, Any]]  # in what
    same_steps: list[int]  # the steps of which both have the same stored weights
    checkpoint_step: int | None  # the first whose stored weights differ
    checkpoint_tensor: str | None  # the first that does
    reasons: list[Reason]
    problems: list[str]

    @property
    def differ(self) -> bool:
        """Whether anything that was computed differs."""
        return self.record_step is not None or self.checkpoint_step is not None

    @property
    def step(self) -> int | None:
        """The first step in which they are seen to differ."""
        return min((one for one in (self.record_step, self.checkpoint_step) if one is not None), default=None)


@dataclass(frozen=True)
class Bisection:
    """Two runs compared and, where they differ, recomputed around the first step that does."""

    runs: tuple[Path, Path]
    comparison: Comparison
    recomputed: tuple[Parting, tuple[Replay, Replay]] | None

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        found = self.comparison
        parting, both = self.recomputed if self.recomputed is not None else (None, None)
        place = {"step": found.step, "worker": None, "tensor": found.checkpoint_tensor, "stage": None}
        if parting is not None and parting.stage is not None:
            place = asdict(parting)
        fields = {name: [*pair] for name, pair in found.record_fields.items()}
        return {
            "runs": [str(run) for run in self.runs],
            "differ": found.differ,
            **place,
            "compared_steps": found.compared_steps,
            "record": {"step": found.record_step, "fields": fields},
            "checkpoints": {
                "same": found.same_steps,
                "different": found.checkpoint_step,
                "tensor": found.checkpoint_tensor,
            },
            "reasons": [asdict(reason) for reason in found.reasons],
            "reproduced": None if both is None else [one.matches for one in both],
            "problems": found.problems,
        }


def bisect(
    left: Path,
    right: Path,
    /,
    *,
    task: str | None = None,
    data: Path | None = None,
    device: DeviceName = "auto",
    recompute: bool = True,
    notify: Notify = silent,
) -> Bisection:
    """Find the first step, worker and tensor in which two runs differ.

    Arguments:
        left, right: the runs' folders.
        task: the runs' task, where it is code of your own: a folder is not trusted to name code to run.
        data: folder of the task's data files.
        recompute: compute the step in which they differ again.
        notify: receives what is being done.
    """
    folders = (RunFolder(left), RunFolder(right))
    if left.resolve() == right.resolve():
        raise RunFolderError(f"two runs are needed, got {left} twice; name another")
    recipes = (read_recipe(folders[0]), read_recipe(folders[1]))
    with translating():
        found = compare(*folders, recipes)
        recomputed = None
        if recompute and found.step is not None:
            tasks = [stored_task(recipe, task, data) for recipe in recipes]
            for step in range(found.step, max(0, found.step - 1 - MOST_STEPS_BACK), -1):
                notify(f"computing step {step} of both runs again")
                one, other = (
                    replay.recompute(folder, recipe, own, step, device)
                    for folder, recipe, own in zip(folders, recipes, tasks, strict=True)
                )
                recomputed = parting(one, other), (one, other)
                if recomputed[0].stage != "start":  # else they differ before it already
                    break
    return Bisection((left, right), found, recomputed)


def compare(left: RunFolder, right: RunFolder, recipes: tuple[RunRecipe, RunRecipe]) -> Comparison:
    """Compare what two runs have stored."""
    records = [recorded_steps(folder) for folder in (left, right)]
    common = sorted(records[0].keys() & records[1].keys())
    fields: dict[str, tuple[Any, Any]] = {}
    record_step = None
    for step in common:
        different = _differences(records[0][step], records[1][step])
        fields = {name: different[name] for name in sorted(different) if name not in TIMES}
        if fields:
            record_step = step
            break
    same, checkpoint_step, tensor, problems = _checkpoints(left, right)
    known = [_known(*pair) for pair in zip((left, right), recipes, strict=True)]
    reasons = [Reason(what, *pair) for what, pair in _differences(*known).items()]
    return Comparison(len(common), record_step, fields, same, checkpoint_step, tensor, reasons, problems)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two mappings hold otherwise, in the order of the left."""
    pairs = {name: (one.get(name), other.get(name)) for name in (*one, *other)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _checkpoints(left: RunFolder, right: RunFolder) -> tuple[list[int], int | None, str | None, list[str]]:
    """Steps with the same stored weights, the first other one, its first tensor, and what could not be read."""
    both = [{path.name: path for path in checkpoint.stored(folder.checkpoints)} for folder in (left, right)]
    same: list[int] = []
    problems: list[str] = []
    for step in sorted(int(name.removeprefix("step-")) for name in both[0].keys() & both[1].keys()):
        try:
            one, other = (checkpoint.model_tensors(paths[f"step-{step}"]) for paths in both)
        except DamagedCheckpoint as error:
            problems.append(str(error))
            continue
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other or sha256({name: one[name]}) != sha256({name: other[name]}):
                return same, step, name, problems
        same.append(step)
    return same, None, None, problems


def _known(folder: RunFolder, run: RunRecipe) -> dict[str, Any]:
    """What a run has stored that its result may depend on."""
    environment = stored_environment(folder) or {}
    facts = environment.pop("task", None)
    data = facts if isinstance(facts, dict) else {}
    try:
        result = read_json(folder.result)
    except (OSError, ValueError):
        result = None
    return {
        "task": run.task,
        "settings": sorted(run.settings),
        "held out": run.hold_out or run.recipe.selects,
        **{name: getattr(run.recipe, name) for name in Recipe.model_fields},
        **{name: value for name, value in environment.items() if name not in PLACES},
        "training data": data.get("data_sha256"),
        "training samples": data.get("samples"),
        "exact": result.get("exact", True) if isinstance(result, dict) else True,
    }


def parting(left: Replay, right: Replay) -> Parting:
    """The first thing in a step that differs: weights before it, samples, loss, gradients, weights after it."""
    step = left.step
    tensor = _first(left.before, right.before)
    if tensor is not None:
        return Parting(step, "start", None, tensor)
    for one, other in itertools.zip_longest(left.workers, right.workers):
        if one is None or other is None:
            return Parting(step, "samples", (one or other).worker, None)
        if (one.samples, one.epochs) != (other.samples, other.epochs):
            return Parting(step, "samples", one.worker, None)
        if one.loss != other.loss or one.weight != other.weight:
            return Parting(step, "loss", one.worker, None)
        tensor = _first(one.hashes, other.hashes)
        if tensor is not None:
            return Parting(step, "gradient", one.worker, tensor)
    tensor = _first(left.after, right.after)
    return Parting(step, None if tensor is None else "update", None, tensor)


def _first(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first name under which two hashes are not the same, in the order of the left."""
    return next(iter(_differences(one, other)), None)
