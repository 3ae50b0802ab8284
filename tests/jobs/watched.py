"""Plain training scripts on two gloo processes with one thing wrong in each, all watched; one job runs several.

python -m torch.distributed.run --nproc-per-node 2 watched.py FOLDER PLANT…
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scalewise as sw

SAMPLES, FEATURES, LABELS = 512, 16, 4


@dataclass(frozen=True)
class Plan:
    """One script: how it differs from the healthy one."""

    batches: str = "sharded"
    worker_batch: int = 16
    epochs: int = 4
    lr: float = 0.1
    optimizer: str = "sgd"
    wrap: str = "ddp"
    norm: float | None = None
    schedule: str = "none"
    loss: str = "mean"
    micro_batches: int = 1
    skip: int | None = None
    broken: int | None = None
    tokens: bool = False
    twice: bool = False
    watched: bool = True


PLANTS = {
    "healthy": Plan(),
    "unwatched": Plan(watched=False),
    "healthy-adam-norm": Plan(optimizer="adam", lr=0.005, norm=0.1, worker_batch=32, epochs=8),
    "healthy-cosine": Plan(schedule="cosine"),
    "healthy-accumulated": Plan(micro_batches=2, worker_batch=8),
    "healthy-twice": Plan(twice=True),
    "healthy-uneven": Plan(batches="uneven", loss="weighted"),
    "healthy-tokens": Plan(tokens=True, loss="weighted", lr=0.5),
    "healthy-fsdp": Plan(wrap="fsdp", micro_batches=2, worker_batch=8),
    "same-data": Plan(batches="same seed"),
    "overlapping-shards": Plan(batches="own seed"),
    "unshuffled-epochs": Plan(batches="same epochs"),
    "unshuffled-labels": Plan(batches="sorted"),
    "unshuffled-shards": Plan(batches="cut"),
    "wrong-averaging": Plan(batches="uneven"),
    "wrong-averaging-tokens": Plan(tokens=True, lr=0.5),
    "replicas-drifted": Plan(skip=5),
    "replicas-drifted-alone": Plan(wrap="none"),
    "schedule-too-fast": Plan(schedule="cosine twice"),
    "schedule-too-fast-floor": Plan(schedule="linear twice"),
    "warm-up-missing": Plan(lr=30.0),
    "non-finite": Plan(broken=10),
    "worker-batch-too-small": Plan(norm=0.1, worker_batch=4, epochs=2),
    "statistics-lag": Plan(norm=0.01),
    "lr-not-adapted": Plan(lr=0.02, epochs=1, worker_batch=4),
    "single": Plan(lr=0.02, epochs=1, worker_batch=4),
}


def data(plan: Plan) -> TensorDataset:
    """Points with a label that a random network gives them, a tenth of them wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, LABELS, generator=generator)).argmax(1)
    wrong = torch.rand(SAMPLES, generator=generator) < 0.1
    y = torch.where(wrong, torch.randint(LABELS, (SAMPLES,), generator=generator), y)
    if plan.batches in ("sorted", "cut"):
        order = y.argsort(stable=True)
        x, y = x[order], y[order]
    return TensorDataset(x, y)


def batches(plan: Plan, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What this process trains on, epoch after epoch."""
    samples = data(plan)
    if plan.batches == "cut":
        share = SAMPLES // size
        samples = TensorDataset(*(part[rank * share : (rank + 1) * share] for part in samples.tensors))
    uneven = plan.batches == "uneven"
    batch = (24 if rank == 0 else 8) if uneven else plan.worker_batch
    if plan.batches in ("same seed", "own seed", "cut"):
        generator = torch.Generator().manual_seed(7 if plan.batches == "same seed" else rank)
        loader = DataLoader(samples, batch, shuffle=True, generator=generator, drop_last=True)
        sampler = None
    else:
        sampler = DistributedSampler(samples, size, rank, shuffle=plan.batches != "sorted", seed=1)
        loader = DataLoader(samples, batch, sampler=sampler, drop_last=True)
    for epoch in range(plan.epochs):
        if sampler is not None and plan.batches != "same epochs":
            sampler.set_epoch(epoch)
        for number, pair in enumerate(loader):
            if uneven and number >= 10:
                break
            yield pair


class Tokens(nn.Module):
    """A next-token model without memory: one embedding, one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = nn.Embedding(LABELS, 8), nn.Linear(8, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.embedding(ids))  # (sample, position, label)


def model_of(plan: Plan) -> nn.Module:
    torch.manual_seed(3)
    if plan.tokens:
        return Tokens()
    norm = [nn.BatchNorm1d(32, momentum=plan.norm)] if plan.norm else []
    return nn.Sequential(nn.Linear(FEATURES, 32), *norm, nn.ReLU(), nn.Linear(32, LABELS))


def wrapped(model: nn.Module, plan: Plan, size: int) -> nn.Module:
    if size == 1 or plan.wrap == "none":
        return model
    if plan.wrap == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return DistributedDataParallel(model)


def loss_of(plan: Plan, model: nn.Module, x: Tensor, y: Tensor, rank: int, size: int) -> Tensor:
    if plan.tokens:  # sentences of other lengths on every process
        generator = torch.Generator().manual_seed(int(y.sum()) * size + rank)
        ids = torch.randint(LABELS, (len(x), 12), generator=generator)
        lengths = torch.randint(2, 12 if rank else 4, (len(x), 1), generator=generator)
        y = torch.where(torch.arange(12) < lengths, (ids + 1) % LABELS, -100).flatten()
        output = model(ids).flatten(0, 1)
    elif plan.twice:  # two calls for one loss, as of a siamese network
        output = torch.cat([model(half) for half in x.chunk(2)])
    else:
        output = model(x)
    if plan.loss == "mean":
        return F.cross_entropy(output, y) / plan.micro_batches
    weight = (y >= 0).sum()
    everybody = weight.clone()
    if size > 1:
        dist.all_reduce(everybody)
    return F.cross_entropy(output, y, reduction="sum") * size / everybody


def scheduler_of(plan: Plan, optimizer: torch.optim.Optimizer, steps: int) -> Callable[[], None]:
    if plan.schedule == "none":
        return lambda: None
    if plan.schedule.startswith("cosine"):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    times = 2 if plan.schedule.endswith("twice") else 1

    def step() -> None:
        for _ in range(times):
            scheduler.step()

    return step


def run(plan: Plan, out: Path, rank: int, size: int) -> None:
    """Train by one plan; leave what the watcher wrote, and the truth beside it."""
    model = wrapped(model_of(plan), plan, size)
    kind = torch.optim.Adam if plan.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=plan.lr)
    steps = plan.epochs * SAMPLES // (size * plan.worker_batch * plan.micro_batches)
    advance = scheduler_of(plan, optimizer, steps)
    watcher = sw.watch(model, optimizer, out) if plan.watched else None
    norms = []
    taken = 0
    for number, (x, y) in enumerate(batches(plan, rank, size), 1):
        loss = loss_of(plan, model, x, y, rank, size)
        if watcher is not None:
            watcher.loss(loss)
        if taken == plan.broken:
            loss = loss * float("inf")
        loss.backward()
        if number % plan.micro_batches:
            continue
        taken += 1
        norms.append(full_norm(model))
        if not (taken == plan.skip and rank == 1):
            optimizer.step()
        optimizer.zero_grad()
        advance()
    if watcher is not None:
        watcher.close()
    out.mkdir(parents=True, exist_ok=True)
    weights = [parameter.detach() for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    (out / f"check-{rank}.json").write_text(json.dumps({"norms": norms, "weights": [w.tolist() for w in weights]}))


def full_norm(model: nn.Module) -> float:
    """The norm of the whole gradient, collected from all processes where it is sharded."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main() -> None:
    torch.set_num_threads(1)
    out, *plants = sys.argv[1:]
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    for name in plants:
        run(PLANTS[name], Path(out) / name, rank, size)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
