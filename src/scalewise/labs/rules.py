"""Rules that compute whether a learner's answer is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CLOSE = 1e-6
Learned = Callable[..., Any]


def is_line_gradient(answer: Learned) -> bool:
    """(dJ/dw, dJ/db) of J = mean((w·x + b − y)²) ÷ 2, at some random lines."""
    random = np.random.default_rng(1)
    for _ in range(5):
        (w, b), x, y = random.normal(size=2), random.normal(size=7), random.normal(size=7)
        error = w * x + b - y
        if not _close(answer(w, b, x, y), ((error * x).mean(), error.mean())):
            return False
    return True


def is_logistic_gradient(answer: Learned) -> bool:
    """(dJ/dw, dJ/db) of logistic regression's mean cross-entropy."""
    random = np.random.default_rng(2)
    x, w, b = random.normal(size=(9, 3)), random.normal(size=3), 0.3
    y = (random.random(9) < 0.5).astype(float)
    dz = 1 / (1 + np.exp(-(x @ w + b))) - y
    dw, db = answer(x, y, w, b)
    return _close(dw, x.T @ dz / 9) and _close(db, dz.mean())


def is_largest_batch(answer: float, fixed_bytes: float, sample_bytes: float, budget_bytes: float) -> bool:
    """The largest whole number of samples that fits."""
    return answer == math.floor((budget_bytes - fixed_bytes) / sample_bytes)


def is_ring_bytes(answer: Learned) -> bool:
    """2·(P − 1) ÷ P · bytes."""
    cases = [(1, 1000.0), (2, 1000.0), (8, 4096.0), (5, 1e6)]
    return all(_close(answer(size, processes), 2 * (processes - 1) / processes * size) for processes, size in cases)


def is_noise_scale(answer: Learned) -> bool:
    """trΣ ÷ |G|² from L, T, c groups of b samples."""
    cases = [(3.0, 2.0, 2, 4), (10.0, 4.0, 8, 16), (1.5, 1.0, 4, 32)]
    return all(
        _close(answer(each, mean, c, b), b * c * (each - mean) / (c * mean - each)) for each, mean, c, b in cases
    )


def is_warm_up(answer: Learned) -> bool:
    """The rate at some progress: from lr to lr·workers in a straight line over the warm-up, then constant."""
    cases = [(0.0, 1.0), (1.5, 4.5), (3.0, 8.0), (10.0, 8.0)]
    return all(_close(answer(lr, 8, 3.0, epochs), factor * lr) for lr in (0.001, 0.02) for epochs, factor in cases)


def is_planned_steps(answer: Learned) -> bool:
    """⌈S₁ ÷ gain⌉ of N workers."""

    def steps(single: float, workers: int, worker_batch: int, critical: float) -> int:
        gain = (1 + critical / worker_batch) / (1 + critical / (workers * worker_batch))
        return math.ceil(single / gain - 1e-9)

    cases = [(449, 1, 32, 100.0), (449, 8, 32, 100.0), (10_000, 16, 64, 900.0)]
    return all(answer(*case) == steps(*case) for case in cases)


def _close(found: object, expected: float | Sequence[float] | np.ndarray) -> bool:
    values, wanted = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    return values.shape == wanted.shape and bool(np.allclose(values, wanted, rtol=CLOSE, atol=CLOSE))
