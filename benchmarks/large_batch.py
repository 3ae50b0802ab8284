"""Optimizers for large batches against one worker, over seeds and rates; what is missing is trained.

python benchmarks/large_batch.py digits table --workers 8 32 --seeds 2    # continues where it was stopped

All get one course: 0.39 · √workers times one worker's samples, 10 % warm-up, cosine, and a weight decay whose sum of
rate × decay is about 0.3. Schedule-Free keeps its rate after the warm-up, once also with the cosine.
Tasks are digits and the kinds of held_out.py. One training at a time, one process, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import held_out
import scalewise as sw
from report import conditions
from scalewise.engine.candidates import MEAN_RATE, candidate
from scalewise.records import write_atomically

DECAY = 0.3  # the sum of rate × weight decay over a training
GROWTH = 0.39  # samples of N workers: this times √N those of one, at least 1
KEPT = Path(__file__).with_name("results") / "2026-11-18-optimizers-large-batch.json"
ONE = "one worker"
RATES: dict[tuple[str, str], list[float]] = {
    ("soap", "cosine"): [0.003, 0.01, 0.03],
    ("schedule-free", "constant"): [0.01, 0.03, 0.1],
    ("schedule-free", "cosine"): [0.03],
}
MORE = {"recurrent": {("soap", "cosine"): [0.1], ("schedule-free", "constant"): [0.3]}}  # the largest was the best


@dataclass(frozen=True)
class Row:
    """A training without its seed: a name for the table, and what it changes in the task's recipe."""

    name: str
    workers: int
    changes: dict[str, Any]


def load(task: str) -> sw.Task:
    """A kind of held_out.py, or a built-in task."""
    kind = getattr(held_out, task, None)
    return kind() if kind else sw.load_task(task)


def rows(task: sw.Task, kind: str, workers: int) -> Iterator[Row]:
    """Muon as the race has it, and the others by the same course."""
    samples = len(task.train[1] if isinstance(task.train, tuple) else task.train)
    given = {"workers": workers, "schedule": "cosine"}
    single = task.recipe.epochs * samples / task.recipe.worker_batch
    steps = max(100, round(single * max(1.0, GROWTH * workers**0.5) / workers))
    muon = {**candidate("muon", task.recipe, given, samples, steps).fields, **given}
    yield Row(f"muon {muon['lr']:g}", workers, muon)
    for (name, schedule), rates in RATES.items():
        for lr in rates + MORE.get(kind, {}).get((name, schedule), []):
            decay = float(f"{DECAY / (lr * MEAN_RATE[schedule] * steps):.3g}")
            course = {**muon, "optimizer": name, "lr": lr, "schedule": schedule, "weight_decay": decay, "momentum": 0.9}
            told = ", cosine" if (name, schedule) == ("schedule-free", "cosine") else ""
            yield Row(f"{name} {lr:g}{told}", workers, course)


def trained(task: sw.Task, row: Row, seed: int) -> dict[str, Any]:
    """What one training gave."""
    recipe = task.recipe.replace(seed=seed, threads=1, **row.changes)
    try:
        *_, result = sw.train(task, recipe, sw.Placement(device="cpu"))
    except sw.ScalewiseError as error:
        return {"test": None, "steps": None, "seconds": None, "error": str(error)}
    assert isinstance(result, sw.Result)
    metric = task.metric or "accuracy"
    return {"test": result.test[metric], "steps": result.steps, "seconds": round(result.seconds, 1)}


def table(kept: dict[str, dict[str, Any]]) -> str:
    """Every row with the mean over its seeds, their range and their number."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for key, found in kept.items():
        task, workers, name, _ = key.split("|")
        grouped.setdefault((task, workers, name), []).append(found)
    head = "| task | workers | optimizer and rate | steps | n | test, mean (lowest to highest) |"
    lines = [head, "|---|---|---|---|---|---|"]
    for (task, workers, name), outcomes in grouped.items():
        values = [one["test"] for one in outcomes if one["test"] is not None]
        shown = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else "diverged"
        lines.append(f"| {task} | {workers} | {name} | {outcomes[0]['steps']} | {len(outcomes)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    kept: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in range(options.seeds):
        for workers in options.workers:
            for name in options.tasks:
                task = load(name)
                for row in (Row(ONE, 1, {}), *rows(task, name, workers)):
                    key = f"{name}|{row.workers}|{row.name}|{seed}"
                    if key not in kept:
                        kept[key] = trained(task, row, seed)
                        write_atomically(KEPT, json.dumps(kept, indent=1) + "\n")
    under = conditions("python benchmarks/large_batch.py …", 1, 1, datetime.now().astimezone())
    print(
        f"- torch {under.versions['torch']}; {under.cpu}, {under.cores} cores, CPU, 1 thread; commit {under.commit}\n"
    )
    print(table(kept))


if __name__ == "__main__":
    main()
