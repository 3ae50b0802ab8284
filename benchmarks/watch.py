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
from dataclasses import asdict, dataclass
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
    model = CharacterModel(65, 64, 64, 2, 0.0)
    return model, torch.randint(65, (32, 64)), torch.randint(65, (32, 64))


CASES: dict[str, Callable[[], Case]] = {
    "fashion-mnist with batch norm, 64": images,
    "three dense layers of 1.9 M weights, 128": dense,
    "character transformer, 32 × 64": text,
}


@dataclass(frozen=True)
class Round:
    """Mean times of a round's steps: the first ones, the settled ones, their computing alone, and that of the hooks."""

    first_seconds: float
    seconds: float
    cpu_seconds: float
    hook_seconds: float


def one_round(case: Case, optimizer: torch.optim.Optimizer, count: int, folder: Path | None) -> Round:
    """Train for some steps, watched if there is a folder."""
    model, x, y = case
    seconds: list[float] = []
    cpu_began, spent = 0.0, 0.0
    with ExitStack() as stack:
        watcher = stack.enter_context(sw.watch(model, optimizer, folder)) if folder else None
        for number in range(count):
            if number == SETTLED:
                cpu_began = time.process_time()
            began = time.perf_counter()
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            if watcher is not None:
                watcher.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            spent += watcher.spent_seconds if watcher is not None and number >= SETTLED else 0.0
    settled = count - SETTLED
    cpu = (time.process_time() - cpu_began) / settled
    return Round(statistics.mean(seconds[:SETTLED]), statistics.mean(seconds[SETTLED:]), cpu, spent / settled)


def measure(case: Case, rounds: int, count: int, root: Path) -> dict[str, object]:
    """Ratios of mean step times, watched to not, round by round."""
    optimizer = torch.optim.SGD(case[0].parameters(), lr=1e-3, momentum=0.9)
    one_round(case, optimizer, SETTLED + 8, None)
    pairs: list[tuple[Round, Round]] = []
    for number in range(rounds):
        both = {}
        for watched in [False, True] if number % 2 else [True, False]:
            both[watched] = one_round(case, optimizer, count, root / f"{number}" if watched else None)
        pairs.append((both[True], both[False]))
    return {
        "step_milliseconds": statistics.median(plain.seconds for _, plain in pairs) * 1e3,
        "ratio": spread([watched.seconds / plain.seconds for watched, plain in pairs]),
        "cpu_ratio": spread([watched.cpu_seconds / plain.cpu_seconds for watched, plain in pairs]),
        "first_steps_ratio": spread([watched.first_seconds / plain.first_seconds for watched, plain in pairs]),
        "hooks_share": spread([watched.hook_seconds / watched.seconds for watched, _ in pairs]),
        "rounds": rounds,
        "steps": count,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    first, median, third = statistics.quantiles(values, n=4)
    return {"median": median, "first_quartile": first, "third_quartile": third}


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
