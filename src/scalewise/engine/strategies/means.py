"""From a sum over workers to the gradient that the optimizer gets."""

from __future__ import annotations

from torch import Tensor

from scalewise.engine.flat import FlatLayout
from scalewise.engine.reductions.protocol import Scale
from scalewise.recipe import Recipe


def norm_matters(recipe: Recipe) -> bool:
    """Whether the norm of the mean gradient enters the update, and not only the records."""
    return recipe.clip_norm is not None or recipe.lr_rule == "adascale"


def mean_factor(recipe: Recipe, parts: int, weights: Tensor | None) -> float:
    """What turns the sum of the workers' gradients, each ÷ worker batch, into the mean over the global batch.

    Arguments:
        recipe, parts: how large the global batch is, and how many times that in this step.
        weights: the weight of each worker's samples; None where samples count alike.
    """
    total = float(parts * recipe.global_batch) if weights is None else float(sum(weights.flatten().tolist()))
    return recipe.worker_batch / total if total else 1.0


def scaling(recipe: Recipe, layout: FlatLayout, factor: float) -> Scale:
    """Gradients times `factor`, averages divided by the number of workers."""

    def scale(stretch: Tensor, start: int) -> None:
        cut = min(max(layout.parameters_stop - start, 0), len(stretch))
        if factor != 1.0:
            stretch[:cut].mul_(factor)
        if recipe.workers > 1:
            stretch[cut:].div_(recipe.workers)

    return scale


def clip_coefficient(clip_norm: float, squared_norm: Tensor) -> Tensor:
    """What a gradient is multiplied by, as torch.nn.utils.clip_grad_norm_ has it."""
    return (clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
