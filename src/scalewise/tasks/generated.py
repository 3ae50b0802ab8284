"""Linear and logistic regression on generated data, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task, accuracy


def _design(samples: int, features: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    if samples < 10 or features < 1:
        raise TaskError(
            f"samples must be at least 10 and features at least 1, got {samples} and {features}; "
            f"change --set samples=… or --set features=…"
        )
    random = np.random.Generator(np.random.PCG64(features))
    inputs = random.standard_normal((samples, features))
    weights = random.standard_normal(features)
    return random, inputs, inputs @ weights + 0.5


def _task(name: str, inputs: np.ndarray, target: np.ndarray, lr: float, **measures: Any) -> Task:  # noqa: ANN401
    """One layer with one output; a fifth of the samples is the test data."""
    x, y = torch.from_numpy(inputs).float(), torch.from_numpy(target).float()
    cut = len(x) // 5
    return Task(
        name=name,
        model=lambda: nn.Sequential(nn.Linear(inputs.shape[1], 1), nn.Flatten(0)),
        train=(x[cut:], y[cut:]),
        test=(x[:cut], y[:cut]),
        recipe=Recipe(worker_batch=20, epochs=5.0, optimizer="sgd", lr=lr),
        **measures,
    )


def linear(samples: int = 2000, features: int = 1, noise: float = 0.5) -> Task:
    """y = w·x + b + noise; the metric is the mean squared error."""
    random, inputs, clean = _design(samples, features)
    target = clean + noise * random.standard_normal(samples)
    return _task("linear", inputs, target, 0.05, loss=F.mse_loss)


def logistic(samples: int = 2000, features: int = 8, noise: float = 0.5) -> Task:
    """Two classes split by a noisy plane."""
    random, inputs, clean = _design(samples, features)
    target = clean + noise * random.standard_normal(samples) > 0.5
    measures: dict[str, Any] = {"loss": F.binary_cross_entropy_with_logits, "metrics": {"accuracy": accuracy}}
    return _task("logistic", inputs, target, 0.5, **measures)
