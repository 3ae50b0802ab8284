"""Which preconditioned noise scale foretells what a larger batch is worth to Adam?

A step −η·P·ḡ changes the loss by −η·GᵀPG + ½η²(GᵀPHPG + tr(PHPΣ) ÷ B) on average, so the noise scale that counts is
tr(PHPΣ) ÷ GᵀPHPG, with the curvature H. Here H is Gauss and Newton's, of the whole task, in products with vectors: too
dear to measure in training, but what the cheap forms without H can be held against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from scalewise import Placement, Task, load_task
from scalewise.engine.loop import Training
from scalewise.runs.measure.frozen import GroupGradients

GROUPS, GROUP_SAMPLES = 89, 16
CURVATURE_SAMPLES = 256
FLOORS = (0.0, 1e-4, 1e-2)


def second_moments(training: Training) -> list[Tensor]:
    """v̂ of every parameter."""
    entries = {entry.name: entry.tensor for entry in training.strategy.state()}
    return [
        entries[f"optimizer.exp_avg_sq.{name}"].view_as(parameter)
        / (1 - training.recipe.beta2 ** float(entries[f"optimizer.step.{name}"]))
        for name, parameter in training.strategy.model.parameters.items()
    ]


def floored(moments: list[Tensor], share: float, power: float, epsilon: float) -> list[Tensor]:
    """(√v̂ + ε)^−power, v̂ being at least a share of its mean."""
    return [(part.clamp(min=share * float(part.mean())).sqrt() + epsilon) ** -power for part in moments]


class Curvature:
    """uᵀHu of the mean loss, Gauss and Newton's H, for cross-entropies over classes or characters."""

    def __init__(self, task: Task, training: Training) -> None:
        self._module = training.strategy.model.module
        self._names = [*training.strategy.model.parameters]
        data = task.train if isinstance(task.train, Tensor) else task.train[0]
        self._inputs = data[:CURVATURE_SAMPLES]
        self._counts: Tensor | None = None
        if task.step is not None:  # characters: padding does not count
            self._counts = self._inputs[:, 1:] >= 0
            self._inputs = self._inputs[:, :-1].clamp(min=0)

    def __call__(self, direction: list[Tensor]) -> float:
        weights = {name: value.detach() for name, value in self._module.named_parameters()}

        def outputs(*values: Tensor) -> Tensor:
            moved = weights | dict(zip(self._names, values, strict=True))
            return functional_call(self._module, moved, self._inputs)

        primals = tuple(weights[name] for name in self._names)
        with sdpa_kernel(SDPBackend.MATH):  # the one that knows forward derivatives
            logits, change, *_ = jvp(outputs, primals, tuple(direction))
        chances = logits.softmax(-1)
        squares = (chances * change**2).sum(-1) - (chances * change).sum(-1) ** 2
        return float(squares.mean() if self._counts is None else squares[self._counts].mean())


def noise_scale(mean_square: float, square_of_mean: float, groups: int) -> float:
    signal = (groups * square_of_mean - mean_square) / (groups - 1)
    return GROUP_SAMPLES * groups * (mean_square - square_of_mean) / (groups - 1) / signal


def in_metric(gradients: list[list[Tensor]], factors: list[Tensor] | None) -> float:
    """The simple noise scale of gradients multiplied by factors."""
    scaled = gradients if factors is None else [[g * f for g, f in zip(one, factors, strict=True)] for one in gradients]
    mean = [torch.stack(parts).mean(0) for parts in zip(*scaled, strict=True)]
    squares = [sum(float(part.double().square().sum()) for part in one) for one in scaled]
    return noise_scale(float(np.mean(squares)), sum(float(part.double().square().sum()) for part in mean), len(scaled))


def in_curvature(gradients: list[list[Tensor]], factors: list[Tensor] | None, curvature: Curvature) -> float:
    """tr(PHPΣ) ÷ GᵀPHPG."""
    steps = gradients if factors is None else [[g * f for g, f in zip(one, factors, strict=True)] for one in gradients]
    mean = [torch.stack(parts).mean(0) for parts in zip(*steps, strict=True)]
    return noise_scale(float(np.mean([curvature(one) for one in steps])), curvature(mean), len(steps))


def rows() -> Iterator[dict[str, Any]]:
    for name, steps in {"mlp": [60, 120, 224, 449], "chars": [60, 186, 372, 744]}.items():
        task = load_task(name)
        with Training(task, task.recipe.replace(threads=1), Placement(device="cpu"), alone=True) as training:
            records = training.records()
            for step in steps:
                while training.progress.step < step:
                    next(records)
                gradients = [*GroupGradients(training, GROUP_SAMPLES, key=1).take(0, GROUPS)]
                curvature, moments = Curvature(task, training), second_moments(training)
                epsilon = training.recipe.epsilon
                whole = floored(moments, 0.0, 1.0, epsilon)
                row: dict[str, Any] = {"task": name, "step": training.progress.step}
                row["curvature, adam"] = in_curvature(gradients, whole, curvature)
                row["curvature, sgd"] = in_curvature(gradients, None, curvature)
                row["plain"] = in_metric(gradients, None)
                for power, kind in ((0.5, "root"), (1.0, "whole")):
                    for floor in FLOORS:
                        row[f"{kind}, floor {floor:g}"] = in_metric(gradients, floored(moments, floor, power, epsilon))
                yield row
