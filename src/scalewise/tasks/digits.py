"""The 1,797 handwritten 8×8 digits of UCI, embedded."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np
import torch
from torch import Tensor, nn

from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task, classifier, convolution

TEST_SAMPLES = 360


def load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train (1,437) and test (360) images in [0, 1] with their labels, split once for all."""
    packed = resources.files("scalewise.tasks").joinpath("data/digits.bin.gz").read_bytes()
    rows = np.frombuffer(gzip.decompress(packed), dtype=np.uint8).reshape(1797, 65)
    rows = rows[np.random.Generator(np.random.PCG64(0)).permutation(len(rows))]
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 1, 8, 8).astype(np.float32) / 16)
    labels = torch.from_numpy(rows[:, 0].astype(np.int64))
    cut = TEST_SAMPLES
    return (images[cut:], labels[cut:]), (images[:cut], labels[:cut])


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise TaskError(f"dropout must be at least 0 and below 1, got {dropout}; change --set dropout=…")


def cnn(bn: bool, dropout: float) -> nn.Module:
    """Two 3×3 convolutions and a dense layer: 9,930 parameters, 10,026 with batch norm."""

    layers, drop = [*convolution(1, 16, bn), *convolution(16, 32, bn)], [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), *drop, nn.Linear(512, 10))


def digits(bn: bool = False, dropout: float = 0.0) -> Task:
    """8×8 digits with a small CNN, with or without batch norm and dropout."""
    _check_dropout(dropout)
    recipe = Recipe(worker_batch=32, epochs=10.0, optimizer="momentum", lr=0.02, momentum=0.9)
    return classifier("digits", lambda: cnn(bn, dropout), load(), recipe)


def mlp(hidden: int = 128, dropout: float = 0.0) -> Task:
    """8×8 digits with two hidden layers."""
    _check_dropout(dropout)
    if hidden < 2:
        raise TaskError(f"hidden must be at least 2, got {hidden}; change --set hidden=…")

    def model() -> nn.Module:
        drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        wide, narrow = nn.Linear(64, hidden), nn.Linear(hidden, hidden // 2)
        return nn.Sequential(nn.Flatten(), wide, nn.ReLU(), *drop, narrow, nn.ReLU(), *drop, nn.Linear(hidden // 2, 10))

    return classifier("mlp", model, load(), Recipe(worker_batch=32, epochs=10.0, optimizer="adam", lr=0.001))
