"""`--recipe auto` against one worker, paired by seed: is it as good, and does it take no more steps than the law says?

python benchmarks/auto.py digits chars --seeds 5 --workers 8 32    # goes on where it was stopped

Every run is `scalewise train` with one thread in a process of its own. What it gave is kept in
benchmarks/results/<date>-auto.json (the newest such file goes on), so a later session only runs what is missing on
its kind of processor: task, workers, seed and processor make the bytes, whatever the machine was doing, and only runs
on one kind of processor are paired. The table beside it is written after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from cases import data_folder
from report import conditions
from scalewise.records import write_atomically
from scalewise.stats.interval import Interval, not_inferior, paired_difference, spread

RESULTS = Path(__file__).with_name("results")
TEXT = """Each run is `scalewise train TASK --threads 1 --processes 1 --seed S`, with `--workers N` for auto, which is
the default then. Differences are paired by seed; intervals are 95 %, by Student's t. The law is
S = S_1 (1 + B_crit ÷ B) ÷ (1 + B_crit ÷ B_1) at the directly measured critical batch (`*-critical.json`), if there is
one. Steps are those of the training; the race before it is in a column of its own. Not inferior: the interval ends
above −0.5 points of accuracy, or below +1 % of one worker's error."""


@dataclass(frozen=True)
class Outcome:
    """What one training gave."""

    task: str
    flags: str
    workers: int
    seed: int
    metric: str
    test: float
    steps: int
    samples: int
    worker_batch: int
    weights_sha256: str
    warning: str  # what auto said of the number of workers before step 0, if anything
    commit: str
    date: str
    cpu: str = "not noted"
    search_steps: int = 0


Row = tuple[str, str, int, str]  # task, flags, workers, processor
Key = tuple[str, str, int, str, int]  # the same and the seed
Store = dict[Key, Outcome]


def key(outcome: Outcome) -> Key:
    return outcome.task, outcome.flags, outcome.workers, outcome.cpu, outcome.seed


def train(wanted: Key, data: Path | None) -> Outcome:
    """Train in a process of its own and read what it printed."""
    task, flags, workers, cpu, seed = wanted
    under = conditions("", 1, 1, datetime.now().astimezone())
    with TemporaryDirectory() as folder:
        words = ["train", task, *flags.split(), "--workers", str(workers), "--seed", str(seed), "--threads", "1"]
        place = ["--processes", "1", "--out", str(Path(folder) / "run"), "--quiet", "--json"]
        command = [sys.executable, "-m", "scalewise", *words, *place]
        environment = os.environ | ({"SCALEWISE_DATA": str(data)} if data else {})
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    metric = next(name for name in result["test"] if name != "loss")
    said = [value["reason"] for value in result["derived"] if value["field"] == "samples"]
    return Outcome(
        task, flags, workers, seed, metric, result["test"][metric], result["steps"], result["samples"],
        result["worker_batch"], result["weights_sha256"], said[0] if said else "", under.commit, under.date[:10], cpu,
        (result["search"] or {"steps": 0})["steps"],
    )  # fmt: skip


def newest_file() -> Path:
    """The newest file of outcomes since auto races, or today's."""
    found = [path for path in sorted(RESULTS.glob("*-auto.json")) if path.name >= "2026-11-18"]
    return found[-1] if found else RESULTS / f"{datetime.now().astimezone():%Y-%m-%d}-auto.json"


def load(path: Path) -> Store:
    rows = json.loads(path.read_text())["outcomes"] if path.exists() else []
    return {key(outcome): outcome for outcome in (Outcome(**row) for row in rows)}


def save(path: Path, store: Store) -> None:
    document = {"outcomes": [asdict(store[name]) for name in sorted(store)]}
    write_atomically(path, json.dumps(document, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), to_markdown(store, path.name[:10]))


def to_markdown(store: Store, date: str) -> str:
    lines = [f"# `--recipe auto` against one worker, begun {date}", "", TEXT, ""]
    lines += [
        "| task | workers × worker batch | processor | n | steps of one | of auto | of its race | times fewer "
        "| with the race "
        "| by the law | samples, auto ÷ one | one worker | auto | auto − one (95 %) | not inferior |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        _row(store, row)
        for row in sorted({(task, flags, workers, cpu) for task, flags, workers, cpu, _ in store if workers > 1})
    ]
    said = sorted(
        {
            f"{o.task} {o.flags}".strip() + f", {o.workers} workers: {o.warning}"
            for o in store.values()
            if o.warning and o.seed == 0
        }
    )
    commits = ", ".join(sorted({outcome.commit for outcome in store.values()}))
    return "\n".join(
        [
            *lines,
            "",
            *geometric_means(store),
            "",
            "What auto said before step 0 (seed 0):",
            "",
            *(f"- {line}" for line in said),
            "",
            f"Commits: {commits}.",
            "",
        ]
    )


def _row(store: Store, row: Row) -> str:
    task, flags, workers, cpu = row
    one, many = (
        {o.seed: o for o in store.values() if (o.task, o.flags, o.workers, o.cpu) == (task, flags, count, cpu)}
        for count in (1, workers)
    )
    pairs = sorted(one.keys() & many.keys())
    name = f"{task} {flags}".strip()
    if not pairs:
        return f"| {name} | {workers} | {cpu} | 0 |" + " – |" * 11
    first = many[pairs[0]]
    steps, auto_steps = _mean([one[seed].steps for seed in pairs]), _mean([many[seed].steps for seed in pairs])
    race = _mean([many[seed].search_steps for seed in pairs])
    samples = _mean([many[seed].samples for seed in pairs]) / _mean([one[seed].samples for seed in pairs])
    values = [{seed: runs[seed].test for seed in pairs} for runs in (one, many)]
    difference = paired_difference(values[1], values[0])
    law = law_steps(task, flags, steps, first.worker_batch, workers)
    cells = [
        name, f"{workers} × {first.worker_batch}", cpu, str(len(pairs)), f"{steps:,.0f}", f"{auto_steps:,.0f}",
        f"{race:,.0f}", f"{steps / auto_steps:.1f}", f"{steps / (auto_steps + race):.1f}",
        "not measured" if law is None else f"{law:,.0f} (auto {auto_steps / law:.2f} of it)", f"{samples:.1f}",
        *(_spread(list(run.values()), first.metric) for run in values), _difference(difference, first.metric),
        _verdict(difference, first.metric, _mean(list(values[0].values()))),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def law_steps(task: str, flags: str, steps: float, worker_batch: int, workers: int) -> float | None:
    """What the law of the critical batch makes of one worker's steps; None where none was measured."""
    for path in sorted(RESULTS.glob("*-critical.json"), reverse=True):
        for row in json.loads(path.read_text())["tasks"]:
            if row["task"] == task and not flags:
                critical = row["sweep"]["law"]["critical_batch"]["value"]
                return float(steps * (1 + critical / (workers * worker_batch)) / (1 + critical / worker_batch))
    return None


def _verdict(difference: Interval[float] | None, metric: str, single: float) -> str:
    if difference is None:
        return "–"
    return "yes" if not_inferior(difference, metric, single, metric == "accuracy") else "not shown"


def geometric_means(store: Store) -> list[str]:
    """For each number of workers: how many times fewer steps, without and with the race."""
    lines = []
    for workers in sorted({count for _, _, count, _, _ in store if count > 1}):
        alone, raced = [], []
        for task, flags, count, cpu in {name[:4] for name in store}:
            pairs = [
                (store[task, flags, 1, cpu, seed], store[name])
                for name in store
                for seed in [name[4]]
                if name[:4] == (task, flags, count, cpu) and count == workers and (task, flags, 1, cpu, seed) in store
            ]
            if pairs:
                single = _mean([one.steps for one, _ in pairs])
                alone.append(math.log(single / _mean([many.steps for _, many in pairs])))
                raced.append(math.log(single / _mean([many.steps + many.search_steps for _, many in pairs])))
        if alone:
            lines.append(
                f"{workers} workers, {len(alone)} tasks, geometric mean: {math.exp(_mean(alone)):.2f} times fewer "
                f"steps, {math.exp(_mean(raced)):.2f} with the race."
            )
    return lines


def _spread(values: Sequence[float], metric: str) -> str:
    found, factor = spread(values), 100 if metric == "accuracy" else 1
    assert found.mean is not None
    deviation = "" if found.std is None else f" ± {found.std * factor:.{2 if factor == 100 else 3}f}"
    return f"{found.mean * factor:.{2 if factor == 100 else 3}f}{deviation}{' %' if factor == 100 else ''}"


def _difference(found: Interval[float] | None, metric: str) -> str:
    if found is None:
        return "–"
    factor, digits = (100, 2) if metric == "accuracy" else (1, 3)
    mean, low, high = (f"{value * factor:+.{digits}f}" for value in (found.value, found.low, found.high))
    return f"{mean} ({low} to {high})".replace("-", "−")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def missing(options: argparse.Namespace, store: Mapping[Key, Outcome]) -> Iterator[Key]:
    """What is still to be run on this processor, a pair of runs at a time."""
    cpu = conditions("", 1, 1, datetime.now().astimezone()).cpu
    for seed in range(options.seeds):
        for workers in options.workers:
            for task in options.tasks:
                for wanted in ((task, options.flags, 1, cpu, seed), (task, options.flags, workers, cpu, seed)):
                    if wanted not in store:
                        yield wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--flags", default="", help="more flags for every run, as in '--epochs 6'")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--data", type=Path, default=data_folder())
    parser.add_argument("--results", type=Path, default=newest_file())
    options = parser.parse_args()
    store, lock = load(options.results), threading.Lock()

    def run(wanted: Key) -> None:
        outcome = train(wanted, options.data)
        with lock:
            store.update(load(options.results))  # another program may have added to it
            store[key(outcome)] = outcome
            save(options.results, store)
            print(outcome, flush=True)

    wanted = list(dict.fromkeys(missing(options, store)))
    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(run, wanted):
            pass
    save(options.results, store)
    print(options.results.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
