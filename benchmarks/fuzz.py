"""Damaged, random and hostile files for every reader: each must end with a value or with a documented error.

python benchmarks/fuzz.py --cases 100000                # writes benchmarks/results/<date>-fuzz.md
python benchmarks/fuzz.py --case checkpoint:1234        # one case again, with its traceback

Each case is a file that a reader understands, changed at random: bits, bytes and stretches of it; numbers in its text;
values in its JSON; or all of it. Hashes that would stop a reader at the door are made right again in half of the cases
(checkpoints). Every case has a time limit, and the process a limit of memory, so that a hang or a bomb is a finding.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch

from fuzz_mutations import mutated
from fuzz_readers import Reader, readers
from report import Conditions, conditions
from scalewise.errors import ScalewiseError

MORE_BYTES = 1 << 30  # that the process may take beyond what it has before the first case
CASE_SECONDS = 20
SHOWN_FINDINGS = 20


class TooLong(BaseException):
    """A case has taken more than its time."""


@dataclass
class Tally:
    """How the cases of one reader ended."""

    cases: int = 0
    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0


def run(every: dict[str, Reader], cases: int, seconds: float, root: Path) -> tuple[dict[str, Tally], int]:
    """So many cases, by turns over the readers, or as many as fit the time; and by how many bytes memory grew."""
    tallies = {name: Tally() for name in every}
    warm_up(every, root)
    before = memory()
    deadline = time.monotonic() + seconds
    names = [name for name, reader in every.items() for _ in range(reader.share)]
    with limited_memory():
        for number in range(cases):
            name = names[number % len(names)]
            one_case(every[name], name, number, tallies[name], root / name)
            if time.monotonic() > deadline:
                break
    return tallies, memory() - before


def warm_up(every: dict[str, Reader], root: Path) -> None:
    """Read what is not damaged: it must be readable, and imports are then done."""
    for name, reader in every.items():
        for number in range(len(reader.seeds)):
            with folder(root / name) as place:
                reader.read(place, reader.seeds[number], random.Random(0))


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """An empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def one_case(reader: Reader, name: str, number: int, tally: Tally, path: Path) -> None:
    """Read one changed file."""
    chance = random.Random(f"{name}:{number}")
    content = mutated(chance.choice(reader.seeds), reader.seeds, chance)
    began = time.monotonic()
    tally.cases += 1
    with folder(path) as place:
        signal.alarm(CASE_SECONDS)
        try:
            reader.read(place, content, chance)
        except ScalewiseError as error:
            tally.refused[type(error).__name__] += 1
        except (Exception, TooLong) as error:
            tally.findings.append(f"{name}:{number} {type(error).__name__}: {str(error)[:200]} at {where(error)}")
        else:
            tally.read += 1
        finally:
            signal.alarm(0)
    tally.longest_seconds = max(tally.longest_seconds, time.monotonic() - began)


def where(error: BaseException) -> str:
    """The innermost line of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "scalewise" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def memory() -> int:
    """What this process holds now, in bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let the process take no more than some memory beyond what it has; more is a MemoryError."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def to_markdown(tallies: dict[str, Tally], growth: int, seconds: float, under: Conditions) -> str:
    """The table."""
    cases = sum(tally.cases for tally in tallies.values())
    findings = [finding for tally in tallies.values() for finding in tally.findings]
    lines = [
        f"# Damaged and hostile files, {under.date[:10]}",
        "",
        f"- command: `{under.command}`",
        f"- commit: {under.commit}{', with changes that are not committed' if under.dirty else ''}",
        f"- Python {under.python}; torch {under.versions['torch']}; {under.cpu}, {under.cores} cores; {seconds:,.0f} s",
        "",
        *(line.strip() for line in (__doc__ or "").strip().splitlines()[5:]),
        "",
        f"{cases:,} cases, {len(findings)} findings (anything but a value or a documented error, more than "
        f"{CASE_SECONDS} s, or more than {MORE_BYTES >> 20:,} MB of memory). The process held {growth / 1e6:+.1f} MB "
        "more after the last case than before the first.",
        "",
        "| reader | cases | read | refused, by error | longest, s | findings |",
        "| --- " * 6 + "|",
        *(
            f"| {name} | {tally.cases:,} | {tally.read:,} | "
            f"{', '.join(f'{kind} {count:,}' for kind, count in sorted(tally.refused.items()))} | "
            f"{tally.longest_seconds:.2f} | {len(tally.findings)} |"
            for name, tally in tallies.items()
        ),
        "",
        *(f"- {finding}" for finding in findings[:SHOWN_FINDINGS]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def again(every: dict[str, Reader], case: str, root: Path) -> None:
    """One case once more, with whatever it raises."""
    name, _, number = case.partition(":")
    chance = random.Random(case)
    content = mutated(chance.choice(every[name].seeds), every[name].seeds, chance)
    print(f"case {number}: {content[:2000]!r}", file=sys.stderr)
    with folder(root / name) as place:
        every[name].read(place, content, chance)


def main() -> None:
    """Fuzz and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--case")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        every = readers(Path(place) / "seeds")
        if options.case:
            again(every, options.case, Path(place))
            return
        now = datetime.now().astimezone()
        under = conditions(f"python benchmarks/fuzz.py --cases {options.cases}", 1, options.cases, now)
        began = time.monotonic()
        tallies, growth = run(every, options.cases, options.seconds, Path(place) / "case")
    text = to_markdown(tallies, growth, time.monotonic() - began, under)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{under.date[:10]}-fuzz.md").write_text(text)
    print(text)
    sys.exit(any(tally.findings for tally in tallies.values()))


if __name__ == "__main__":
    main()
