"""The fault campaign: processes killed, stopped and cut off at random moments of real runs, in one table.

    python benchmarks/faults.py --kills 120 --writes 12 --moves 8 --stops 8 --cuts 3 --folder /tmp/faults

Every run that is done leaves a file in the folder; the same command goes on after an interruption. A run counts as
survived when it ends by itself, and has the same bytes when its weights_sha256 is that of the undisturbed run on one
process. Steps lost: the last whole step of any process before the fault minus the step from which the run went on.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.engine.processes import heartbeat
from scalewise.engine.processes.fork_server import NAME
from scalewise.recipe import Recipe
from scalewise.records import Record
from scalewise.runs.bench.common import Host, hosts
from scalewise.tasks.load import load_task

RESULTS = Path(__file__).parent / "results"
TASKS = {
    "digits": ["digits", "--set", "bn=true", "--workers", "8", "--worker-batch", "16", "--epochs", "24"],
    "fashion-mnist": ["fashion-mnist", "--workers", "4", "--worker-batch", "64", "--steps", "60"],
    "chars": ["chars", "--workers", "4", "--steps", "80"],
}
COMMON = ["--recipe", "plain", "--seed", "3"]
KILLS_PER_RUN = 6
HANG_SECONDS = 5
MOST_SECONDS = 1800.0
WAIT_SECONDS = 600.0
POLL_SECONDS = 0.003
PORT = 29511


@dataclass(frozen=True)
class Trial:
    """One run and what happens to it."""

    kind: str
    task: str
    processes: int
    faults: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.task}-{self.processes}-{self.seed}"


@dataclass
class Recovery:
    """From one or several faults in a row to the next new step."""

    faults: int
    survivor: bool  # whether some process lived through them
    steps_lost: int
    seconds: float | None  # None: the run was over


@dataclass
class Outcome:
    """What became of a run."""

    trial: Trial
    code: int | None
    weights_sha256: str | None
    faults: int
    recoveries: list[Recovery] = field(default_factory=list)
    said: str = ""


class Job:
    """A training under observation: `scalewise train` with a launcher, in a folder of its own."""

    def __init__(self, folder: Path, task: str, processes: int, more: list[str]) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        words = [*TASKS[task], *COMMON, "--checkpoint-steps", "10", "--processes", str(processes)]
        command = [sys.executable, "-m", "scalewise", "train", *words, *more, "--json"]
        self._out, self._error = (folder / "stdout").open("wb"), (folder / "stderr").open("ab")
        variables = os.environ | {"TMPDIR": str(folder / "tmp"), "COLUMNS": "200"}
        self.process = subprocess.Popen(command, cwd=folder, env=variables, stdout=self._out, stderr=self._error)
        self.known = 0  # the last whole step of any process

    def beats(self) -> dict[int, heartbeat.Heartbeat]:
        """Where the processes are."""
        for folder in (self.folder / "tmp").glob("scalewise-*"):
            return heartbeat.heartbeats(folder)
        return {}

    def running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[psutil.Process]:
        """The processes that train, not the one from which they are forked."""
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and child.name() != NAME:
                        found.append(child)
        return found

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Look closely until something is so, the time is over or the run is."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            self.known = max([self.known, *(beat.step for beat in self.beats().values())])
            if condition():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def trains(self, step: int = 0) -> bool:
        """Whether processes train and one of them is past a step."""
        beats = self.beats().values()
        return any(beat.trains and beat.step >= step for beat in beats)

    def writes(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.folder / "run" / "checkpoints").glob(".step-*"))

    def end(self) -> tuple[int | None, str | None, str]:
        """Wait for the end: exit code, weights, what was said."""
        try:
            code: int | None = self.process.wait(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            self.kill()
        text = (self.folder / "stdout").read_text()
        weights = json.loads(text)["weights_sha256"] if text.strip() else None
        return code, weights, (self.folder / "stderr").read_text()[-3000:]

    def kill(self) -> None:
        """Everything at once, the launcher too."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=30)


def disturb(trial: Trial, folder: Path, number: int) -> Outcome:
    """Run a trial whose faults hit single processes of one launcher."""
    chance = random.Random(trial.seed)
    job = Job(folder, trial.task, trial.processes, ["--out", "run", "--max-restarts", "100", *_patience(trial)])
    outcome = Outcome(trial, None, None, 0)
    job.wait(job.trains, MOST_SECONDS)
    while outcome.faults < trial.faults and job.running():
        _choose_moment(trial, job, chance)
        began, hit = time.monotonic(), 0
        victims: set[int] = set()
        generation = {child.pid for child in job.children()}
        if not generation:
            break
        while True:  # perhaps several, before the run goes on
            victim = chance.choice(sorted(generation))
            _send(victim, number)
            victims.add(victim)
            hit += 1
            again = trial.kind == "kill" and chance.random() < 0.15 and outcome.faults + hit < trial.faults
            if not again or job.wait(lambda: not job.beats(), chance.uniform(0.0, 0.3)) or not job.running():
                break
        outcome.faults += hit
        survivor = len(victims) < len(generation)
        recovery = _recovered(job, generation, began, Recovery(hit, survivor, 0, None))
        outcome.recoveries.append(recovery)
        if chance.random() < 0.3:  # the next one comes while the processes start
            continue
    outcome.code, outcome.weights_sha256, outcome.said = job.end()
    return outcome


def _patience(trial: Trial) -> list[str]:
    return ["--hang-timeout", str(HANG_SECONDS)] if trial.kind == "stop" else []


def _choose_moment(trial: Trial, job: Job, chance: random.Random) -> None:
    if trial.kind == "write":
        job.wait(job.writes, 60.0)
    else:
        job.wait(lambda: False, chance.uniform(0.0, 1.5))


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _recovered(job: Job, generation: set[int], began: float, recovery: Recovery) -> Recovery:
    """Wait until new processes train, and then take a new step."""
    job.wait(lambda: not generation & {child.pid for child in job.children()}, WAIT_SECONDS)
    known = job.known
    if not job.wait(lambda: job.trains() and not generation & {child.pid for child in job.children()}, WAIT_SECONDS):
        return recovery
    resumed = min((beat.step for beat in job.beats().values() if beat.trains), default=known)
    recovery.steps_lost = max(0, known - resumed)
    if job.wait(lambda: job.trains(known + 1), WAIT_SECONDS):
        recovery.seconds = time.monotonic() - began
    return recovery


def move(trial: Trial, folder: Path) -> Outcome:
    """Kill everything, launcher included, and go on with another number of processes."""
    chance = random.Random(trial.seed)
    job = Job(folder, trial.task, trial.processes, ["--out", "run"])
    job.wait(job.trains, MOST_SECONDS)
    job.wait(lambda: False, chance.uniform(0.5, 5.0))
    outcome = Outcome(trial, None, None, 0)
    if job.running():
        job.kill()
        outcome.faults = 1
        known, began = job.known, time.monotonic()
        shutil.rmtree(folder / "tmp")
        other = chance.choice([count for count in (1, 2, 3, 4) if count != trial.processes])
        restarts = ["--max-restarts", "1"]  # through a launcher also when alone, to be seen
        job = Job(folder, trial.task, other, ["--resume", "run", *restarts])
        job.wait(job.trains, MOST_SECONDS)
        resumed = min((beat.step for beat in job.beats().values() if beat.trains), default=known)
        recovery = Recovery(1, False, max(0, known - resumed), None)
        if job.wait(lambda: job.trains(known + 1), WAIT_SECONDS):
            recovery.seconds = time.monotonic() - began
        outcome.recoveries.append(recovery)
    outcome.code, outcome.weights_sha256, outcome.said = job.end()
    return outcome


@contextmanager
def _torchrun(folder: Path, machines: list[Host], trial: Trial) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts torchrun on a host; all that was started is ended at the end."""
    started: list[subprocess.Popen[bytes]] = []
    variables = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "COLUMNS": "200"}  # so that nodes can join

    def start(number: int) -> subprocess.Popen[bytes]:
        rendezvous = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{machines[0].address}:{PORT}",
            "--rdzv-id",
            trial.name,
        ]
        patience = "join_timeout=120,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=15"
        itself = ["--rdzv-conf", f"is_host={int(number == 0)},{patience}", "--local-addr", machines[number].address]
        agent = ["--nnodes", f"1:{len(machines)}", "--nproc-per-node", "1", "--max-restarts", "5"]
        train = ["-m", "scalewise", "train", *TASKS[trial.task], *COMMON, "--out", str(folder / "run")]
        words = [sys.executable, "-m", "torch.distributed.run", *agent, *rendezvous, *itself, *train]
        words += ["--hang-timeout", str(HANG_SECONDS), "--checkpoint-steps", "10", "--json"]
        with (folder / f"stdout-{number}").open("ab") as out, (folder / f"stderr-{number}").open("ab") as error:
            process = subprocess.Popen(
                machines[number].command(words), cwd=folder, env=variables, stdout=out, stderr=error
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def cut(trial: Trial, folder: Path) -> Outcome:
    """Take a node's link down in mid-run and up again, and start its agent again as a scheduler would."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(trial.seed)
    outcome = Outcome(trial, None, None, 0)
    metrics = folder / "run" / "metrics.jsonl"
    with hosts(trial.processes) as machines, _torchrun(folder, machines, trial) as start:
        agents = [start(number) for number in range(trial.processes)]
        _until(lambda: (metrics.exists() and metrics.stat().st_size > 0) or _ended(agents[0]))
        time.sleep(chance.uniform(0.0, 2.0))
        lost = machines[-1]
        _link(lost, "down")
        outcome.faults, began = 1, time.monotonic()
        _until(lambda: "resuming" in _said(folder) or _ended(agents[0]))
        seconds = time.monotonic() - began
        _link(lost, "up")
        agents[-1].kill()
        agents[-1].wait()
        agents[-1] = start(trial.processes - 1)
        outcome.code = agents[0].wait(timeout=MOST_SECONDS)
    said = _said(folder)
    saved = [int(step) for step in re.findall(r"state after step (\d+) is saved", said)]
    resumed = [int(step) for step in re.findall(r"resuming .* from step (\d+)", said)]
    if resumed:
        outcome.recoveries.append(Recovery(1, True, max([0, *saved[:1]]) - resumed[0] if saved else 0, seconds))
    texts = [path.read_text() for path in sorted(folder.glob("stdout-*"))]
    hashes = {json.loads(text)["weights_sha256"] for text in texts if text}
    outcome.weights_sha256 = hashes.pop() if len(hashes) == 1 else None
    outcome.said = said[-3000:]
    return outcome


def _link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", host.interface, state], check=True)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def _said(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("stderr-*")))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def perform(trial: Trial, folder: Path) -> Outcome:
    """One trial, of whatever kind."""
    if trial.kind == "cut":
        return cut(trial, folder)
    if trial.kind == "move":
        return move(trial, folder)
    return disturb(trial, folder, signal.SIGSTOP if trial.kind == "stop" else signal.SIGKILL)


def trials(arguments: argparse.Namespace) -> list[Trial]:
    """So many faults of each kind, over the tasks in turn and 2 to 4 processes."""
    chance = random.Random(arguments.seed)
    wanted = {
        "kill": (arguments.kills, KILLS_PER_RUN),
        "write": (arguments.writes, 3),
        "move": (arguments.moves, 1),
        "stop": (arguments.stops, 1),
        "cut": (arguments.cuts, 1),
    }
    found = []
    for kind, (faults, each) in wanted.items():
        for number in range(-(-faults // each)):
            task = "digits" if kind == "cut" else [*TASKS][number % len(TASKS)]
            processes = 2 if kind == "cut" else chance.choice([2, 2, 3, 4])
            found.append(Trial(kind, task, processes, min(each, faults - number * each), chance.randrange(10**6)))
    return found


def references(folder: Path) -> dict[str, str]:
    """The weights of every task on one process, undisturbed."""
    path = folder / "references.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for task, words in TASKS.items():
        if task not in known:
            place = folder / f"reference-{task}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            command = [sys.executable, "-m", "scalewise", "train", *words, *COMMON, "--processes", "1", "--json"]
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
            known[task] = json.loads(done.stdout)["weights_sha256"]
            path.write_text(json.dumps(known))
    return known


def rows(outcomes: list[dict[str, Any]], known: dict[str, str]) -> list[dict[str, Any]]:
    """One row per kind of fault."""
    found = []
    for kind in dict.fromkeys(outcome["trial"]["kind"] for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome["trial"]["kind"] == kind]
        recoveries = [recovery for outcome in mine for recovery in outcome["recoveries"]]
        lost = [recovery["steps_lost"] for recovery in recoveries if recovery["survivor"]]
        alone = [recovery["steps_lost"] for recovery in recoveries if not recovery["survivor"]]
        seconds = sorted(recovery["seconds"] for recovery in recoveries if recovery["seconds"] is not None)
        found.append(
            {
                "kind": kind,
                "runs": len(mine),
                "faults": sum(outcome["faults"] for outcome in mine),
                "survived": sum(outcome["code"] == 0 for outcome in mine),
                "same_bytes": sum(outcome["weights_sha256"] == known[outcome["trial"]["task"]] for outcome in mine),
                "most_steps_lost_with_a_survivor": max(lost, default=None),
                "recoveries_with_a_survivor": len(lost),
                "most_steps_lost_without": max(alone, default=None),
                "median_seconds_to_recover": round(median(seconds), 1) if seconds else None,
                "most_seconds_to_recover": round(seconds[-1], 1) if seconds else None,
            }
        )
    return found


TITLES = {
    "kill": "SIGKILL of a process at a random moment",
    "write": "SIGKILL of a process while a checkpoint is written",
    "move": "everything killed, resumed on another number of processes",
    "stop": f"SIGSTOP of a process, --hang-timeout {HANG_SECONDS}",
    "cut": f"a node's veth down, later up, --hang-timeout {HANG_SECONDS}",
}


def table(found: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| fault | faults | runs | survived | same bytes | most steps lost, a process survived | none did "
        "| seconds to recover, median (most) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        lost, alone = row["most_steps_lost_with_a_survivor"], row["most_steps_lost_without"]
        with_one = "–" if lost is None else f"{lost} (n = {row['recoveries_with_a_survivor']})"
        seconds = f"{row['median_seconds_to_recover']} ({row['most_seconds_to_recover']})"
        lines.append(
            f"| {TITLES[row['kind']]} | {row['faults']} | {row['runs']} | {row['survived']} | {row['same_bytes']} "
            f"| {with_one} | {'–' if alone is None else alone} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def overhead() -> dict[str, float]:
    """Microseconds that being ready for faults adds to a step, part by part, beside the processor time of a step."""
    recipe = Recipe(workers=2, worker_batch=16, steps=300, optimizer="adam", lr=0.001, threads=1)
    with Training(load_task("digits", ["bn=true"]), recipe, Placement(device="cpu")) as training:
        times = [time.process_time()]
        newest: deque[Record] = deque(maxlen=256)
        for record in training.records():
            newest.append(record)
            times.append(time.process_time())
        parts = {
            "remember_buffers": training.strategy.model.buffers.remember,
            "beat": lambda: setattr(heartbeat.HEARTBEAT, "last", heartbeat.Heartbeat(1, True)),
            "keep_record": lambda: newest.append(record),
        }
        found = {name: round(min(timeit.repeat(part, number=1000, repeat=5)) * 1000, 2) for name, part in parts.items()}
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {**found, "step": round(median(steps) * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("kills", 120), ("writes", 12), ("moves", 8), ("stops", 8), ("cuts", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=Path("faults"))
    parser.add_argument("--most", type=int, default=10**6, help="so many runs, and no more for now")
    parser.add_argument("--results", default=f"{date.today()}-faults")
    parser.add_argument("--overhead", action="store_true", help="measure what it costs in a step, and nothing else")
    arguments = parser.parse_args()
    if arguments.overhead:
        print(json.dumps(overhead()))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    known = references(arguments.folder)
    done = 0
    for trial in trials(arguments):
        done += done < arguments.most and once(trial, arguments.folder, known)
    write(arguments, known)


def once(trial: Trial, folder: Path, known: dict[str, str]) -> bool:
    """Perform a trial unless it is done, or another command with this folder is at it."""
    path, place = folder / f"{trial.name}.json", folder / trial.name
    with (folder / f"{trial.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if path.exists():
            return False
        shutil.rmtree(place, ignore_errors=True)
        outcome = perform(trial, place)
        good = outcome.code == 0 and outcome.weights_sha256 == known[trial.task]
        print(f"{trial.name}: {'good' if good else 'BAD'} {outcome.recoveries}", file=sys.stderr, flush=True)
        path.write_text(json.dumps(asdict(outcome)))
        if good:
            shutil.rmtree(place)
        return True


def write(arguments: argparse.Namespace, known: dict[str, str]) -> None:
    """The table and the rows of all trials that are done."""
    paths = [arguments.folder / f"{trial.name}.json" for trial in trials(arguments)]
    outcomes = [json.loads(path.read_text()) for path in paths if path.exists()]
    found = rows(outcomes, known)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    counts = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("kills", "writes", "moves", "stops", "cuts"))
    head = (
        f"# Faults\n\n`python benchmarks/faults.py {counts} --seed {arguments.seed} --folder …`, commit "
        f"{commit.strip()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores that others used too, "
        f"CPU and gloo, 2 to 4 processes, a checkpoint every 10 steps; "
        f"{'; '.join(f'`{chr(32).join(words)}`' for words in TASKS.values())}.\n\n"
    )
    (RESULTS / f"{arguments.results}.md").write_text(head + table(found))
    document = {"rows": found, "trials": [{**outcome, "said": None} for outcome in outcomes], "references": known}
    (RESULTS / f"{arguments.results}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
