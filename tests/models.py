"""Tasks that the tests train, beside the built-in ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import scalewise as sw
from scalewise.tasks.digits import load


def double_mlp() -> sw.Task:
    """A float64 network on a hundred digits: differences are the engine's, not rounding."""
    (x, y), (tx, ty) = load()
    return sw.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double(),
        train=(x[:100].double(), y[:100]),
        test=(tx.double(), ty),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
    )


def wide_mlp() -> sw.Task:
    """Enough parameters for several buckets, so that the reduction overlaps with backward; one is never used."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3000))
            self.layers = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 900), nn.BatchNorm1d(900), nn.ReLU(), nn.Linear(900, 900), nn.ReLU(),
                nn.Linear(900, 900), nn.ReLU(), nn.Linear(900, 10),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    (x, y), (tx, ty) = load()
    return sw.Task(model=Wide, train=(x, y), test=(tx, ty), loss=F.cross_entropy, metrics={"accuracy": sw.accuracy})


def counting(declared: bool = True) -> sw.Task:
    """A model with a buffer of its own that training changes."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)
            self.register_buffer("seen", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            if self.training:
                self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.linear(x - self.seen)

    (x, y), test = load()
    buffers = {"seen": "mean"} if declared else {}
    return sw.Task(model=Counting, train=(x, y), test=test, loss=F.cross_entropy, buffers=buffers)


class Augmented(torch.utils.data.Dataset):
    """A map-style data set that draws random numbers."""

    def __init__(self) -> None:
        self.x, self.y = load()[0]

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(1, 8, 8), self.y[index]


def dataset() -> sw.Task:
    """A task over a data set instead of tensors, with an augmentation keyed per sample besides."""

    def flip(batch: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        return torch.where((keys % 2 == 0).view(-1, 1, 1, 1), x.flip(3), x), y

    return sw.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        train=Augmented(),
        test=load()[1],
        loss=F.cross_entropy,
        augment=flip,
    )


def doubled(task: sw.Task) -> sw.Task:
    """A task in float64, with few test samples: differences between strategies are then theirs, not rounding."""

    def first(data: object) -> object:
        return tree_map(lambda leaf: leaf[:64], data)

    def wide(data: object) -> object:
        return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, data)

    return dataclasses.replace(
        task, model=lambda: task.model().double(), train=wide(task.train), test=wide(first(task.test))
    )


def whole_chunks() -> sw.Task:
    """Parameters that fill the engine's chunks exactly on up to 4 processes: 8,192 numbers, 32,768 bytes."""

    def model() -> nn.Module:
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second)

    (x, _), _ = load()
    data = x, x.flatten(1)
    return sw.Task(model=model, train=data, test=data, loss=F.mse_loss)


def deep_mlp() -> sw.Task:
    """Five layers in float64: stages for four processes."""

    def model() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *layers, nn.Linear(32, 10))

    return doubled(dataclasses.replace(sw.load_task("mlp"), model=model))


class Stepped(nn.Module):
    """Layers that tensor parallelism splits, unless `peeks`: then its forward uses what is between them."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10)
        )
        self.peeks = peeks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.peeks:
            return self.layers(x)
        inner = self.layers[:2](x)
        return self.layers[2:](inner.clone()) + inner.mean(1, keepdim=True)


def stepped(how: str) -> sw.Task:
    """A step of the general form that uses the model in one way or another."""

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
        x, y = batch
        output = model.layers(x) if how == "part" else model(x=x.to(next(model.parameters()).device))
        if how == "penalty":
            output = output + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
        if how == "twice":
            output = output + model(-x)
        return sw.Loss(F.cross_entropy(output, y, reduction="sum") + 0.01 * output.square().sum(), len(y))

    train, test = load()
    return sw.Task(model=lambda: Stepped(how == "peeks"), train=train, test=test, step=step)


def few_chars() -> sw.Task:
    """The built-in transformer with a short context."""
    return sw.load_task("chars", ["context=16"])
