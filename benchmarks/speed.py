"""How long a training step takes with scalewise, beside a loop written by hand and other tools: `make bench`.

Writes benchmarks/results/<date>-speed.md and .json. Only ratios of rounds that alternate are reported, because times
on a shared machine are not comparable from one minute to the next.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

import cases
import contestants
import jobs
import two_processes as two
from cases import Case
from own_process import apart
from report import Conditions, Table, conditions, to_markdown, write
from rounds import Contestant, Measured, Work, interleave, noting, pooled
from scalewise.runs.bench import common

RATE = "1gbit"
SETS = 2


@dataclass(frozen=True)
class Options:
    rounds: int
    threads: int
    parts: list[str]
    data: Path | None
    results: Path
    quick: bool

    @property
    def name(self) -> str:
        """What the results are called: `speed`, and the parts when not all were measured."""
        return "speed" if self.quick or len(self.parts) == len(PARTS) else "-".join(["speed", *self.parts])

    @property
    def command(self) -> str:
        """What to call to measure this again; folders are left out, since they change nothing."""
        words = [f"--rounds {self.rounds}", f"--threads {self.threads}", f"--parts {' '.join(self.parts)}"]
        return " ".join(["python benchmarks/speed.py", *words, *(["--quick"] if self.quick else [])])


def one_worker(options: Options) -> Iterator[Table]:
    wanted = cases.ONE_WORKER[:1] if options.quick else cases.ONE_WORKER
    who = [one for one in contestants.ONE_WORKER if not options.quick or one.name in contestants.QUICK]
    measured = {case.title: _alone(who, case, options) for case in wanted}
    yield Table(
        "One worker",
        "Each in a process of its own, as people run it. Data are bytes in memory; cifar10-small is without its "
        "augmentation, so that all do the same work.",
        contestants.HAND_WRITTEN,
        _rows(who),
        measured,
    )


def many_workers(options: Options) -> Iterator[Table]:
    measured = {case.title: _alone(contestants.MANY_WORKERS, case, options) for case in cases.MANY_WORKERS}
    rows = _rows(contestants.MANY_WORKERS)
    yield Table(
        "Eight workers on one process against one worker with the same global batch",
        "What the rehearsal of a cluster run costs beside the same samples at once.",
        contestants.ONE_LARGE,
        rows,
        measured,
    )
    noise = {name: rows[name] for name in (contestants.EIGHT_QUIET, contestants.EIGHT)}
    note = "The same rounds as above, relative to those without the noise scale."
    yield Table("Noise scale, eight workers on one process", note, contestants.EIGHT_QUIET, noise, measured)


def two_processes(options: Options) -> Iterator[Table]:
    measured = jobs.measure(jobs.here, cases.TWO_PROCESSES, options.rounds, options.threads, options.data)
    yield Table(
        "Two workers on two processes",
        "All in the same two processes of one job (gloo); the time of a round is that of the slower process. The "
        "batch is per process.",
        two.DDP,
        two.WHAT,
        measured,
        processes=jobs.PROCESSES,
    )
    noise = {name: two.WHAT[name] for name in (two.EXACT + two.QUIET, two.EXACT)}
    note = "The same rounds as above, relative to those without the noise scale."
    yield Table(
        "Noise scale, two workers on two processes", note, two.EXACT + two.QUIET, noise, measured, jobs.PROCESSES
    )


def link(options: Options) -> Iterator[Table]:
    title = f"Exact against allreduce over a link of {RATE}"
    note = "Two workers, each process on a host of its own: network namespaces, limited by `tc tbf` in each direction."
    reason = common.reason_unavailable()
    if reason is not None:
        yield Table(title, note, two.ALLREDUCE, two.WHAT, {}, skipped=reason)
        return
    run = jobs.over_link(RATE)
    measured = jobs.measure(run, cases.TWO_PROCESSES, options.rounds, options.threads, options.data)
    yield Table(title, note, two.ALLREDUCE, two.WHAT, measured, jobs.PROCESSES)


PARTS: dict[str, Callable[[Options], Iterator[Table]]] = {
    "one-worker": one_worker,
    "many-workers": many_workers,
    "two-processes": two_processes,
    "link": link,
}


def _alone(who: Sequence[Contestant], case: Case, options: Options) -> Measured:
    """Rounds in several sets of processes: where tensors happen to lie moves a contestant by a percent, for good."""
    print(f"{case.title} …", file=sys.stderr, flush=True)
    work = Work(case.load(options.data), case.worker_batch, options.threads)
    each = apart(who, case, options.data)
    sets = 1 if options.quick else SETS
    return pooled([interleave(each, work, -(-options.rounds // sets)) for _ in range(sets)])


def _rows(who: Sequence[Contestant]) -> dict[str, str]:
    return {contestant.name: contestant.what for contestant in who}


def options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="cycles that count (21; with --quick 3)")
    parser.add_argument("--threads", type=int, default=1, help="computing threads of each process (1)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure (all)")
    parser.add_argument("--data", type=Path, help="folder of the data files")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="where to write")
    parser.add_argument("--quick", action="store_true", help="one worker on one case, few rounds: does it work?")
    given = parser.parse_args(arguments)
    rounds = given.rounds or (3 if given.quick else 21)
    if rounds < 2 or given.threads < 1:
        parser.error(f"--rounds must be at least 2 and --threads at least 1, got {rounds} and {given.threads}")
    parts = ["one-worker"] if given.quick else given.parts
    data = given.data.resolve() if given.data else cases.data_folder()
    return Options(rounds, given.threads, parts, data, given.results, given.quick)


def measure(chosen: Options, under: Conditions) -> Path:
    """Every part in turn; what is there is written after each."""
    tables: list[Table] = []
    for part in chosen.parts:
        print(f"── {part}", file=sys.stderr, flush=True)
        failures: dict[str, str] = {}
        with noting(failures, part):
            tables += PARTS[part](chosen)
        tables += [Table(name, "", "", {}, {}, skipped=reason) for name, reason in failures.items()]
        path = write(tables, under, chosen.results, chosen.name)
    print(to_markdown(tables, under))
    return path


def main() -> int:
    chosen = options(sys.argv[1:])
    torch.set_num_threads(chosen.threads)
    path = measure(chosen, conditions(chosen.command, chosen.threads, chosen.rounds, datetime.now().astimezone()))
    print(f"written to {path.name} and .json in {chosen.results.name}/", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
