"""The largest worker batch that fits, checked: it runs, twice as many do not, and the prediction is close.

SCALEWISE_DATA=… python benchmarks/memory.py                              # writes benchmarks/results/<date>-memory.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import scalewise as sw
from report import Conditions, conditions
from scalewise.engine.placement import Placement
from scalewise.recipe import Recipe
from scalewise.runs.measure.memory import parse_bytes, show_bytes
from scalewise.runs.measure.memory.largest import MemoryReport, largest_worker_batch
from scalewise.runs.measure.memory.trials import Children


@dataclass(frozen=True)
class Case:
    """A task with settings and recipe fields, a budget and a number of processes."""

    task: str
    budget: str
    settings: tuple[str, ...] = ()
    fields: tuple[tuple[str, str | int], ...] = ()
    processes: int = 1

    @property
    def title(self) -> str:
        extra = [*self.settings, *(f"{name}={value}" for name, value in self.fields)]
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{' '.join([self.task, *extra])}, {self.budget}{processes}"


@dataclass(frozen=True)
class Checked:
    """A report, and how trials of the reported worker batch and of twice as many ended."""

    case: Case
    report: MemoryReport
    seconds: float
    peaks: list[int]
    runs: int
    twice_fits: int


CASES = [
    Case("cifar10", "2GB"),
    Case("cifar10", "2GB", ("bn=true",), (("optimizer", "lamb"),)),
    Case("cifar10", "2GB", (), (("workers", 4),), processes=2),
    Case("fashion-mnist", "1GB"),
    Case("chars", "1GB"),
    Case("digits", "500MB"),
]


def check(case: Case, threads: int, trials: int) -> Checked:
    task = sw.load_task(case.task, case.settings)
    recipe: Recipe = task.recipe.replace(**dict(case.fields), threads=threads)
    budget = parse_bytes(case.budget)
    began = time.perf_counter()
    report = largest_worker_batch(task, recipe, budget=budget, processes=case.processes, notify=say)
    seconds = time.perf_counter() - began
    children = Children(
        task, recipe, Placement(), case.processes, report.process_bytes, 2 * report.largest_worker_batch
    )
    peaks = []
    for _ in range(trials):
        note = children.run(report.largest_worker_batch)
        peaks += [note.points[0][1]] if note.ended == "done" else []
    twice = sum(children.run(2 * report.largest_worker_batch).ended == "done" for _ in range(trials))
    return Checked(case, report, seconds, peaks, trials, twice)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def to_markdown(found: list[Checked], under: Conditions) -> str:
    lines = [
        f"# Largest worker batch that fits, {under.date[:10]}",
        "",
        f"- command: `{under.command}`",
        f"- commit: {under.commit}{', with changes that are not committed' if under.dirty else ''}",
        f"- Python {under.python}; torch {under.versions['torch']}; {under.cpu}, {under.cores} cores, no GPU used; "
        f"{under.threads} computing thread(s); load {under.load:.1f} at the start",
        "",
        "The budget is what all processes hold of their own together, Python, torch and data included; each gets an",
        "equal share. Peaks are those of one process above its baseline, what it holds before training. After the",
        f"search the reported worker batch and twice as many are tried again in new processes ({under.rounds} times).",
        "Trials give freed memory back, as training does that has no room to keep it.",
        "",
        "| task, budget | largest | next that does not fit | baseline | predicted peak | measured peak, median (range) "
        "| predicted ÷ measured | runs again | twice runs | search, s |",
        "| --- " * 10 + "|",
        *map(_row, found),
        "",
        "| task, budget | " + " | ".join(part.name for part in found[0].report.parts) + " | per sample |",
        "| --- " * (len(found[0].report.parts) + 2) + "|",
        *map(_parts, found),
        "",
    ]
    return "\n".join(lines)


def _row(one: Checked) -> str:
    report = one.report
    median = statistics.median(one.peaks)
    spread = f"{show_bytes(min(one.peaks))} to {show_bytes(max(one.peaks))}"
    limit = "all data fit" if report.limited_by == "data" else f"{report.smallest_that_does_not_fit:,}"
    cells = [
        one.case.title,
        f"{report.largest_worker_batch:,}",
        limit,
        show_bytes(report.baseline_bytes),
        show_bytes(report.predicted_peak_bytes),
        f"{show_bytes(median)} ({spread})",
        f"{report.predicted_peak_bytes / median:.3f}",
        f"{len(one.peaks)} of {one.runs}",
        f"{one.twice_fits} of {one.runs}",
        f"{one.seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _parts(one: Checked) -> str:
    cells = [one.case.title, *(show_bytes(part.bytes) for part in one.report.parts)]
    return f"| {' | '.join([*cells, show_bytes(one.report.bytes_per_sample)])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="computing threads (1)")
    parser.add_argument("--trials", type=int, default=3, help="trials of the reported worker batch and of twice it (3)")
    parser.add_argument("--only", help="tasks whose name begins so")
    parser.add_argument("--cases", type=int, help="only so many of them")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="where to write")
    options = parser.parse_args()
    command = f"python benchmarks/memory.py --threads {options.threads} --trials {options.trials}"
    command += f" --only {options.only}" if options.only else ""
    command += f" --cases {options.cases}" if options.cases else ""
    under = conditions(command, options.threads, options.trials, datetime.now().astimezone())
    found = []
    for case in [case for case in CASES if case.task.startswith(options.only or "")][: options.cases]:
        say(case.title)
        found.append(check(case, options.threads, options.trials))
    path = options.results / f"{under.date[:10]}-memory.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_markdown(found, under))
    document = {"conditions": asdict(under), "cases": [asdict(one) for one in found]}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
