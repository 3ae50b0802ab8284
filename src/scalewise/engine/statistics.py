"""Batch-norm statistics that are right at evaluation.

Running averages forget over 1 ÷ momentum steps. After few steps of a large global batch they still hold the start
values and those of weights long gone: the lecture's network (momentum 0.01, 144 steps) scores 0.27 on test data with
them and 0.64 with statistics recomputed for the present weights. Recomputing happens around an evaluation only; the
training state, and its hash, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.engine import streams
from scalewise.engine.feed import fetched, placed
from scalewise.engine.model import PlacedModel
from scalewise.engine.samples import Samples
from scalewise.engine.workers import precision
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

SETTLED = 30.0  # so many times the averages must have been renewed before they are trusted
SAMPLES = 4096  # that the statistics are recomputed from
SMALLEST_BATCH = 64


def recomputes(recipe: Recipe, model: PlacedModel, steps: int) -> bool:
    """Whether evaluation after `steps` steps uses recomputed statistics."""
    norms = _norms(model.module)
    if not norms or recipe.statistics == "running":
        return False
    return recipe.statistics == "recomputed" or any(steps * (norm.momentum or 0.0) < SETTLED for norm in norms)


@contextmanager
def recomputed(
    task: Task,
    recipe: Recipe,
    model: PlacedModel,
    samples: Samples,
    loaders: int,
    device: torch.device,
    most: int = SAMPLES,
) -> Iterator[None]:
    """The statistics of the present weights over at most so many training samples, in place of running averages.

    Every process computes the same ones. The mean over groups of the shape that training has, each counting alike.
    """
    norms = _norms(model.module)
    kept = [(norm.momentum, [buffer.clone() for buffer in norm.buffers()]) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = None  # torch then takes the plain mean over all groups seen since the reset
            norm.reset_running_stats()
        _pass_samples(task, recipe, model, norms, samples, loaders, device, most)
        for norm, (_, buffers) in zip(norms, kept, strict=True):
            if not norm.num_batches_tracked:  # evaluation does not come here, as to a head that only training uses
                _copy(norm, buffers)
        yield
    finally:
        for norm, (momentum, buffers) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            _copy(norm, buffers)


def _copy(norm: _BatchNorm, values: list[Tensor]) -> None:
    for buffer, value in zip(norm.buffers(), values, strict=True):
        buffer.copy_(value)


@torch.no_grad()
def _pass_samples(
    task: Task,
    recipe: Recipe,
    model: PlacedModel,
    norms: list[_BatchNorm],
    samples: Samples,
    loaders: int,
    device: torch.device,
    most: int,
) -> None:
    size = recipe.rows * -(-SMALLEST_BATCH // recipe.rows)
    count = max(1, min(most, len(samples)) // size)
    stream = streams.SampleStream(len(samples), recipe.seed)
    requests = (stream.take(number * size, (number + 1) * size) for number in range(count))
    model.module.eval()
    for norm in norms:
        norm.train()
    try:
        for number, batch in enumerate(fetched(samples, requests, loaders, device)):
            streams.seed_everything(streams.key("statistics", recipe.seed, number), device)
            with precision(recipe, device):
                task.evaluate(model.module, placed(batch, device, recipe.layout))
    finally:
        model.module.train()


def _norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers whose averages training changes: not those that the model keeps in evaluation mode (frozen ones)."""
    found = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    return [norm for norm in found if norm.track_running_stats]
