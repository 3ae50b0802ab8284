"""How long a step of LAMB and LARS takes beside torch's fused AdamW and SGD and other libraries; part of `make bench`.

Only the update is timed, on gradients that stay. Writes benchmarks/results/<date>-optimizers.md and .json.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import scalewise as sw
from report import Table, conditions, to_markdown, write
from rounds import Measured, Seconds, noting, now, per_step

ROUND_SECONDS = 0.05
WARM_UP_CYCLES = 2
DECAY = 0.01
NOTE = (
    "Numbers are the time of an optimizer's step relative to the baseline's round in the same cycle (below 1 is "
    "faster): median (first to third quartile) of n cycles. In every cycle each contestant, with its own parameters, "
    "takes one step that is not timed and then as many as the baseline takes in 50 ms; the first cycles do not count. "
    '"CPU" is the same with the time in which the process was computing. "Short" marks steps under 10 ms. float32, '
    f"weight decay {DECAY} for all; ours leaves vectors (biases and norm weights) without decay and adaptation, its "
    "default."
)
Maker = Callable[[list[Tensor]], Optimizer]


def matrices(total: int, count: int) -> list[tuple[int, ...]]:
    """Square matrices of one size."""
    side = round((total / count) ** 0.5)
    return [(side, side)] * count


def layers(total: int, count: int) -> list[tuple[int, ...]]:
    """As many matrices as vectors."""
    return [shape for side, _ in matrices(total, count // 2) for shape in ((side, side), (side,))]


CASES: Mapping[str, list[tuple[int, ...]]] = {
    "2 M in 60 matrices": matrices(2_000_000, 60),
    "2 M in 60 matrices and vectors": layers(2_000_000, 60),
    "25 M in 160 matrices": matrices(25_000_000, 160),
    "25 M in 160 matrices and vectors": layers(25_000_000, 160),
}


def other(module: str, name: str, **options: Any) -> Maker:  # noqa: ANN401
    """An optimizer of another library, imported when it is its turn."""
    return lambda parameters: getattr(importlib.import_module(module), name)(parameters, **options)


LAMB: Mapping[str, tuple[str, Maker]] = {
    "torch AdamW, fused": (
        "torch.optim.AdamW(fused=True)",
        lambda values: torch.optim.AdamW(values, lr=1e-3, weight_decay=DECAY, fused=True),
    ),
    "scalewise LAMB": (
        "scalewise.optim.LAMB",
        lambda values: sw.optim.LAMB(values, lr=1e-3, weight_decay=DECAY),
    ),
    "torch AdamW": (
        "torch.optim.AdamW as it is by default",
        lambda values: torch.optim.AdamW(values, lr=1e-3, weight_decay=DECAY),
    ),
    "pytorch-optimizer Lamb": (
        "pytorch_optimizer.Lamb",
        other("pytorch_optimizer", "Lamb", lr=1e-3, weight_decay=DECAY),
    ),
    "torch-optimizer Lamb": ("torch_optimizer.Lamb", other("torch_optimizer", "Lamb", lr=1e-3, weight_decay=DECAY)),
}
LARS: Mapping[str, tuple[str, Maker]] = {
    "torch SGD with momentum, fused": (
        "torch.optim.SGD(momentum=0.9, fused=True)",
        lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, weight_decay=DECAY, fused=True),
    ),
    "scalewise LARS": ("scalewise.optim.LARS", lambda values: sw.optim.LARS(values, lr=0.1, weight_decay=DECAY)),
    "torch SGD with momentum": (
        "torch.optim.SGD(momentum=0.9) as it is by default",
        lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9, weight_decay=DECAY),
    ),
    "pytorch-optimizer LARS": (
        "pytorch_optimizer.LARS",
        other("pytorch_optimizer", "LARS", lr=0.1, momentum=0.9, weight_decay=DECAY),
    ),
}


def parameters(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Weights with gradients."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for weight in found:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return found


def timed(optimizer: Optimizer, steps: int) -> Seconds:
    """What one of some steps took, after one that does not count."""
    optimizer.step()
    started = now()
    for _ in range(steps):
        optimizer.step()
    return per_step(started, now(), steps)


def measure(makers: Mapping[str, tuple[str, Maker]], shapes: list[tuple[int, ...]], cycles: int) -> Measured:
    """All by turns; each cycle starts one place further on, so that none is always first."""
    failures: dict[str, str] = {}
    ready: dict[str, Optimizer] = {}
    for name, (_, make) in makers.items():
        with noting(failures, name):
            ready[name] = make(parameters(shapes))
    names = list(ready)
    baseline = ready[names[0]]
    steps = max(1, round(ROUND_SECONDS / min(timed(baseline, 3).wall for _ in range(3))))
    measured = Measured(steps, failures=failures)
    for cycle in range(WARM_UP_CYCLES + cycles):
        start = cycle % len(names)
        for name in names[start:] + names[:start]:
            seconds = timed(ready[name], steps)
            if cycle >= WARM_UP_CYCLES:
                measured.add(name, seconds)
    return measured


def table(
    title: str,
    makers: Mapping[str, tuple[str, Maker]],
    cycles: int,
    cases: Mapping[str, list[tuple[int, ...]]],
) -> Table:
    """One optimizer and its baseline, in all cases."""
    rows = {name: what for name, (what, _) in makers.items()}
    found = {}
    for case, shapes in cases.items():
        print(f"{title}: {case} …", file=sys.stderr, flush=True)
        found[case] = measure(makers, shapes, cycles)
    return Table(title, "", next(iter(makers)), rows, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="cycles that count (21)")
    parser.add_argument("--threads", type=int, default=1, help="computing threads (1)")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="where to write")
    parser.add_argument("--quick", action="store_true", help="small parameters: does it work?")
    options = parser.parse_args()
    if options.rounds < 2 or options.threads < 1:
        parser.error(f"--rounds must be at least 2 and --threads at least 1, got {options.rounds}, {options.threads}")
    torch.set_num_threads(options.threads)
    cases = {"quick": layers(20_000, 8)} if options.quick else CASES
    quick = " --quick" if options.quick else ""
    command = f"python benchmarks/optimizers.py --rounds {options.rounds} --threads {options.threads}{quick}"
    under = conditions(command, options.threads, options.rounds, datetime.now().astimezone())
    tables = [table("LAMB", LAMB, options.rounds, cases), table("LARS", LARS, options.rounds, cases)]
    name = "optimizers" if options.threads == 1 else f"optimizers-{options.threads}-threads"
    write(tables, under, options.results, name, "Optimizers", NOTE)
    print(to_markdown(tables, under, "Optimizers", NOTE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
