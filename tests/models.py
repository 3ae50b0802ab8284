"""Tasks that the tests train, beside the built-in ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

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
