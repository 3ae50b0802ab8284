"""The lecture's table again: published, on true shards, and with all workers on the same batches.

python benchmarks/lecture/table.py trains every row on real CIFAR-10 (about an hour and a half on two cores), goes on
where it was stopped, and writes benchmarks/results/<date>-lecture.{md,json} after each row. Rows that the newest such
file has are taken from there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import data_folder
from lecture.rows import ROWS, STEPS_PER_EPOCH, Row
from report import Conditions, conditions
from scalewise import Placement, load_task, records
from scalewise.engine.evaluate import evaluate
from scalewise.engine.loop import Training
from scalewise.engine.store.checkpoint import load_newest
from scalewise.engine.store.folder import RunFolder, read_recipe

KINDS = ("sharded", "unsharded")
EXPLANATION = """\
- **published**: the running mean over the last epoch's training batches; the test set was never loaded there. The
  "batch norm" row and the "scaled LR + warm-up" row are two runs of one program.
- **same batches**: the Adam programs set one seed on every worker, so that all eight drew the same 512 samples: eight
  times the machines for the gradient of one. LAMB's program set none.
- **true shards**: every worker draws its own samples, as the lecture meant it. Adam and LAMB are compared alike here.
- **test**: with batch-norm statistics recomputed for the final weights; in brackets with the running averages of the
  last step, which after 144 steps of momentum 0.99 still remember the start.
"""


@dataclass(frozen=True)
class Outcome:
    """What one training of a row gave."""

    kind: str
    seed: int
    steps: int
    train_accuracy: float  # mean over the last epoch's steps, as published
    train_loss: float
    test_accuracy: float
    running_test_accuracy: float
    samples_per_second: float
    weights_sha256: str


def train(row: Row, kind: str, seed: int, data: Path | None, runs: Path) -> Outcome | None:
    """Train a row, or go on with it, or read what is there."""
    words = row.sharded() if kind == "sharded" else row.unsharded()
    if words is None:
        return None
    same_program = next(other for other in ROWS if replace(other, name=row.name, published=row.published) == row)
    folder = runs / f"{kind}-{ROWS.index(same_program)}-seed{seed}"
    result = folder / "result.json"
    if not result.exists():
        place = ["--seed", str(seed), "--resume", "auto", "--out", str(folder), "--quiet"]
        where = ["--data", str(data)] if data else []
        subprocess.run([sys.executable, "-m", "scalewise", *words, *place, *where], check=True)
    return read(row, kind, seed, RunFolder(folder), data)


def read(row: Row, kind: str, seed: int, folder: RunFolder, data: Path | None) -> Outcome:
    """The numbers of a finished run, the lecture's way and the right way."""
    result = json.loads(folder.result.read_text())
    steps = [record for record in records.read(folder.metrics) if record["kind"] == "step"]
    last = steps[-STEPS_PER_EPOCH[row.workers] :]
    return Outcome(
        kind=kind,
        seed=seed,
        steps=result["steps"],
        train_accuracy=sum(step["metrics"]["accuracy"] for step in last) / len(last),
        train_loss=sum(step["loss"] for step in last) / len(last),
        test_accuracy=result["test"]["accuracy"],
        running_test_accuracy=_with_running_averages(folder, data),
        samples_per_second=result["samples_per_second"],
        weights_sha256=result["weights_sha256"],
    )


def _with_running_averages(folder: RunFolder, data: Path | None) -> float:
    """Test accuracy of the training state as it is."""
    run = read_recipe(folder)
    task = load_task(run.task, run.settings, data)
    with Training(task, run.recipe, Placement(device="cpu"), alone=True) as training:
        load_newest(training, folder.checkpoints)
        model = training.strategy.model
        return evaluate(task, run.recipe, model, training.test, training.team, 0, "test")["accuracy"]


def to_markdown(found: dict[str, list[Outcome]], under: Conditions) -> str:
    """The table, with what it means below."""
    lines = [
        f"# The lecture's table again, {under.date[:10]}",
        "",
        f"- command: `{under.command}`, commit {under.commit}",
        f"- torch {under.versions['torch']}, {under.cpu}, {under.cores} cores, CPU, gloo",
        "",
        "Accuracy, and loss of training.",
        "",
        "| row | published, training | same batches: training | test | true shards: training | test | images/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = [f"{row.published[0]:.4f} / {row.published[1]:.4f}"]
        for kind in ("unsharded", "sharded"):
            outcomes = [outcome for outcome in found.get(row.name, []) if outcome.kind == kind]
            cells += [_cell(outcomes, "train_accuracy", "train_loss"), _test_cell(outcomes)]
        speeds = [outcome.samples_per_second for outcome in found.get(row.name, []) if outcome.kind == "sharded"]
        cells.append(f"{_mean(speeds):,.0f}" if speeds else "–")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", EXPLANATION])


def _cell(outcomes: list[Outcome], *fields: str) -> str:
    if not outcomes:
        return "–"
    seeds = f" (n={len(outcomes)})"
    return " / ".join(f"{_mean([getattr(outcome, field) for outcome in outcomes]):.4f}" for field in fields) + seeds


def _test_cell(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return "–"
    right, running = (
        _mean([getattr(outcome, field) for outcome in outcomes]) for field in ("test_accuracy", "running_test_accuracy")
    )
    return f"{right:.4f}" + (f" ({running:.4f})" if abs(right - running) > 1e-9 else "")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def write(found: dict[str, list[Outcome]], under: Conditions, folder: Path) -> None:
    """Both files, whole."""
    stem = folder / f"{under.date[:10]}-lecture"
    document: dict[str, Any] = {
        "conditions": asdict(under),
        "rows": [
            {"name": row.name, "published": row.published, "outcomes": [asdict(o) for o in found.get(row.name, [])]}
            for row in ROWS
        ],
    }
    records.write_atomically(stem.with_suffix(".json"), json.dumps(document, indent=2) + "\n")
    records.write_atomically(stem.with_suffix(".md"), to_markdown(found, under))


def stored(folder: Path) -> dict[str, list[Outcome]]:
    """What the newest file of results holds."""
    files = sorted(folder.glob("*-lecture.json"))
    rows = json.loads(files[-1].read_text())["rows"] if files else []
    return {row["name"]: [Outcome(**outcome) for outcome in row["outcomes"]] for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--data", type=Path, default=data_folder())
    parser.add_argument("--runs", type=Path, default=Path("runs/lecture"), help="where unfinished rows are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    options = parser.parse_args()
    under = conditions(f"python benchmarks/lecture/table.py --seeds {options.seeds}", 1, 1, datetime.now().astimezone())
    found = stored(options.results)
    for seed in range(options.seeds):
        for kind in reversed(options.kinds):  # the short ones first
            for row in ROWS:
                known = found.setdefault(row.name, [])
                if any((outcome.kind, outcome.seed) == (kind, seed) for outcome in known):
                    continue
                outcome = train(row, kind, seed, options.data, options.runs)
                if outcome is not None:
                    known.append(outcome)
                    print(f"{row.name}, {kind}, seed {seed}: {outcome}", flush=True)
                    write(found, under, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
