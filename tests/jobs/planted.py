"""A task with delays where a test wants them: in the data set, in a layer's forward, or in its backward."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import scalewise as sw
from scalewise.tasks.digits import load


def spend(seconds: float, busy: bool) -> None:
    """Let time pass, asleep or computing."""
    until = time.perf_counter() + seconds
    while busy and time.perf_counter() < until:
        pass
    if not busy:
        time.sleep(seconds)


class Slow(Dataset):
    """Digits that take their time."""

    def __init__(self, seconds: float, busy: bool) -> None:
        self.x, self.y = load()[0]
        self.seconds, self.busy = seconds, busy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        spend(self.seconds, self.busy)
        return self.x[index], self.y[index]


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        spend(context.seconds, busy=False)
        return gradient, None


class SlowLinear(nn.Linear):
    """A layer that takes its time."""

    def __init__(self, inputs: int, outputs: int, forward: float, backward: float, busy: bool) -> None:
        super().__init__(inputs, outputs)
        self.delays, self.busy = (forward, backward), busy

    def forward(self, x: Tensor) -> Tensor:
        spend(self.delays[0], self.busy)
        return SlowGradient.apply(super().forward(x), self.delays[1]) if self.delays[1] else super().forward(x)


def task(read: float = 0.0, forward: float = 0.0, backward: float = 0.0, busy: bool = False) -> sw.Task:
    """Digits with a small network, whose second layer with weights (`3`) can be slow."""

    def model() -> nn.Module:
        slow = SlowLinear(32, 32, forward, backward, busy)
        in_place = nn.ReLU(inplace=True)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), in_place, slow, nn.ReLU(), nn.Linear(32, 10))

    return sw.Task(
        name="planted",
        model=model,
        train=Slow(read, busy) if read else load()[0],
        test=load()[1],
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=8, optimizer="momentum", lr=0.02, threads=1),
    )
