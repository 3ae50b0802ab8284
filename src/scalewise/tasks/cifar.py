"""CIFAR-10 from the official binary version: the lecture's residual network, and a small one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.recipe import Recipe
from scalewise.tasks import augment, sources
from scalewise.tasks.augment import Pixels
from scalewise.tasks.sources import CIFAR10, CIFAR_RECORD
from scalewise.tasks.task import Task, classifier, convolution


def load(data: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train (50,000) and test (10,000) images, (sample, 3, 32, 32) bytes, with their labels."""
    contents = sources.read(CIFAR10, data)
    *train, test = (np.frombuffer(contents[file.name], np.uint8).reshape(-1, CIFAR_RECORD) for file in CIFAR10.files)
    return _split(np.concatenate(train)), _split(test)


def _split(records: np.ndarray) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy())
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


class Block(nn.Module):
    """1×1 (stride), 3×3 and 1×1 convolutions beside a 1×1 shortcut (He et al. 2016), all with a bias."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int, bn: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, middle, 1, stride, bn), nn.ReLU(),
            *_convolution(middle, middle, 3, 1, bn), nn.ReLU(),
            *_convolution(middle, outputs, 1, 1, bn),
        )  # fmt: skip
        self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride, bn))

    def forward(self, x: Tensor) -> Tensor:
        """Body plus shortcut."""
        return F.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, bn: bool) -> list[nn.Module]:
    """A convolution and its batch norm, with Keras's constants: ε 1e-3, running averages that keep 0.99."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
    return [convolution, nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)] if bn else [convolution]


def residual(bn: bool) -> nn.Module:
    """The lecture's network: 482,442 parameters (486,410 with batch norm), 12.1 M multiply-adds an image."""
    model = nn.Sequential(
        Pixels(),
        *_convolution(3, 64, 7, 2, bn), nn.ReLU(), nn.MaxPool2d(3, 2),
        Block(64, 64, 256, 1, bn),
        Block(256, 128, 512, 2, bn),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def cifar10(bn: bool = False, data: Path | None = None) -> Task:
    """The lecture's experiment with one worker: no augmentation, Adam, 12 epochs of 512 samples a step."""
    recipe = Recipe(worker_batch=512, epochs=12.0, optimizer="adam", lr=0.001, epsilon=1e-7, layout="channels_last")
    return classifier("cifar10", lambda: residual(bn), load(data), recipe)


def small(bn: bool = True) -> nn.Module:
    """Four 3×3 convolutions with pooling: 4.6 M multiply-adds an image, 108,586 parameters with batch norm."""

    layers: list[nn.Module] = [Pixels()]
    for inputs, outputs in pairwise((3, 16, 40, 64, 128)):
        layers += [*convolution(inputs, outputs, bn, bias=not bn), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def cifar10_small(bn: bool = True, augmented: bool = True, data: Path | None = None) -> Task:
    """A network for laptops, with flips and shifts of the training images."""
    changes = augment.images(augment.flip, augment.crop(2)) if augmented else None
    recipe = Recipe(
        worker_batch=64,
        epochs=12.0,
        optimizer="momentum",
        lr=0.05,
        weight_decay=5e-4,
        schedule="cosine",
        layout="channels_last",
    )
    return classifier("cifar10-small", lambda: small(bn), load(data), recipe, changes)
