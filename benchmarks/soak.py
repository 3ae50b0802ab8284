"""Training in a loop for hours: is anything left behind, does memory grow, does any run end with other bytes?

python benchmarks/soak.py --hours 2                    # adds a session to benchmarks/results/<date>-soak.json
python benchmarks/soak.py --hours 1 --date 2026-11-16  # goes on adding to that file

In each cycle a run of digits or of a small chars is begun by one process and gone on with by two others, or the other
way round: it is told to stop in the middle, resumes from its checkpoint, evaluates at the end of every epoch, and must
end with the bytes of an undisturbed run. All three processes live as long as the session. Now and then the same is
done with commands: `scalewise train --processes 2`, stopped by SIGTERM and resumed with `--processes 1`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from report import conditions
from scalewise.records import write_atomically
from soak_job import RECIPES, SETTINGS, Held, Part, train

PROCESSES = 2
COMMANDS_EVERY = 12  # cycles
SAVE_SECONDS = 60
MOST_GROWTH = 0.02
LEAST_SAMPLES = 16  # for quarters that mean something
MARK = "SCALEWISE_SOAK"  # in the environment of every process of a session
Members = list[subprocess.Popen[str]]
MEMBERS = ("one process", "first of two", "second of two")
COLUMNS = ("seconds", "uss", "rss", "files", "sockets", "threads", "children")


@dataclass
class Session:
    """One call: what each long-lived process held after each cycle, and what was wrong."""

    conditions: dict[str, Any]
    seconds: float = 0.0
    cycles: int = 0
    restarts: int = 0
    commands: int = 0
    samples: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in MEMBERS})
    left_processes: int = 0
    left_files: list[str] = field(default_factory=list)
    wrong_bytes: int = 0

    def add(self, number: int, found: Held) -> None:
        """Note what a process holds."""
        values = asdict(found)
        self.samples[MEMBERS[number]].append([round(self.seconds, 1), *(values[name] for name in COLUMNS[1:])])


def soak(session: Session, seconds: float, root: Path, save: Callable[[], None]) -> None:
    """Train in a loop for so many seconds."""
    began = saved = time.monotonic()
    reference = {task: undisturbed(task, root / task) for task in RECIPES}
    with trainers(1) as alone, trainers(PROCESSES) as pair:
        while session.seconds < seconds:
            cycle(session, alone, pair, reference, root / f"run-{session.cycles}")
            if session.cycles % COMMANDS_EVERY == 0:
                commands(session, reference, root / f"commands-{session.cycles}")
            session.cycles += 1
            session.seconds = time.monotonic() - began
            look_for_leaks(session, root, [os.getpid(), *(member.pid for member in [*alone, *pair])])
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                save()
    look_for_leaks(session, root, [os.getpid()])


def cycle(session: Session, alone: Members, pair: Members, reference: dict[str, str | None], folder: Path) -> None:
    """One run on one process and then two, or the other way round."""
    chance = random.Random(session.cycles)
    task = [*RECIPES][session.cycles % len(RECIPES)]
    steps = RECIPES[task].steps or 0
    folder.mkdir()
    parts = [Part(task, str(folder), chance.randrange(2, steps - 2)), Part(task, str(folder), None)]
    sides = [alone, pair]
    first = session.cycles // len(RECIPES) % 2
    begun, ended = trained(sides[first], parts[0]), trained(sides[1 - first], parts[1])
    for number, found in enumerate(ended + begun if first else begun + ended):
        session.add(number, found)
    session.restarts += 1
    check(session, reference, task, ended[0].weights_sha256)
    shutil.rmtree(folder)


def undisturbed(task: str, folder: Path) -> str | None:
    """The bytes that every run of a task must end with."""
    folder.mkdir()
    found = train(Part(task, str(folder), None))
    shutil.rmtree(folder)
    return found


def check(session: Session, reference: dict[str, str | None], task: str, found: str | None) -> None:
    """Count a run that did not end, or not with the bytes of the undisturbed one."""
    session.wrong_bytes += found is None or reference[task] != found


def commands(session: Session, reference: dict[str, str | None], folder: Path) -> None:
    """The same with commands, the first stopped by a signal as soon as it has written a checkpoint."""
    folder.mkdir()
    task = [*RECIPES][session.commands % len(RECIPES)]
    fields = RECIPES[task].model_dump(exclude_defaults=True)
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += [word for setting in SETTINGS[task] for word in ("--set", setting)]
    train = [sys.executable, "-m", "scalewise", "train", task, "--quiet", "--json", *flags]
    started = subprocess.Popen(
        [*train, "--recipe", "plain", "--processes", "2", "--checkpoint-steps", "5", "--out", "run"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while started.poll() is None and not [*folder.glob("run/checkpoints/step-*")]:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    started.wait()
    last = subprocess.run([*train, "--resume", "run", "--processes", "1"], cwd=folder, capture_output=True, text=True)
    ended = json.loads(last.stdout) if last.returncode == 0 else {"weights_sha256": None}
    check(session, reference, task, ended["weights_sha256"])
    session.commands += 1
    shutil.rmtree(folder)


@contextmanager
def trainers(count: int) -> Iterator[Members]:
    """Processes that train together for as long as the session lasts; this one only keeps the book."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    members = []
    for rank in range(count):
        itself = job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)} if count > 1 else {}
        members.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("soak_job.py"))],
                env=os.environ | itself,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield members
    finally:
        for member in members:
            assert member.stdin is not None
            member.stdin.close()
        for member in members:
            member.wait(timeout=60)


def trained(members: Members, part: Part) -> list[Held]:
    """Train a part on these processes."""
    for member in members:
        assert member.stdin is not None
        print(json.dumps(asdict(part)), file=member.stdin, flush=True)
    answers = []
    for member in members:
        assert member.stdout is not None
        answers.append(Held(**json.loads(member.stdout.readline())))
    return answers


def look_for_leaks(session: Session, root: Path, known: Sequence[int]) -> None:
    """Count processes of this session that nobody waits for, and files that outlive their run."""
    mark = os.environ[MARK]
    for process in psutil.process_iter():
        try:
            if process.pid not in known and process.environ().get(MARK) == mark:
                session.left_processes += process.status() != psutil.STATUS_ZOMBIE or process.ppid() in known
        except psutil.Error:
            continue
    session.left_files = sorted(path.name for path in root.iterdir())


def verdict(session: dict[str, Any]) -> dict[str, Any]:
    """What a session shows: growth is the median of the last quarter over that of the second; the first is warm-up."""
    found: dict[str, Any] = {}
    for name, rows in session["samples"].items():
        if len(rows) < LEAST_SAMPLES:
            return {"enough": False}
        quarter = len(rows) // 4
        columns = list(zip(*rows, strict=True))
        early, late = (
            [column[place] for column in columns] for place in (slice(quarter, 2 * quarter), slice(-quarter, None))
        )
        found[name] = {
            "growth": statistics.median(late[1]) / statistics.median(early[1]) - 1,
            "more": {what: max(late[i]) - max(early[i]) for i, what in enumerate(COLUMNS) if i >= 3},
        }
    flat = all(abs(one["growth"]) <= MOST_GROWTH for one in found.values())
    left = (
        session["left_processes"]
        or session["left_files"]
        or any(max(one["more"].values()) > 0 for one in found.values())
    )
    return {
        "enough": True,
        "flat": flat,
        "nothing_left": not left,
        "same_bytes": not session["wrong_bytes"],
        "processes": found,
    }


def to_markdown(document: dict[str, Any]) -> str:
    """All sessions as a table."""
    sessions = document["sessions"]
    lines = [
        f"# Training in a loop, {sessions[0]['conditions']['date'][:10]}",
        "",
        *(line.strip() for line in (__doc__ or "").strip().splitlines()[5:]),
        "",
        "Memory is what a process has to itself (USS) after each cycle. Growth is the median of a session's last "
        f"quarter over that of its second quarter; the first quarter is warm-up. Flat is within {MOST_GROWTH:.0%}. "
        "More files, sockets, threads, children: the most in the last quarter less the most in the second.",
        "",
        "| session | hours | cycles | restarts | by command | process | MB | growth "
        "| more files, sockets, threads, children | processes left | files left | other bytes |",
        "| --- " * 12 + "|",
        *(row for number, session in enumerate(sessions, 1) for row in _rows(number, session)),
        "",
        f"In all {sum(session['seconds'] for session in sessions) / 3600:.2f} hours.",
        "",
        *(
            f"- session {number}: `{one['command']}`, commit {one['commit']}, {one['date']}, Python {one['python']}, "
            f"torch {one['versions']['torch']}, {one['cpu']}, {one['cores']} cores, load {one['load']:.1f} at the start"
            for number, one in enumerate((session["conditions"] for session in sessions), 1)
        ),
        "",
    ]
    return "\n".join(lines)


def _rows(number: int, session: dict[str, Any]) -> Iterator[str]:
    found = verdict(session)
    for name, rows in session["samples"].items():
        judged = found["processes"][name] if found["enough"] else None
        cells = [
            str(number),
            f"{session['seconds'] / 3600:.2f}",
            f"{session['cycles']:,}",
            f"{session['restarts']:,}",
            str(session["commands"]),
            name,
            f"{rows[-1][1]:.1f}" if rows else "",
            f"{judged['growth']:+.2%}" if judged else "too few samples",
            ", ".join(f"{int(value)}" for value in judged["more"].values()) if judged else "",
            str(session["left_processes"]),
            str(len(session["left_files"])),
            str(session["wrong_bytes"]),
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Soak and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--date", default=datetime.now().strftime("%Y-%m-%d"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.date}-soak.json"
    document = json.loads(path.read_text()) if path.exists() else {"columns": COLUMNS, "sessions": []}
    under = conditions(f"python benchmarks/soak.py --hours {options.hours:g}", 1, 1, datetime.now().astimezone())
    session = Session(asdict(under))

    def save() -> None:
        sessions = [*document["sessions"], asdict(session)]
        text = json.dumps({**document, "sessions": sessions}, separators=(",", ":")).replace("],[", "],\n[")
        write_atomically(path, text + "\n")
        write_atomically(path.with_suffix(".md"), to_markdown({"sessions": sessions}))

    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "runs").mkdir()
        (root / "temporary").mkdir()
        os.environ["TMPDIR"] = str(root / "temporary")
        try:
            soak(session, options.hours * 3600, root / "runs", save)
        finally:
            session.left_files += sorted(path.name for path in (root / "temporary").iterdir())
            save()
    print(to_markdown(json.loads(path.read_text())))
    found = verdict(asdict(session))
    sys.exit(0 if found["enough"] and found["flat"] and found["nothing_left"] and found["same_bytes"] else 1)


if __name__ == "__main__":
    main()
