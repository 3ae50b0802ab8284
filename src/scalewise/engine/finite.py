"""Which worker's gradient of which parameter is not finite."""

from __future__ import annotations

import math

import torch.distributed as dist

from scalewise.engine.strategies.protocol import StepNumbers, Strategy, WorkerStep
from scalewise.engine.team import Team


def overflows(numbers: StepNumbers) -> bool:
    """Whether a step's mean gradient is not finite, where that is known without waiting: on a CPU, if measured."""
    square = numbers.squared_norm
    return square is not None and square.is_cpu and not math.isfinite(square)


def first_broken(strategy: Strategy, step: int, team: Team) -> tuple[int, str] | None:
    """The first worker with a gradient that is not finite, and its first such parameter; the same on every process."""
    names = [*strategy.model.parameters]
    mine = [(one.worker, name) for one in strategy.worker_steps(step) for name in broken_parameters(one, names)]
    found = [mine[:1]]
    if team.size > 1:
        found *= team.size
        dist.all_gather_object(found, mine[:1])
    return min((first for one in found for first in one), default=None, key=lambda first: first[0])


def broken_parameters(one: WorkerStep, names: list[str]) -> list[str]:
    """The parameters whose gradients are not finite."""
    return [name for name, gradient in zip(names, one.gradients, strict=True) if not gradient.isfinite().all()]
