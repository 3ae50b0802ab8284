"""Tasks that `--recipe auto` was not developed on: other models, losses, optimizers and schedules, all small.

python benchmarks/auto.py benchmarks/held_out.py --flags "--set kind=regression" --seeds 5
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scalewise as sw
from cases import data_folder


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU, dropout: float = 0.0) -> nn.Module:
    """Dense layers with an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1])


def regression() -> sw.Task:
    """A smooth function of eight numbers with noise; mean squared error; momentum with a cosine."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(6000, 8, generator=random) * 2 - 1
    clean = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] - torch.cos(2 * x[:, 4] + x[:, 5])
    y = (clean + 0.1 * torch.randn(6000, generator=random)).unsqueeze(1)

    def error(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    return sw.Task(
        model=lambda: dense(8, 64, 64, 1),
        train=(x[1000:], y[1000:]),
        test=(x[:1000], y[:1000]),
        loss=F.mse_loss,
        metrics={"squared_error": error},
        metric="squared_error",
        higher_is_better=False,
        recipe=sw.Recipe(worker_batch=32, epochs=12.0, optimizer="momentum", lr=0.02, schedule="cosine"),
    )


def spirals() -> sw.Task:
    """Three spirals; Adam with a constant rate."""
    random = torch.Generator().manual_seed(2)
    y = torch.arange(6000) % 3
    radius = torch.rand(6000, generator=random)
    angle = 5 * radius + y * (2 * torch.pi / 3) + 0.25 * torch.randn(6000, generator=random)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return sw.Task(
        model=lambda: dense(2, 48, 48, 3, activation=nn.Tanh),
        train=(x[2000:], y[2000:]),
        test=(x[:2000], y[:2000]),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=32, epochs=15.0, optimizer="adam", lr=0.003),
    )


def clothes() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """12,000 images of fashion-mnist for training and 5,000 for testing, as numbers from 0 to 1."""
    whole = sw.load_task("fashion-mnist", [], data=data_folder())
    (images, labels), (test_images, test_labels) = whole.train, whole.test
    return (images[:12000].float() / 255, labels[:12000]), (test_images[:5000].float() / 255, test_labels[:5000])


def dropped() -> sw.Task:
    """A dense network with dropout on clothes; AdamW with decay and a falling rate."""
    train, test = clothes()
    return sw.Task(
        model=lambda: dense(784, 128, 64, 10, dropout=0.2),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=8.0, optimizer="adamw", lr=0.001, weight_decay=0.01, schedule="linear"
        ),
    )


def logistic() -> sw.Task:
    """Logistic regression on clothes; plain gradient descent with steps down."""
    train, test = clothes()
    return sw.Task(
        model=lambda: dense(784, 10),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=16, epochs=6.0, optimizer="sgd", lr=0.05, schedule="step"),
    )


def normalized() -> sw.Task:
    """A small convolutional network with batch norm on clothes; Nesterov, decay, a warm-up and a cosine."""
    train, test = clothes()

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

        return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 32), nn.Flatten(), nn.Linear(512, 10))

    return sw.Task(
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=5.0, optimizer="nesterov", lr=0.05, weight_decay=5e-4, warmup_epochs=0.5,
            schedule="cosine",
        ),
    )  # fmt: skip


KINDS: dict[str, Callable[[], sw.Task]] = {
    "regression": regression,
    "spirals": spirals,
    "dropped": dropped,
    "logistic": logistic,
    "normalized": normalized,
}


def task(kind: str = "regression") -> sw.Task:
    """One of the kinds."""
    return KINDS[kind]()
