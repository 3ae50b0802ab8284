"""What was measured, as Markdown and JSON, with everything that a number needs beside it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rounds import Measured, Spread, ratios, spread
from scalewise.engine.placement import available_cores

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIMIZER_PEERS = ["pytorch-optimizer", "torch-optimizer"]
PACKAGES = ["torch", "numpy", "scalewise", "accelerate", "lightning", "keras", *OPTIMIZER_PEERS]
SHORT_STEP_SECONDS = 0.010


@dataclass(frozen=True)
class Table:
    """Ratios to a baseline: a row per contestant, a column per case."""

    title: str
    note: str
    baseline: str
    rows: Mapping[str, str]  # a contestant's name and what it does
    cases: Mapping[str, Measured]
    processes: int = 1
    skipped: str | None = None

    def spread(self, name: str, case: str) -> Spread | None:
        measured = self.cases[case]
        return None if self.failure(name, case) else spread(ratios(measured.seconds, name, self.baseline))

    def cpu_spread(self, name: str, case: str) -> Spread | None:
        measured = self.cases[case]
        return None if self.failure(name, case) else spread(ratios(measured.cpu_seconds, name, self.baseline))

    def failure(self, name: str, case: str) -> str | None:
        failures = self.cases[case].failures
        return failures.get(name) or failures.get(self.baseline)


@dataclass(frozen=True)
class Conditions:
    """Under which a number was found."""

    date: str
    command: str
    commit: str
    dirty: bool | None
    python: str
    versions: Mapping[str, str]
    cpu: str
    cores: int
    load: float
    threads: int
    rounds: int


def conditions(command: str, threads: int, rounds: int, now: datetime) -> Conditions:
    status = _git("status", "--porcelain")
    return Conditions(
        date=now.isoformat(timespec="seconds"),
        command=command,
        commit=_git("rev-parse", "--short=12", "HEAD") or "unknown",
        dirty=None if status is None else bool(status),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cpu=_cpu(),
        cores=available_cores(),
        load=os.getloadavg()[0],
        threads=threads,
        rounds=rounds,
    )


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


NOTE = (
    "Numbers are the time of a training step relative to the baseline's round in the same cycle (below 1 is "
    "faster): median (first to third quartile) of n cycles. In every cycle each contestant takes one round of the "
    'same number of steps; rounds begin with steps that are not timed, and the first cycles do not count. "CPU" is '
    "the same with the time in which the process was computing, which leaves out waiting for a core that others "
    'use. "Short" marks steps under 10 ms. The C library keeps freed memory, for all alike where contestants share '
    "processes; in processes of their own scalewise asks for it, and others where it is said. SGD with momentum, "
    "float32, channels-last."
)


def to_markdown(tables: Sequence[Table], under: Conditions, title: str = "Speed", note: str = NOTE) -> str:
    dirty = {True: ", with changes that are not committed", False: "", None: ""}[under.dirty]
    versions = ", ".join(f"{name} {version}" for name, version in under.versions.items())
    lines = [
        f"# {title}, {under.date[:10]}",
        "",
        f"- command: `{under.command}`",
        f"- commit: {under.commit}{dirty}",
        f"- Python {under.python}; {versions}",
        f"- {under.cpu}, {under.cores} cores, no GPU used; {under.threads} computing thread(s) per process; "
        f"load {under.load:.1f} at the start",
        "",
        note,
        "",
    ]
    for table in tables:
        lines += [*_table(table), ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    lines = [f"## {table.title}", "", table.note, ""]
    if table.skipped:
        return [*lines, f"Skipped: {table.skipped}"]
    lines += [_row(["", *table.cases]), _row(["---"] * (1 + len(table.cases)))]
    lines += [_row([f"*{table.baseline}: ms per step*", *(_milliseconds(table, case) for case in table.cases)])]
    for name in table.rows:
        lines.append(_row([name, *(_cell(table, name, case) for case in table.cases)]))
    return [*lines, "", *_failures(table), *(f"- {name}: {what}." for name, what in table.rows.items())]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _milliseconds(table: Table, case: str) -> str:
    measured = table.cases[case]
    if table.failure(table.baseline, case):
        return "failed"
    found = spread(measured.seconds[table.baseline])
    short = " (short)" if found.median < SHORT_STEP_SECONDS else ""
    return f"*{1000 * found.median:.1f}{short}, {measured.steps} a round, n={found.n}*"


def _cell(table: Table, name: str, case: str) -> str:
    found = table.spread(name, case)
    if found is None:
        return "failed" if "not installed" not in (table.failure(name, case) or "") else "not installed"
    if name == table.baseline:
        return "1.00"
    cpu = table.cpu_spread(name, case) if table.processes == 1 else None
    return _text(found) + (f", CPU {_text(cpu)}" if cpu else "")


def _text(found: Spread) -> str:
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def _failures(table: Table) -> list[str]:
    reasons = {(name, table.failure(name, case)) for name in table.rows for case in table.cases}
    lines = [f"- {name} failed: {reason}" for name, reason in sorted(reasons, key=str) if reason]
    return [*lines, ""] if lines else []


def to_json(tables: Sequence[Table], under: Conditions) -> dict[str, Any]:
    return {"conditions": asdict(under), "tables": [_table_to_json(table) for table in tables]}


def _table_to_json(table: Table) -> dict[str, Any]:
    values = {"title": table.title, "note": table.note, "baseline": table.baseline, "skipped": table.skipped}
    return values | {"cases": {case: _case_to_json(table, case) for case in table.cases}}


def _case_to_json(table: Table, case: str) -> dict[str, Any]:
    measured = table.cases[case]
    rows = {}
    for name in table.rows:
        found, cpu = table.spread(name, case), table.cpu_spread(name, case)
        rows[name] = {
            "ratio": asdict(found) if found else None,
            "cpu_ratio": asdict(cpu) if cpu else None,
            "failed": table.failure(name, case),
            "seconds_per_step": measured.seconds.get(name, []),
            "cpu_seconds_per_step": measured.cpu_seconds.get(name, []),
        }
    return {"steps_per_round": measured.steps, "rows": rows}


def write(
    tables: Sequence[Table], under: Conditions, folder: Path, name: str, title: str = "Speed", note: str = NOTE
) -> Path:
    """Both files, named by the day and what was measured; returns the Markdown one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{under.date[:10]}-{name}.md"
    path.write_text(to_markdown(tables, under, title, note))
    path.with_suffix(".json").write_text(json.dumps(to_json(tables, under), indent=1) + "\n")
    return path


def described(command: str) -> list[str]:
    """Command, commit and hardware, each a line."""
    under = conditions(command, 1, 1, datetime.now())
    machine = f"{under.cpu}, {under.cores} cores, no GPU used; load {under.load:.1f} at the end"
    return [f"command: `{under.command}`", f"commit: {under.commit}", machine]


def add_part(
    folder: Path,
    title: str,
    names: Sequence[str],
    part: dict[str, Any],
    to_markdown: Callable[[dict[str, Any]], str],
) -> None:
    """Add a part to today's results files, which keep the others; `names` lead to its place."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{datetime.now():%Y-%m-%d}-{title}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    place = found
    for name in names[:-1]:
        place = place.setdefault(name, {})
    place[names[-1]] = part
    file.write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(to_markdown(found))
    print(to_markdown(found))
