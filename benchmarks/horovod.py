"""What `scalewise.horovod.torch` costs, beside DistributedDataParallel and an all-reduce by hand in the same loop.

python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/horovod.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import scalewise.horovod.torch as hvd
from report import conditions
from scalewise.tasks.mnist import cnn

Case = Callable[[], tuple[nn.Module, Tensor, Tensor]]
Step = Callable[[], None]


def images() -> tuple[nn.Module, Tensor, Tensor]:
    return cnn(bn=True), torch.rand(64, 1, 28, 28), torch.randint(10, (64,))


def dense() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.rand(128, 784), torch.randint(10, (128,))


CASES: dict[str, Case] = {
    "fashion-mnist with batch norm, 64": images,
    "three dense layers of 1.9 M weights, 128": dense,
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def by_hand(case: Case) -> Step:
    """One flat all-reduce after backward."""
    model, x, y = case()
    optimizer = sgd(model)
    parameters = [*model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        optimizer.step()

    return step


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def by_ddp(case: Case) -> Step:
    model, x, y = case()
    # Like the others: batch-norm buffers stay as they are.
    return plain(DistributedDataParallel(model, broadcast_buffers=False), sgd(model), x, y)


def by_horovod(case: Case) -> Step:
    model, x, y = case()
    return plain(model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()), x, y)


CONTESTANTS: dict[str, Callable[[Case], Step]] = {"by hand": by_hand, "ddp": by_ddp, "horovod": by_horovod}


def timed(step: Step, count: int) -> tuple[float, float]:
    """Seconds of a step, by the clock and of computing, after two that are not timed."""
    for _ in range(2):
        step()
    hvd.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def measured(case: Case, rounds: int, count: int) -> dict[str, object]:
    """Ratios of a Horovod step to the others' in the same round."""
    steps = {name: make(case) for name, make in CONTESTANTS.items()}
    names = [*steps]
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names[number % 3 :] + names[: number % 3]:
            seen[name].append(timed(steps[name], count))
    table: dict[str, object] = {"step_milliseconds": statistics.median(wall for wall, _ in seen["ddp"][1:]) * 1e3}
    for other in ("by hand", "ddp"):
        for kind, which in enumerate(("wall", "cpu")):
            pairs = zip(seen["horovod"][1:], seen[other][1:], strict=True)
            quartiles = statistics.quantiles([mine[kind] / theirs[kind] for mine, theirs in pairs], n=4)
            table[f"{which} to {other}"] = [round(value, 3) for value in quartiles]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    words = f"python -m torch.distributed.run --standalone --nproc-per-node {hvd.size()} benchmarks/horovod.py"
    command = f"{words} --rounds {arguments.rounds} --steps {arguments.steps}"
    found = conditions(command, 1, arguments.rounds, datetime.now())
    rows = {name: measured(case, arguments.rounds, arguments.steps) for name, case in CASES.items()}
    if hvd.rank() == 0:
        print(json.dumps({"conditions": asdict(found), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
