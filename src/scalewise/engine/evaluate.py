"""Loss and metrics over a data set: the same numbers on any number of processes.

Batch-norm statistics may be recomputed for it. Running averages forget over 1 ÷ momentum steps. After few steps of a
large global batch they still hold the start values and those of weights long gone: the lecture's network (momentum
0.01, 144 steps) scores 0.27 on test data with them and 0.64 with statistics recomputed for the present weights.
Recomputing happens around an evaluation only; the training state, and its hash, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from scalewise.engine.data import streams
from scalewise.engine.data.feed import fetched, placed
from scalewise.engine.data.samples import Samples, check_finite
from scalewise.engine.parallel.model import PlacedModel
from scalewise.engine.parallel.workers import means, numbers_tensor, precision
from scalewise.engine.processes.team import Team
from scalewise.nn.batch_norm import averaging_layers
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

SMALLEST_BATCH = 64


@torch.no_grad()
def evaluate(
    task: Task, recipe: Recipe, model: PlacedModel, samples: Samples, team: Team, loaders: int, what: str
) -> dict[str, float]:
    """Mean loss and metrics. Batches are fixed by the recipe, spread over processes, and summed in order.

    Messages call the samples `what`; `loaders` processes load data that are not in memory.
    """
    size = max(SMALLEST_BATCH, recipe.rows)
    starts = range(0, len(samples), size)
    mine = starts[team.rank :: team.size]
    requests = [torch.arange(start, min(start + size, len(samples))) for start in mine]
    batches = fetched(samples, ((indices, torch.zeros_like(indices)) for indices in requests), loaders, team.device)
    names: list[str] = []
    rows = []
    with evaluating(model.module):
        for start, indices, batch in zip(mine, requests, batches, strict=True):
            streams.seed_everything(streams.key("evaluate", recipe.seed, start), team.device)
            with precision(recipe, team.device):
                loss = task.evaluate(model.module, placed(batch, team.device, recipe.layout))
            pairs = loss.pairs()
            if not math.isfinite(pairs["loss"][0]):
                check_finite(samples, indices.tolist(), [0] * len(indices), what)
            names = [*pairs]
            rows.append([number for pair in pairs.values() for number in pair])
    names = team.shared(names)  # also on a process that had no batch
    table = numbers_tensor(rows, team.device).view(len(rows), 2 * len(names))
    counts = [len(starts[process :: team.size]) for process in range(team.size)]
    by_process = [part.tolist() for part in team.gather_rows(table, counts).wait().split(counts)]
    by_batch = [by_process[batch % team.size][batch // team.size] for batch in range(len(starts))]
    return means(names, by_batch)


SETTLED = 30.0  # times that the averages must have been renewed before they are trusted
SAMPLES = 4096  # that the statistics are recomputed from


@contextmanager
def right_statistics(
    task: Task,
    recipe: Recipe,
    model: PlacedModel,
    steps: int,
    samples: Samples,
    loaders: int,
    device: torch.device,
    most: int = SAMPLES,
) -> Iterator[None]:
    """The context in which batch-norm statistics are right for an evaluation after `steps` steps.

    Where running averages are not, they are recomputed for the present weights over at most `most` training samples:
    the mean over groups of the shape that training has, each counting alike. Every process computes the same ones.
    """
    norms = [norm for norm in averaging_layers(model.module) if norm.training]  # not frozen ones
    settled = all(steps * (norm.momentum or 0.0) >= SETTLED for norm in norms)
    settled = settled and recipe.optimizer != "schedule-free"  # whose running averages are those of y
    if recipe.statistics == "running" or not norms or (settled and recipe.statistics != "recomputed"):
        yield
        return
    kept = [(norm.momentum, [buffer.clone() for buffer in norm.buffers()]) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = None  # torch then takes the plain mean over all groups seen since the reset
            norm.reset_running_stats()
        size = recipe.rows * -(-SMALLEST_BATCH // recipe.rows)
        stream = streams.SampleStream(len(samples), recipe.seed)
        starts = range(0, size * max(1, min(most, len(samples)) // size), size)
        batches = fetched(samples, (stream.take(start, start + size) for start in starts), loaders, device)
        with torch.no_grad(), evaluating(model.module, norms):
            for number, batch in enumerate(batches):
                streams.seed_everything(streams.key("statistics", recipe.seed, number), device)
                with precision(recipe, device):
                    task.evaluate(model.module, placed(batch, device, recipe.layout))
        for norm, (_, buffers) in zip(norms, kept, strict=True):
            if not norm.num_batches_tracked:  # evaluation leaves it out, as a head that only training uses
                torch._foreach_copy_([*norm.buffers()], buffers)
        yield
    finally:
        for norm, (momentum, buffers) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            torch._foreach_copy_([*norm.buffers()], buffers)


@contextmanager
def evaluating(module: nn.Module, training: Sequence[nn.Module] = ()) -> Iterator[None]:
    """The context in which a model is evaluated, some of its layers as in training."""
    module.eval()
    for layer in training:
        layer.train()
    try:
        yield
    finally:
        module.train()
