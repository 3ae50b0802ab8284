"""Evidence from run folders: those of `scalewise train`, and those that `sw.watch` writes on every process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalewise.doctor.evidence import Baseline, BatchNorm, Evidence
from scalewise.doctor.observations import Watched, WatchedStep, file_of, read_folder
from scalewise.errors import RunFolderError
from scalewise.files import read_json
from scalewise.records import read
from scalewise.stats.noise_scale import NoiseEstimate, NoiseScale, rounded_up


def read_run(folder: Path) -> Evidence:
    """What a run folder says."""
    if file_of(folder, 0).is_file():
        return from_watched(folder.name, read_folder(folder))
    if not (folder / "recipe.json").is_file():
        raise RunFolderError(
            f"a run must be a folder with recipe.json (of scalewise train) or process-0.jsonl (of sw.watch), found "
            f"neither in {folder}; check the path"
        )
    try:
        return _from_training(folder)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunFolderError(f"{folder} holds damaged files of a run ({error!r}); train again with --out") from None


def _from_training(folder: Path) -> Evidence:
    stored = _json(folder / "recipe.json")
    recipe, result, environment = stored["recipe"], _json(folder / "result.json"), _json(folder / "env.json")
    lines = list(read(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else []
    steps = [one for one in lines if one["kind"] == "step"]
    failures = [one for one in lines if one["kind"] == "failure"]
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
        noise=_noise(result.get("noise_scale"), steps),
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
    raced = "lr" in derived and recipe["lr_rule"] == "none"  # the rate is that of all workers, as auto measured it
    batch = recipe["worker_batch"] * (recipe["workers"] if raced else 1)
    single = Baseline(recipe["lr"], batch, epochs * samples if epochs and samples else None)
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


def from_watched(name: str, processes: list[Watched]) -> Evidence:
    """What the files of all processes say together."""
    first = processes[0]
    steps = first.steps
    taken = [step for one in processes for step in one.steps]
    wild = {step.step for step in taken if not step.loss_finite or step.gradient_finite is False}
    return Evidence(
        name=name,
        workers=first.process.processes,
        worker_batch=_typical([sum(step.samples) for step in taken]),
        steps=len(steps),
        optimizer=first.process.optimizer.lower(),
        rates=tuple(step.lr for step in steps),
        losses=_losses(processes),
        noise=_watched_noise(processes),
        batch_norm=_watched_batch_norm(processes),
        non_finite=tuple(sorted(wild)),
        processes=tuple(processes),
    )


def _typical(values: list[int]) -> float:
    return max(1.0, float(np.median(values))) if values else 1.0


def _losses(processes: list[Watched]) -> tuple[float, ...]:
    """The mean over processes, step by step."""
    columns = [[math.nan if step.loss is None else step.loss for step in one.steps] for one in processes]
    length = min(map(len, columns))
    return tuple(np.mean([column[:length] for column in columns], axis=0).tolist()) if length else ()


def _watched_noise(processes: list[Watched]) -> NoiseEstimate | None:
    """The noise scale, from the gradient of the first backward pass and that of the whole step.

    The first pass stands for all of a step, being one of them at random. It is seen process by process before
    DistributedDataParallel averages, else after the sum over shards, where several micro batches are needed. One
    process with one micro batch a step has looked at a part of that. Nothing is known where processes average their
    gradients in a way that cannot be seen.
    """
    first = processes[0].process
    if len(processes) < first.processes or (first.processes > 1 and not (first.reduces or first.sharded)):
        return None
    tables = [{step.step: step for step in one.steps if step.first_square is not None} for one in processes]
    if first.processes == 1 and (parts := _noise_of_parts(processes[0].steps)) is not None:
        return parts
    scale = NoiseScale()
    for number in sorted(set.intersection(*map(set, tables))):
        rows = [table[number] for table in tables]
        passes = rows[0].passes or len(rows[0].samples)
        calls, rest = divmod(len(rows[0].samples), passes)
        if rest:
            continue  # which calls of the model belong to which backward pass cannot be seen
        squares = [row.first_square or 0.0 for row in rows]
        samples = [sum(row.samples[:calls]) for row in rows]
        whole = square(rows, first.sharded) / passes**2
        if first.sharded and passes > 1:
            scale.observe(sum(squares), whole, passes, sum(samples))
        elif not first.sharded and len(rows) * passes > 1:
            scale.observe(float(np.mean(squares)), whole, len(rows) * passes, float(np.mean(samples)))
    estimate = scale.estimate()
    return estimate if estimate.value is not None or estimate.low is not None else None


def _noise_of_parts(steps: list[WatchedStep]) -> NoiseEstimate | None:
    """The noise scale from steps of one micro batch that were also measured in parts; one in N of all steps."""
    scale, looks = NoiseScale(), 0
    for step in steps:
        if step.part_square is not None and step.part_samples and step.square is not None and len(step.samples) == 1:
            scale.observe(step.part_square, step.square, step.samples[0] / step.part_samples, step.part_samples)
            looks += 1
    if not looks:
        return None
    estimate = scale.estimate()
    more = estimate.more_steps
    return estimate if more is None else replace(estimate, more_steps=rounded_up(more * len(steps) / looks))


def square(rows: list[WatchedStep], sharded: bool) -> float:
    """‖gradient‖² of one step: the sum of the processes' parts, or what any of them has."""
    squares = [math.nan if row.square is None else row.square for row in rows]
    return sum(squares) if sharded else squares[0]


def _watched_batch_norm(processes: list[Watched]) -> BatchNorm | None:
    """The layers that were in training mode; frozen ones only apply what they have."""
    first = processes[0]
    looked = [step for step in first.steps if step.statistics_layers is not None]
    used = [step for step in looked if step.statistics_layers]
    layers = (
        max((step.statistics_layers or 0 for step in used), default=0) if looked else first.process.batch_norm_layers
    )
    if not layers:
        return None
    seen = [step for step in first.steps if step.statistics_gap is not None]
    batches = [step.statistics_batches for step in first.steps if step.statistics_batches is not None]
    taken = sum(len(step.samples) for step in first.steps)
    return BatchNorm(
        layers,
        _group(processes),
        used[-1].statistics_momentum if used else first.process.batch_norm_momentum,
        max(taken, batches[-1] if batches else 0),
        seen[-1].statistics_gap if seen else None,
    )


def _group(processes: list[Watched]) -> float:
    """The samples that batch norm takes its statistics over."""
    groups = [step.statistics_group for one in processes for step in one.steps if step.statistics_group is not None]
    if groups:
        return _typical(groups)
    first = processes[0].process  # a file of an earlier version
    samples = _typical([samples for one in processes for step in one.steps for samples in step.samples])
    return samples * first.processes if first.batch_norm_synchronised else samples
