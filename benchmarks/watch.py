"""What `sw.watch` costs: the same loop with and without it, in alternating rounds on the same model.

python benchmarks/watch.py                                                              # one process
python -m torch.distributed.run --nproc-per-node 2 benchmarks/watch.py                  # DistributedDataParallel
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import scalewise as sw
from report import conditions
from scalewise.tasks.chars import CharacterModel
from scalewise.tasks.mnist import cnn

SETTLED = 32  # steps after which watching has found its interval
Case = tuple[nn.Module, Tensor, Tensor]


def images() -> Case:
    return cnn(bn=True), torch.rand(64, 1, 28, 28), torch.randint(10, (64,))


def dense() -> Case:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.rand(128, 784), torch.randint(10, (128,))


def text() -> Case:
    model = CharacterModel(65, 128, 128, 4, 0.0)
    return model, torch.randint(65, (16, 128)), torch.randint(65, (16, 128))


CASES: dict[str, Callable[[], Case]] = {
    "fashion-mnist with batch norm, 64": images,
    "three dense layers of 1.9 M weights, 128": dense,
    "character transformer, 16 × 128": text,
}


def steps(case: Case, optimizer: torch.optim.Optimizer, count: int, folder: Path | None) -> tuple[list[float], float]:
    """Seconds of each step, and those that the hooks themselves took per step once settled."""
    model, x, y = case
    seconds: list[float] = []
    with ExitStack() as stack:
        watcher = stack.enter_context(sw.watch(model, optimizer, folder)) if folder else None
        spent = 0.0
        for number in range(count):
            began = time.perf_counter()
            output = model(x)
            loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
            if watcher is not None:
                watcher.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            if watcher is not None and number >= SETTLED:
                spent += watcher.spent_seconds
    return seconds, spent / max(count - SETTLED, 1)


def measure(case: Case, rounds: int, count: int, root: Path) -> dict[str, object]:
    """Ratios of mean step times, watched to not, round by round."""
    optimizer = torch.optim.SGD(case[0].parameters(), lr=1e-3, momentum=0.9)
    steps(case, optimizer, 20, None)
    ratios, first, own, plain_seconds = [], [], [], []
    for number in range(rounds):
        order = [False, True] if number % 2 else [True, False]
        means: dict[bool, tuple[float, float]] = {}
        for watched in order:
            seconds, spent = steps(case, optimizer, count, root / f"{number}" if watched else None)
            means[watched] = statistics.mean(seconds[:SETTLED]), statistics.mean(seconds[SETTLED:])
            if watched:
                own.append(spent)
        first.append(means[True][0] / means[False][0])
        ratios.append(means[True][1] / means[False][1])
        plain_seconds.append(means[False][1])
    step = statistics.median(plain_seconds)
    return {
        "step_milliseconds": step * 1e3,
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "first_steps_ratio": statistics.median(first),
        "own_share": statistics.median(own) / step,
        "rounds": rounds,
        "steps": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo")
    under = conditions(f"python benchmarks/watch.py --rounds {options.rounds} --steps {options.steps}", 1,
                       options.rounds, datetime.now().astimezone())  # fmt: skip
    rows = {}
    with tempfile.TemporaryDirectory() as root:
        for name, make in CASES.items():
            model, x, y = make()
            wrapped = DistributedDataParallel(model) if processes > 1 else model
            rows[name] = measure((wrapped, x, y), options.rounds, options.steps, Path(root))
            if os.environ.get("RANK", "0") == "0":
                print(name, json.dumps(rows[name]), flush=True)
    if options.out and os.environ.get("RANK", "0") == "0":
        document = {"conditions": asdict(under), "processes": processes, "rows": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
