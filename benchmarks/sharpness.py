"""Are minima of large global batches sharper? Keskar et al.'s metric of small- and large-batch runs, paired by seed.

python benchmarks/sharpness.py                                          # writes benchmarks/results/<date>-sharpness.md

Both kinds of run take the same number of steps with the task's own recipe but for the worker batch, so that both come
to a low loss (with as many samples the large one is far from it). The loss at their ends is reported beside, because
sharpness follows it. Adam and a dense network are the paper's first case, whose large batch is a tenth of the data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import scalewise as sw
from report import Conditions, conditions
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.runs.measure.minima import SUBSPACE, line, sharpness
from scalewise.runs.measure.surface import Weights
from scalewise.tasks.task import Task

CASES = (("mlp", 32, 512),)
Values = dict[str, list[float]]


@dataclass(frozen=True)
class Kind:
    """Runs of one task at one worker batch: numbers by name and seed."""

    task: str
    worker_batch: int
    steps: int
    values: Values


def trained(task: Task, recipe: sw.Recipe) -> tuple[Weights, float]:
    """The weights at the end, and the test accuracy."""
    with Training(task, recipe, Placement(device="cpu", noise=False), alone=True) as training:
        *_, last = training.records()
        assert isinstance(last, sw.Result)
        return training.final, last.test["accuracy"]


def measured(name: str, small: int, large: int, steps: int, seeds: int) -> tuple[Kind, Kind, list[float]]:
    """Both kinds of run, and the barriers between runs of one seed."""
    task = sw.load_task(name)
    kinds = tuple(Kind(name, batch, steps, {}) for batch in (small, large))
    barriers = []
    for seed in range(seeds):
        ends = []
        for kind in kinds:
            recipe = task.recipe.replace(worker_batch=kind.worker_batch, steps=steps, seed=seed, threads=1)
            weights, accuracy = trained(task, recipe)
            ends.append(weights)
            numbers = {"test accuracy": 100 * accuracy}
            for space, dimensions in (("all weights", None), (f"{SUBSPACE} dimensions", SUBSPACE)):
                report = sharpness(task, recipe, weights, subspace=dimensions, device="cpu")
                numbers["training loss"] = report.loss
                numbers |= {f"{space}, ε {row.epsilon:g}": row.value for row in report.rows}
            for key, value in numbers.items():
                kind.values.setdefault(key, []).append(value)
            print(name, kind.worker_batch, seed, {key: float(f"{value:.4g}") for key, value in numbers.items()})
        between = line(task, task.recipe.replace(threads=1), *ends, device="cpu").barrier
        assert between is not None
        barriers.append(between)
    return kinds[0], kinds[1], barriers


def to_markdown(found: list[tuple[Kind, Kind, list[float]]], under: Conditions, seeds: int) -> str:
    lines = [
        f"# Sharpness of small- and large-batch minima, {under.date[:10]}",
        "",
        f"- command: `{under.command}`",
        f"- commit: {under.commit}{' with changes' if under.dirty else ''}",
        f"- Python {under.python}; torch {under.versions['torch']}; {under.cpu}, {under.cores} cores, 1 thread; load "
        f"{under.load:.1f}",
        "",
        f"n = {seeds} seeds; mean ± standard deviation. 100·(max f(x + A·y) − f(x)) ÷ (1 + f(x)) on 1,024 training "
        "samples, L-BFGS-B with 10 iterations from 2 starts. The last column is large ÷ small, paired by seed: median "
        "(least to largest).",
        "",
    ]
    for small, large, barriers in found:
        lines += [
            f"## {small.task}, {small.steps:,} steps",
            "",
            f"| | worker batch {small.worker_batch} | worker batch {large.worker_batch} | large ÷ small |",
            "|---|---|---|---|",
            *(_row(name, small.values[name], large.values[name]) for name in small.values),
            "",
            f"Barrier of the training loss between the two runs of a seed: {_spread(barriers)}.",
            "",
        ]
    return "\n".join(lines)


def _row(name: str, small: list[float], large: list[float]) -> str:
    ratios = sorted(one / other for one, other in zip(large, small, strict=True))
    shown = f"{statistics.median(ratios):.3g} ({ratios[0]:.3g} to {ratios[-1]:.3g})"
    return f"| {name} | {_spread(small)} | {_spread(large)} | {shown} |"


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3g} ± {deviation:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="where to write")
    options = parser.parse_args()
    command = f"python benchmarks/sharpness.py --seeds {options.seeds} --steps {options.steps}"
    under = conditions(command, 1, options.seeds, datetime.now().astimezone())
    found = [measured(*case, options.steps, options.seeds) for case in CASES]
    path = options.results / f"{under.date[:10]}-sharpness.md"
    path.write_text(to_markdown(found, under, options.seeds))
    document = {"conditions": asdict(under), "cases": [[asdict(small), asdict(large)] for small, large, _ in found]}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
