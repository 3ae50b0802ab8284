"""What a training refuses: labels and losses that do not fit before the first step, numbers that stop being finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.engine.data.feed import placed
from scalewise.engine.data.samples import Samples, check_finite, targets
from scalewise.engine.evaluate import evaluating
from scalewise.engine.parallel import Strategy
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import WorkerNumbers, WorkerStep
from scalewise.engine.processes.team import Team
from scalewise.errors import DataError, NonFiniteGradient, NonFiniteLoss, Place, RecipeError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

CLASSIFYING = (F.cross_entropy, F.nll_loss)
IGNORED = -100  # torch's default ignore_index
SHOWN_SAMPLES = 8


def check_label_smoothing(task: Task, recipe: Recipe) -> None:
    """Refuse label smoothing with a loss that has none."""
    if recipe.label_smoothing and not task.smooths_labels():
        raise RecipeError(
            f"label_smoothing={recipe.label_smoothing} needs a loss that takes label_smoothing (as "
            f"torch.nn.functional.cross_entropy does); this task's does not: use --label-smoothing 0"
        )


def check_labels(
    task: Task, recipe: Recipe, model: PlacedModel, parts: Mapping[str, Samples | None], device: torch.device
) -> None:
    """Refuse whole-numbered targets of a classification, in any part of the data, outside of the model's outputs."""
    if task.loss not in CLASSIFYING and not isinstance(task.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    ignored = getattr(task.loss, "ignore_index", IGNORED)
    given = {what: samples for what, samples in parts.items() if samples is not None}
    known = {what: labels for what, samples in given.items() if (labels := targets(samples)) is not None}
    classes = _outputs(recipe, model, next(iter(given.values())), device) if known else None
    if classes is None:
        return
    for what, labels in known.items():
        wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise DataError(
                f"{what} labels must be 0 to {classes - 1}, since the model has {classes} outputs, got "
                f"{int(labels[place])} at sample {given[what].describe(place)}; correct the labels or the model"
            )


@torch.no_grad()
def _outputs(recipe: Recipe, model: PlacedModel, samples: Samples, device: torch.device) -> int | None:
    """How many classes the model distinguishes; None when one sample alone does not show it."""
    first = torch.zeros(1, dtype=torch.long)
    model.buffers.remember()
    try:
        with evaluating(model.module):
            output = model.module(placed(samples.fetch(first, first), device, recipe.layout)[0])
    except Exception:  # whatever is wrong with the model, the first step reports it better
        return None
    finally:
        model.buffers.restore()
    return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None


def check_losses(strategy: Strategy, samples: Samples, step: int, workers: Sequence[WorkerNumbers]) -> None:
    """Refuse a worker's loss that is not finite; a sample that is not finite is named first. Steps count from 0."""
    for worker, numbers in enumerate(workers):
        if not math.isfinite(numbers.loss):
            where, indices = _where(strategy, samples, step, worker)
            raise NonFiniteLoss(
                f"the loss must stay finite, got {numbers.loss} {where}; lower --lr, or add --warmup-epochs or "
                f"--clip-norm",
                Place(step + 1, worker, None, indices),
            )


def check_gradients(strategy: Strategy, samples: Samples, step: int, team: Team) -> None:
    """Refuse a worker's gradient that is not finite, before it reaches the weights."""
    names = [*strategy.model.parameters]
    mine = [(one.worker, name) for one in strategy.worker_steps(step) for name in non_finite_gradients(one, names)]
    found = [first for one in team.gather_objects(mine[:1]) for first in one]  # the same on every process
    if not found:  # only its square was too large for a number
        return
    worker, parameter = min(found, key=lambda first: first[0])
    where, indices = _where(strategy, samples, step, worker)
    raise NonFiniteGradient(
        f"gradients must stay finite, that of {parameter} is not {where}, although the loss is; lower --lr, or look "
        f"at it with `scalewise replay RUN`",
        Place(step + 1, worker, parameter, indices),
    )


def non_finite_gradients(one: WorkerStep, names: Sequence[str]) -> list[str]:
    """The parameters whose gradients are not finite."""
    return [name for name, gradient in zip(names, one.gradients, strict=True) if not gradient.isfinite().all()]


def _where(strategy: Strategy, samples: Samples, step: int, worker: int) -> tuple[str, tuple[int, ...]]:
    """One worker in one step in words, and the numbers of its samples; refuses one that is not finite."""
    indices, epochs = strategy.feed.samples_of(step, worker)
    check_finite(samples, indices, epochs, "training")
    shown = ", ".join(map(samples.describe, indices[:SHOWN_SAMPLES])) + (", …" if len(indices) > SHOWN_SAMPLES else "")
    return f"at step {step + 1} on worker {worker} (training samples {shown}, whose values are finite)", tuple(indices)
