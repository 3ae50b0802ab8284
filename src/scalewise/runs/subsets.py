"""Errors of a task by how much it may learn from: trainings on shares of its data, or of models of other sizes.

Every training is a run folder and deterministic, so one that is there already is not trained again. Fewer samples get
more epochs, as the root of how many fewer they are: as many as before would leave small shares untrained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Subset

from scalewise.engine.data import streams
from scalewise.engine.data.samples import TensorSamples, open_samples
from scalewise.engine.placement import DeviceName
from scalewise.engine.store.folder import RunFolder, RunRecipe
from scalewise.errors import TaskError
from scalewise.recipe import Derived
from scalewise.runs.measure.minima.trained import train_in
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Task

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """One training: how much it learned from, its test error, and how fast it was."""

    samples: int
    parameters: int
    seed: int
    error: float
    epochs: float
    samples_per_second: float


def on_shares(
    task: Task,
    run: RunRecipe,
    shares: Sequence[float],
    seeds: int,
    folder: Path,
    device: DeviceName = "auto",
    notify: Notify = lambda line: None,
) -> list[Trained]:
    """Train on shares of the data, each with some seeds, which choose the samples too.

    Arguments:
        task, run: what is learned, and how from all of the data.
        shares: of the training data, between 0 and 1.
        seeds: trainings of each share.
        folder: of the runs.
        device: where.
        notify: told what is being done.
    """
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
            place = RunFolder(folder / f"share-{share:g}-seed-{seed}")
            notify(f"{count:,} samples, seed {seed + 1} of {seeds}")
            train_in(place, part_of(task, count, seed), changed, device)
            found.append(_trained(place, task, count, seed, epochs))
    return found


def on_sizes(
    task: Task,
    run: RunRecipe,
    settings: Sequence[str],
    seeds: int,
    folder: Path,
    device: DeviceName = "auto",
    notify: Notify = lambda line: None,
) -> list[Trained]:
    """Train models of several sizes on all of the data: one for each `name=value` of the task's function."""
    assert task.origin is not None
    found = []
    for setting in settings:
        other = load_task(task.origin.spec, [*run.settings, setting], task.origin.data)
        samples = len(open_samples(other.train, 0, "training"))
        for seed in range(seeds):
            changed = dataclasses.replace(run, settings=[*run.settings, setting], recipe=run.recipe.replace(seed=seed))
            place = RunFolder(folder / f"{setting}-seed-{seed}")
            notify(f"{setting}, seed {seed + 1} of {seeds}")
            train_in(place, other, changed, device)
            found.append(_trained(place, other, samples, seed, run.recipe.epochs))
    return found


def part_of(task: Task, count: int, seed: int) -> Task:
    """The task with so many of its training samples; a smaller part of the same seed is in every larger one."""
    samples = open_samples(task.train, 0, "training")
    generator = np.random.Generator(np.random.PCG64(streams.key("subset", seed) & (2**63 - 1)))
    chosen = np.sort(generator.permutation(len(samples))[:count])
    if isinstance(samples, TensorSamples):
        rows = torch.from_numpy(chosen)
        return dataclasses.replace(task, train=tree_map(lambda tensor: tensor[rows.to(tensor.device)], samples.tree))
    return dataclasses.replace(task, train=Subset(task.train, chosen.tolist()))


def _trained(place: RunFolder, task: Task, samples: int, seed: int, epochs: float) -> Trained:
    result = json.loads(place.result.read_text())
    with streams.undisturbed():
        parameters = sum(parameter.numel() for parameter in task.model().parameters())
    return Trained(samples, parameters, seed, _error(result["test"], task), epochs, result["samples_per_second"])


def _error(test: dict[str, float], task: Task) -> float:
    """What is left to learn: 1 − accuracy, or the metric itself where less is better."""
    assert task.metric is not None
    value = test[task.metric]
    if not task.higher_is_better:
        return value
    if task.metric != "accuracy":
        raise TaskError(
            f"a learning curve needs an error, got metric {task.metric}, of which more is better; give the task "
            f"metric='accuracy' or metric='loss' with higher_is_better=False"
        )
    return 1 - value
