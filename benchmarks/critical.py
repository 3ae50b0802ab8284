"""The critical batch measured directly, and how well its law predicts a global batch that it has not seen.

Goes on where it was when it is stopped and started again with the same --runs: one process per core, all trials stored.
Writes benchmarks/results/<date>-critical.md and .json with every task that is complete there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from report import Conditions, conditions
from scalewise import records
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.errors import Interrupted
from scalewise.records import Step
from scalewise.runs.measure.critical.branch import BranchReport, branch
from scalewise.runs.measure.critical.sweep import MOST_SEEDS, TUNING_SEEDS, SweepReport, constant_rate, sweep
from scalewise.stats.critical_batch import CriticalBatch, agreement, from_noise
from scalewise.stats.interval import Interval
from scalewise.tasks import BUILT_IN
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Task

PARTS = 4  # micro batches of a worker, from which the noise scale is measured
NOTE = """Steps are the median and its standard error (least to most) over n seeds that arrived, at the rate that took
the fewest on other seeds, of six tried at every global batch; constant rate, validation loss on a tenth of the training
data that is held out. Seeds are added until the error of the median is below 3 %, up to 64 (fashion-mnist: 24).
"Held out" is what the law says of a global batch when it is fitted to all others."""


@dataclass(frozen=True)
class Case:
    """A task and the loss to reach; `batches` None: the default ladder."""

    spec: str
    settings: tuple[str, ...] = ()
    target: float | None = None
    batches: tuple[int, ...] | None = None
    tuning_seeds: int = TUNING_SEEDS
    most_seeds: int = MOST_SEEDS

    @property
    def name(self) -> str:
        return " ".join((self.spec, *self.settings))


CASES: Mapping[str, Case] = {
    "digits": Case("digits", batches=(4, 8, 16, 24, 32, 64, 96, 128)),
    "fashion-mnist": Case("fashion-mnist", target=0.6, batches=(64, 128, 256, 512, 1024), most_seeds=24),
    "chars": Case("chars"),
}


@dataclass(frozen=True)
class Found:
    """What was measured of one task."""

    case: Case
    worker_batch: int
    optimizer: str
    sweep: SweepReport
    noise: CriticalBatch
    branch: BranchReport | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.case.name,
            "worker_batch": self.worker_batch,
            "optimizer": self.optimizer,
            "sweep": self.sweep.to_json(),
            "noise_scale": self.noise.to_json(),
            "branch": None if self.branch is None else self.branch.to_json(),
            "agreement": self.agreements,
            "seconds": self.seconds,
        }

    @property
    def agreements(self) -> list[str]:
        direct = [self.sweep.critical, *([] if self.branch is None else [self.branch.critical])]
        return [agreement(self.noise, measured) for measured in direct]


def measure(case: Case, seeds: int, data: Path | None, runs: Path, jobs: int | None, branches: bool) -> Found:
    task = load_task(case.spec, case.settings, data if BUILT_IN[case.spec].source else None)
    folder = runs / case.name.replace(" ", "-")
    began = time.monotonic()

    def notify(line: str) -> None:
        print(f"{case.name}: {line}", file=sys.stderr, flush=True)

    found = sweep(
        task, task.recipe, folder=folder / "sweep", target=case.target, seeds=seeds, global_batches=case.batches,
        tuning_seeds=case.tuning_seeds, most_seeds=case.most_seeds, jobs=jobs, notify=notify,
    )  # fmt: skip
    branched = None
    if branches:
        branched = branch(task, task.recipe, folder=folder / "branch", jobs=jobs, notify=notify)
    noise = noise_scale(task, found)
    notify("; ".join(agreement(noise, direct) for direct in (found.critical,)))
    recipe = task.recipe
    return Found(case, recipe.worker_batch, recipe.optimizer, found, noise, branched, time.monotonic() - began)


def noise_scale(task: Task, found: SweepReport) -> CriticalBatch:
    """The noise scale of one worker on its way to the target, at the rate that the sweep chose for it."""
    nearest = min(found.rungs, key=lambda rung: abs(rung.global_batch - task.recipe.worker_batch))
    steps = round(nearest.median_steps)
    recipe = constant_rate(task.recipe).replace(lr=nearest.lr, micro_batch=task.recipe.worker_batch // PARTS)
    with Training(task, recipe.replace(steps=steps), Placement(), hold_out=True, alone=True) as training:
        for record in training.records():
            if isinstance(record, Step) and record.step >= steps - 1:
                break
        return from_noise([(0, training.noise.estimate())], task.recipe.worker_batch)


def to_markdown(found: Sequence[Found], under: Conditions) -> str:
    lines = [
        f"# Critical batch, {under.date[:10]}",
        "",
        f"- command: `{under.command}`",
        f"- commit: {under.commit}{', with changes that are not committed' if under.dirty else ''}",
        f"- Python {under.python}, torch {under.versions['torch']}, numpy {under.versions['numpy']}",
        f"- {under.cpu}, {under.cores} cores, no GPU used; {under.threads} computing thread per process",
        "",
        NOTE,
    ]
    for one in found:
        lines += ["", *_section(one)]
    return "\n".join(lines) + "\n"


def _section(found: Found) -> list[str]:
    report = found.sweep
    law = report.law
    predicted = {row.global_batch: row for row in report.held_out}
    lines = [
        f"## {found.case.name}: {found.optimizer}, worker batch {found.worker_batch}, loss {report.target_loss:g}",
        "",
        "| global batch | workers | learning rate | steps | samples | law | held out (95 %) | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rung in report.rungs:
        reached = [steps for steps in rung.steps if steps is not None]
        row = predicted.get(rung.global_batch)
        said = "–" if row is None else _interval(row.predicted)
        cells = [
            f"{rung.global_batch:,}",
            f"{rung.workers} × {rung.worker_batch}",
            f"{rung.lr:g}{' (last tried)' if rung.at_end else ''}",
            f"{rung.median_steps:,.1f} ± {rung.median_error:.1%} ({min(reached):,.1f}–{max(reached):,.1f}), "
            f"n={len(reached)} of {len(rung.steps)}",
            f"{rung.median_steps * rung.global_batch:,.0f}",
            f"{law.steps_at(rung.global_batch).value:,.1f}",
            said,
            "–" if row is None else f"{row.error:+.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    worst = max((abs(row.error) for row in report.held_out), default=float("nan"))
    lines += [
        "",
        f"- critical batch by the sweep: {report.critical}; residual of log steps {law.residual:.3f}",
        f"- largest error of a held-out global batch: {worst:.1%}",
        f"- noise scale of one worker on the way there ({PARTS} micro batches): {found.noise}",
        *(f"- {sentence}" for sentence in found.agreements),
        *_branch_lines(found.branch),
        *(f"- note: {note}" for note in report.notes),
    ]
    return lines


def _interval(found: Interval[float | None]) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:,.1f} (not bounded)"
    return f"{found.value:,.1f} ({found.low:,.1f}–{found.high:,.1f})"


def _branch_lines(report: BranchReport | None) -> list[str]:
    if report is None:
        return []
    lines = [
        f"- critical batch by branches of {report.branch_samples:,} samples ({report.seeds} seeds): {report.critical}"
    ]
    for stage in report.stages:
        losses = ", ".join(
            f"{workers}: {'diverged' if loss is None else f'{loss:.4f}'}" for workers, loss in stage.losses.items()
        )
        lines.append(f"  - {stage.name}, after step {stage.step}: k* = {stage.harmless}; loss by workers {losses}")
    return lines


def write(found: Sequence[Found], under: Conditions, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{under.date[:10]}-critical.md"
    document = {"conditions": asdict(under), "tasks": [one.to_json() for one in found]}
    records.write_atomically(path.with_suffix(".json"), json.dumps(records.finite(document), indent=1) + "\n")
    records.write_atomically(path, to_markdown(found, under))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=["digits"], help=f"of {', '.join(CASES)} (digits)")
    parser.add_argument("--seeds", type=int, default=5, help="at least; more are added where they scatter (5)")
    parser.add_argument("--branches", action="store_true", help="also branch off checkpoints")
    parser.add_argument("--jobs", type=int, default=None, help="trials at the same time (one per core)")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/critical"), help="where trials are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    unknown = [name for name in options.tasks if name not in CASES]
    if unknown:
        parser.error(f"tasks must be of {', '.join(CASES)}, got {unknown[0]}")
    words = [*options.tasks, f"--seeds {options.seeds}", *(["--branches"] if options.branches else [])]
    under = conditions(
        f"python benchmarks/critical.py {' '.join(words)}", 1, options.seeds, datetime.now().astimezone()
    )
    found = []
    try:
        for name in options.tasks:
            found.append(
                measure(CASES[name], options.seeds, options.data, options.runs, options.jobs, options.branches)
            )
            path = write(found, under, options.results)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
