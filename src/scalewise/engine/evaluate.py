"""Loss and metrics over a data set: the same numbers on any number of processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalewise.engine import streams
from scalewise.engine.feed import fetched, placed
from scalewise.engine.model import PlacedModel
from scalewise.engine.samples import Samples, check_finite
from scalewise.engine.team import Team
from scalewise.engine.workers import numbers_tensor, precision
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

SMALLEST_BATCH = 64


@torch.no_grad()
def evaluate(
    task: Task, recipe: Recipe, model: PlacedModel, samples: Samples, team: Team, loaders: int, what: str
) -> dict[str, float]:
    """Mean loss and metrics. Batches are fixed by the recipe, spread over processes, and summed in order.

    Arguments:
        task, recipe, model, team: what is evaluated, how and where.
        samples, what: on which data, and what to call them.
        loaders: loader processes, for data that are not in memory.
    """
    size = max(SMALLEST_BATCH, recipe.rows)
    starts = range(0, len(samples), size)
    mine = starts[team.rank :: team.size]
    requests = [torch.arange(start, min(start + size, len(samples))) for start in mine]
    batches = fetched(samples, ((indices, torch.zeros_like(indices)) for indices in requests), loaders, team.device)
    names: list[str] = []
    rows = []
    model.module.eval()
    try:
        for start, indices, batch in zip(mine, requests, batches, strict=True):
            streams.seed_everything(streams.key("evaluate", recipe.seed, start), team.device)
            with precision(recipe, team.device):
                loss = task.evaluate(model.module, placed(batch, team.device, recipe.layout))
            pairs = loss.pairs()
            if not math.isfinite(pairs["loss"][0]):
                check_finite(samples, indices.tolist(), [0] * len(indices), what)
            names = [*pairs]
            rows.append([number for pair in pairs.values() for number in pair])
    finally:
        model.module.train()
    names, width = _agree(names, team)
    table = numbers_tensor(rows, team.device).view(len(rows), width)
    counts = [len(starts[process :: team.size]) for process in range(team.size)]
    return _means(names, team.gather_rows(table, counts).wait(), counts)


def _agree(names: list[str], team: Team) -> tuple[list[str], int]:
    """The names of the numbers, also on a process that had no batch."""
    if team.size > 1:
        shared = [names]
        torch.distributed.broadcast_object_list(shared, 0)
        names = shared[0]
    return names, 2 * len(names)


def _means(names: list[str], rows: Tensor, counts: list[int]) -> dict[str, float]:
    """Means from (total, weight) pairs; rows come by process and are summed by batch."""
    by_process = iter(rows.tolist())
    parts = [[next(by_process) for _ in range(count)] for count in counts]
    ordered = [parts[batch % len(counts)][batch // len(counts)] for batch in range(sum(counts))]
    return means(names, ordered)


def means(names: list[str], rows: list[list[float]]) -> dict[str, float]:
    """Σ total ÷ Σ weight for each name, in order; 0 ÷ 0 is not a number."""
    result = {}
    for number, name in enumerate(names):
        total = sum(row[2 * number] for row in rows)
        weight = sum(row[2 * number + 1] for row in rows)
        result[name] = total / weight if weight else float("nan")
    return result
