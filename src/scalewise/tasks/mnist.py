"""MNIST and Fashion-MNIST: 28×28 grey images in LeCun's IDX format, and a compact CNN for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scalewise.recipe import Recipe
from scalewise.tasks import sources
from scalewise.tasks.augment import Pixels
from scalewise.tasks.sources import FASHION_MNIST, MNIST, MNIST_PARTS, Source
from scalewise.tasks.task import Task, classifier, convolution


def load(source: Source, data: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train and test images, (sample, 1, 28, 28) bytes, with their labels."""
    contents, parts = sources.read(source, data), []
    for part in MNIST_PARTS:
        images = np.frombuffer(contents[f"{part}-images-idx3-ubyte"], np.uint8, offset=16).copy()
        labels = np.frombuffer(contents[f"{part}-labels-idx1-ubyte"], np.uint8, offset=8).astype(np.int64)
        parts.append((torch.from_numpy(images).view(-1, 1, 28, 28), torch.from_numpy(labels)))
    return parts[0], parts[1]


def cnn(bn: bool) -> nn.Module:
    """Two 3×3 convolutions with pooling and a dense layer: 3.9 M multiply-adds, 50,186 parameters (50,378 with BN)."""

    layers = [*convolution(1, 32, bn), nn.MaxPool2d(2), *convolution(32, 64, bn), nn.MaxPool2d(2)]
    return nn.Sequential(Pixels(), *layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 10))


def _task(source: Source, bn: bool, data: Path | None) -> Task:
    recipe = Recipe(
        worker_batch=64, epochs=6.0, optimizer="momentum", lr=0.01, schedule="linear", layout="channels_last"
    )
    return classifier(source.name, lambda: cnn(bn), load(source, data), recipe)


def fashion_mnist(bn: bool = True, data: Path | None = None) -> Task:
    """Clothes in ten classes (Xiao et al. 2017)."""
    return _task(FASHION_MNIST, bn, data)


def mnist(bn: bool = True, data: Path | None = None) -> Task:
    """Handwritten digits (LeCun et al. 1998)."""
    return _task(MNIST, bn, data)
