"""The recipe of a run: what was given, and what auto derives from a short pilot before step 0.

The pilot trains the task's own recipe for a few steps, measures the noise scale, and is thrown away. It depends on
task, recipe and seed alone, never on timing, so every process and every machine of one kind derives the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from scalewise.engine.data.samples import held_out_samples, open_samples
from scalewise.engine.loop import Training
from scalewise.engine.placement import DeviceName, Placement, available_cores
from scalewise.errors import RecipeError
from scalewise.recipe import Derived, Pilot, Recipe, RecipeMode, adapts, fitting_lr, resolve
from scalewise.records import Step
from scalewise.tasks.task import Task

LEAST_STEPS, MOST_STEPS = 16, 60
SHARE = 0.1  # of the single-worker budget, between those
MOST_WORKERS = 8  # of the pilot: the noise scale does not depend on how many measure it


def complete(
    task: Task,
    base: Recipe,
    given: dict[str, Any],
    mode: RecipeMode,
    device: DeviceName,
    epochs_fixed: bool = False,
    known: Pilot | None = None,
    hold_out: bool = False,
) -> tuple[Recipe, list[Derived], Pilot | None]:
    """The complete recipe, the reasons for what was derived, and the pilot if there was one.

    Arguments:
        task: what is learned.
        base: its single-worker recipe, or a loaded one.
        given: fields set by the user; they always win.
        mode: `auto` derives the rest when there are several workers, `plain` changes nothing else.
        device: where the pilot runs.
        epochs_fixed: whether auto must keep to the single worker's number of samples.
        known: the pilot of an earlier call.
        hold_out: whether validation data are held out although nothing in the recipe asks for it.
    """
    rate = fitting_lr(base, given) if mode == "auto" else None
    wanted = base.replace(**given, **({"lr": rate.value} if rate else {}))
    hold_out = task.validation is None and (hold_out or wanted.selects)
    samples = len(open_samples(task.train, 0, "training"))
    if hold_out:
        samples -= held_out_samples(samples)
    if epochs_fixed and wanted.workers > 1 and wanted.lr_rule == "adascale":
        raise RecipeError(
            "--epochs-fixed and --lr-rule adascale cannot be combined: adascale chooses the number of samples; drop one"
        )
    found = None
    if mode == "auto" and adapts(wanted, epochs_fixed):
        found = known or measure(task, wanted, samples, device, hold_out)
    recipe, derived = resolve(base, given, mode, available_cores(), samples, found)
    return recipe, derived, found


def measure(task: Task, recipe: Recipe, samples: int, device: DeviceName, hold_out: bool = False) -> Pilot:
    """Train for a few steps, on what will be trained on, and measure the noise scale."""
    workers = min(recipe.workers, MOST_WORKERS)
    fitting = round(SHARE * recipe.epochs * samples / (workers * recipe.worker_batch))
    steps = min(max(fitting, LEAST_STEPS), MOST_STEPS, recipe.total_steps(samples) * recipe.workers)
    trial = recipe.replace(workers=workers, lr_rule="adascale", patience=None, target=None, threads=recipe.threads or 1)
    seconds = 0.0
    alone = dataclasses.replace(task, validation=None)
    with Training(alone, trial, Placement(device=device), hold_out=hold_out, alone=True) as training:
        for record in training.records():
            if isinstance(record, Step):
                seconds = record.seconds
            if training.progress.step >= steps:
                break
        noise = training.noise.estimate()
    return Pilot(noise.value, training.progress.step, training.seen, seconds)
