"""Labels that the model has no output for, found before the first step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.engine.data.feed import placed
from scalewise.engine.data.samples import Samples, targets
from scalewise.engine.parallel.model import PlacedModel
from scalewise.errors import DataError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

CLASSIFYING = (F.cross_entropy, F.nll_loss)
IGNORED = -100  # torch's default ignore_index


def check_labels(
    task: Task, recipe: Recipe, model: PlacedModel, parts: dict[str, Samples], device: torch.device
) -> None:
    """Refuse whole-numbered targets of a classification that lie outside of the model's outputs."""
    if task.loss not in CLASSIFYING and not isinstance(task.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    ignored = getattr(task.loss, "ignore_index", IGNORED)
    known = {what: labels for what, samples in parts.items() if (labels := targets(samples)) is not None}
    classes = _outputs(recipe, model, next(iter(parts.values())), device) if known else None
    if classes is None:
        return
    for what, labels in known.items():
        wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            raise DataError(
                f"{what} labels must be 0 to {classes - 1}, since the model has {classes} outputs, got "
                f"{int(labels[place])} at sample {parts[what].describe(place)}; correct the labels or the model"
            )


@torch.no_grad()
def _outputs(recipe: Recipe, model: PlacedModel, samples: Samples, device: torch.device) -> int | None:
    """How many classes the model tells apart; None when one sample alone does not show it."""
    first = torch.zeros(1, dtype=torch.long)
    model.buffers.remember()
    model.module.eval()
    try:
        output = model.module(placed(samples.fetch(first, first), device, recipe.layout)[0])
    except Exception:  # whatever is wrong with the model, training will say it better
        return None
    finally:
        model.module.train()
        model.buffers.restore()
    return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None
