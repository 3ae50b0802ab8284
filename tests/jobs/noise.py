"""A noise scale of DistributedDataParallel's processes, beside what it should see; run by torchrun."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import scalewise as sw
from scalewise.stats.precondition import preconditioner

WORKER_BATCH, STEPS = 12, 6
Samples = tuple[torch.Tensor, torch.Tensor]


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 5))


def batches(rank: int, same: bool) -> list[Samples]:
    generator = torch.Generator().manual_seed(0 if same else rank)
    return [
        (torch.randn(WORKER_BATCH, 20, generator=generator), torch.randint(5, (WORKER_BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def train(
    rank: int, watched: bool, same: bool = False, adam: bool = False, accumulate: bool = False, head: bool = False
):
    """Weights after a few steps, the noise scale, and the gradients that it should have seen."""
    model = DistributedDataParallel(make(), bucket_cap_mb=0.05)
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind((model.module[-1] if head else model).parameters(), lr=0.01)
    monitor = sw.NoiseScale()
    if watched:
        monitor.watch_ddp(model, WORKER_BATCH, optimizer=optimizer if adam else None, layers=True)
    pairs = []
    for x, y in batches(rank, same):
        halves = [(x[:6], y[:6]), (x[6:], y[6:])] if accumulate else [(x, y)]
        pairs.append(expected(model.module, optimizer if adam else None, x, y))
        for number, (part, target) in enumerate(halves):
            with model.no_sync() if number + 1 < len(halves) else nullcontext():
                (F.cross_entropy(model(part), target) / len(halves)).backward()
        optimizer.step()
        model.zero_grad()
    return [p.detach().clone() for p in model.parameters()], monitor, pairs


def expected(model: nn.Module, optimizer, x: torch.Tensor, y: torch.Tensor) -> list[list[float]]:
    """L and T by parameter, computed apart from DistributedDataParallel."""
    alone = copy.deepcopy(model)
    F.cross_entropy(alone(x), y).backward()
    rows = []
    for parameter, twin in zip(model.parameters(), alone.parameters(), strict=True):
        factor = 1.0
        if optimizer is not None:
            state = optimizer.state.get(parameter)
            factor = preconditioner(state["exp_avg_sq"], float(state["step"]), 0.999, 1e-8) if state else float("nan")
        mine = twin.grad * factor
        mean = mine.clone()
        dist.all_reduce(mean)
        square = (mine**2).sum()
        dist.all_reduce(square)
        rows.append([float(square) / dist.get_world_size(), float(((mean / dist.get_world_size()) ** 2).sum())])
    return rows


def seen(monitor: sw.NoiseScale) -> dict[str, object]:
    state = monitor.state()  # has the newest step, though nobody asked for an estimate
    estimate = monitor.estimate()
    steps = {name: layer.state()["steps"] for name, layer in monitor.layers.items()}
    return {"all": state["steps"], "layers": steps, "verdict": estimate.verdict, "value": estimate.value}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    plain, _, _ = train(rank, watched=False)
    weights, monitor, pairs = train(rank, watched=True)
    _, identical, _ = train(rank, watched=True, same=True)
    _, preconditioned, preconditioned_pairs = train(rank, watched=True, adam=True)
    _, accumulated, accumulated_pairs = train(rank, watched=True, accumulate=True)
    _, head, head_pairs = train(rank, watched=True, adam=True, head=True)
    found = {
        "same_weights": all(map(torch.equal, plain, weights)),
        "plain": {"seen": seen(monitor), "expected": pairs},
        "identical": seen(identical),
        "preconditioned": {"seen": seen(preconditioned), "expected": preconditioned_pairs},
        "head": {"seen": seen(head), "expected": head_pairs},
        "accumulated": {"seen": seen(accumulated), "expected": accumulated_pairs},
    }
    Path(f"{sys.argv[1]}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
