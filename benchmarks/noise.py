"""Is the noise scale right, and what does it cost? Writes benchmarks/results/<date>-noise.md and .json.

python benchmarks/noise.py --parts coverage                # intervals on gradients of known mean and covariance
python benchmarks/noise.py --parts digits chars fashion    # against per-sample gradients at frozen checkpoints
python benchmarks/noise.py --parts mnist cifar             # beside published figures
python benchmarks/noise.py --parts curvature               # which preconditioned form agrees with the curvature
python benchmarks/noise.py --parts overhead                # what measuring costs in every step

Each row is written when it is there; parts measured before on the same day stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noise_curvature
import noise_overhead
from cases import data_folder
from noise_page import page
from noise_synthetic import QUADRATICS, SETTINGS, coverage, frozen, moving
from noise_truth import per_sample
from report import conditions
from scalewise import NoiseScale, Placement, load_task
from scalewise.engine.loop import Training
from scalewise.runs.measure.frozen import GroupGradients, PooledNoise, estimate, preconditioners
from scalewise.runs.measure.noise import measure_noise
from scalewise.stats.noise_scale import NoiseEstimate

TRIALS = 1000
FROZEN_GROUP_SAMPLES = 16
Rows = Iterator[dict[str, Any]]


def covered() -> Rows:
    """Every setting, 1,000 seeded trials each."""
    for number, setting in enumerate(SETTINGS):
        random = np.random.default_rng([1, number])
        found = coverage([frozen(setting, random) for _ in range(TRIALS)])
        yield {"gradients": "frozen", **asdict(setting), **found.to_json()}
    for number, path in enumerate(QUADRATICS):
        random = np.random.default_rng([2, number])
        found = coverage([moving(path, random) for _ in range(TRIALS)])
        yield {"gradients": "moving", **asdict(path), **found.to_json()}


def checkpoints(name: str, settings: list[str], steps: list[int], groups: int, step_groups: int = 0) -> Rows:
    """Steps of 8 groups and pooled groups against per-sample gradients, at some steps of the task's own training."""
    task = load_task(name, settings, data=data_folder() if name == "fashion-mnist" else None)
    recipe = task.recipe.replace(threads=1)
    with Training(task, recipe, Placement(device="cpu"), alone=True) as training:
        records = training.records()
        for step in steps:
            while training.progress.step < step:
                next(records)
            factors = preconditioners(training)
            began = time.perf_counter()
            by_steps, pooled = measured(training, groups, max(groups, step_groups), factors)
            middle = time.perf_counter()
            module = training.strategy.model.module.eval()  # no dropout or batch norm in any of them
            truth = per_sample(task, module, training.samples).noise_scale
            whitened = None if factors is None else per_sample(task, module, training.samples, factors).noise_scale
            module.train()
            row = {
                "task": " ".join([name, *settings]),
                "step": training.progress.step,
                "population": len(training.samples),
                "truth": truth,
                "steps": _against(by_steps, truth),
                "pooled": _against(estimate([pooled.table()]), truth),
                "pooled_samples": pooled.table().samples,
                "measure_seconds": round(middle - began, 2),
                "truth_seconds": round(time.perf_counter() - middle, 2),
            }
            table = pooled.preconditioned_table()
            if table is not None and whitened is not None:
                row["preconditioned_truth"] = whitened
                row["preconditioned"] = _against(estimate([table]), whitened)
            yield row


def measured(
    training: Training, groups: int, step_groups: int, factors: list[torch.Tensor] | None
) -> tuple[NoiseEstimate, PooledNoise]:
    """Groups as steps of eight workers for `NoiseScale`, and some of them all together."""
    population, size = len(training.samples), FROZEN_GROUP_SAMPLES
    scale, pooled = NoiseScale(population), PooledNoise(size, population, factors)
    gradients = GroupGradients(training, size, key=1)
    waiting: list[list[torch.Tensor]] = []
    for gradient in gradients.take(0, step_groups):
        if pooled.groups < groups:
            pooled.add(gradient)
        waiting.append(gradient)
        if len(waiting) == 8:
            mean_square = float(np.mean([_square(one) for one in waiting]))
            square = _square([torch.stack(parts).mean(0) for parts in zip(*waiting, strict=True)])
            scale.observe(mean_square, square, 8, size)
            waiting = []
    return scale.estimate(), pooled


def _square(gradients: list[torch.Tensor]) -> float:
    return float(sum(part.double().square().sum() for part in gradients))


def _against(found: NoiseEstimate, truth: float) -> dict[str, Any]:
    error = None if found.value is None else found.value / truth - 1
    return {**found.to_json(), "verdict": found.verdict, "relative_error": error}


def published(name: str, settings: list[str], seeds: int) -> Rows:
    """Start and average of the task's whole training, as `scalewise measure` finds them."""
    task = load_task(name, settings, data=data_folder())
    for seed in range(seeds):
        began = time.perf_counter()
        report = measure_noise(task, task.recipe.replace(threads=1, seed=seed), device="cpu", notify=print)
        seconds = round(time.perf_counter() - began)
        yield {"task": " ".join([name, *settings]), "seed": seed, "seconds": seconds, **report.to_json()}


PARTS: dict[str, Callable[[], Rows]] = {
    "coverage": covered,
    "digits": lambda: checkpoints("digits", [], [0, 60, 224, 449], groups=4 * 89, step_groups=3200),
    "chars": lambda: checkpoints("chars", [], [0, 60, 372, 744], groups=4 * 148),
    "fashion": lambda: checkpoints("fashion-mnist", ["bn=false"], [300], groups=2048),
    "mnist": lambda: published("fashion-mnist", ["bn=false"], seeds=3),
    "cifar": lambda: published("cifar10-small", ["bn=false", "augmented=false"], seeds=1),
    "curvature": noise_curvature.rows,
    "overhead": noise_overhead.rows,
    "share": noise_overhead.shares,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for part in chosen.parts:
        now = datetime.now().astimezone()
        under = conditions(f"python benchmarks/noise.py --parts {part}", threads=1, rounds=1, now=now)
        path = chosen.results / f"{under.date[:10]}-noise.json"
        rows: list[dict[str, Any]] = []
        for row in PARTS[part]():
            print(row, flush=True)
            rows.append(row)
            document = json.loads(path.read_text()) if path.exists() else {}
            document[part] = {"conditions": asdict(under), "rows": rows}
            path.write_text(json.dumps(document, indent=1) + "\n")
            path.with_suffix(".md").write_text(page(document, under.date[:10]))
        print(f"{part} is in {path.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
