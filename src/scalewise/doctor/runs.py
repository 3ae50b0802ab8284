"""Evidence from run folders: those of `scalewise train`, and those that `sw.watch` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from scalewise.doctor.evidence import Baseline, BatchNorm, Evidence
from scalewise.doctor.observations import is_watched, read_folder
from scalewise.doctor.watched import from_watched
from scalewise.errors import RunFolderError
from scalewise.files import read_json
from scalewise.records import read
from scalewise.stats.noise_scale import NoiseEstimate


def read_run(folder: Path) -> Evidence:
    """What a run folder says."""
    if is_watched(folder):
        return from_watched(folder.name, read_folder(folder))
    if not (folder / "recipe.json").is_file():
        raise RunFolderError(
            f"a run must be a folder with recipe.json (of scalewise train) or process-0.jsonl (of sw.watch), found "
            f"neither in {folder}; check the path"
        )
    try:
        return _from_training(folder)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunFolderError(
            f"{folder} must hold the files of a run, got something else in them ({error!r}); train anew with --out"
        ) from None


def _from_training(folder: Path) -> Evidence:
    stored = _json(folder / "recipe.json")
    recipe, result, environment = stored["recipe"], _json(folder / "result.json"), _json(folder / "env.json")
    lines = list(read(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else []
    steps = [one for one in lines if one["kind"] == "step"]
    failures = [one for one in lines if one["kind"] == "failure"]
    noise = result.get("noise_scale")
    task = environment.get("task", {})
    return Evidence(
        name=f"{folder}: {stored['task']}",
        workers=recipe["workers"],
        worker_batch=recipe["worker_batch"],
        steps=len(steps),
        optimizer=recipe["optimizer"],
        task=str(stored["task"]).rpartition("/")[2],
        rates=tuple(one["lr"] for one in steps),
        losses=tuple(math.nan if one["loss"] is None else one["loss"] for one in steps),
        noise=_noise(noise, steps),
        baselines=_baselines(stored, task),
        batch_norm=_batch_norm(recipe, environment.get("model", {}), len(steps)),
        non_finite=tuple(one["step"] for one in steps if one["loss"] is None),
        failure=failures[-1]["reason"] if failures else None,
        test_loss=result.get("test", {}).get("loss"),
        samples_per_epoch=task.get("samples"),
        samples_seen=steps[-1]["samples"] if steps else None,
        follows_noise=any(one.get("gain") is not None for one in steps),
        counts_progress=True,
    )


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file: a run that was stopped has no result."""
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _noise(stored: dict[str, Any] | None, steps: list[dict[str, Any]]) -> NoiseEstimate | None:
    """The noise scale of the result, or of the last step of a run that has none."""
    if stored is not None:
        return NoiseEstimate(stored["value"], stored["low"], stored["high"], stored["enough"])
    known = [one["noise_scale"] for one in steps if one.get("noise_scale") is not None]
    return NoiseEstimate(known[-1], None, None, False) if known else None


def _baselines(stored: dict[str, Any], task: dict[str, Any]) -> tuple[Baseline, ...]:
    """One worker of the same recipe; and the task's own recipe, should somebody have scaled the rate by hand."""
    recipe, own, samples = stored["recipe"], task.get("recipe"), task.get("samples")
    derived = {value["field"] for value in stored.get("derived", [])}
    extended = not derived.isdisjoint({"epochs", "steps"})  # by auto, beyond what one worker would take
    epochs = own["epochs"] if extended and own else None if recipe.get("steps") else recipe["epochs"]
    single = Baseline(recipe["lr"], recipe["worker_batch"], epochs * samples if epochs and samples else None)
    if not own or own["optimizer"] != recipe["optimizer"]:
        return (single,)
    return single, Baseline(own["lr"], own["workers"] * own["worker_batch"])


def _batch_norm(recipe: dict[str, Any], model: dict[str, Any], steps: int) -> BatchNorm | None:
    found = model.get("batch_norm")
    if not found:
        return None
    rows = recipe.get("micro_batch") or recipe["worker_batch"]
    kind = recipe["batch_norm"]
    group = int(kind.removeprefix("ghost:")) if kind.startswith("ghost:") else rows
    if kind == "sync":
        group = rows * recipe["workers"]
    batches = steps * (recipe["worker_batch"] // rows)
    # `auto` recomputes statistics for evaluation wherever the averages have not settled
    recalibrated = recipe.get("statistics", "running") != "running"
    return BatchNorm(found["layers"], group, found["momentum"], batches, recalibrated=recalibrated)
