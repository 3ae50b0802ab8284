"""Whatever dies, stops or hangs: the run goes on by itself, to the bytes of the undisturbed one."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

import scalewise as sw
from conftest import environment, forked, forking
from scalewise import records
from scalewise.engine.loop import Training
from scalewise.engine.processes import heartbeat, last_words
from scalewise.engine.processes.team import fresh_store
from scalewise.engine.store import checkpoint
from scalewise.errors import Failed, LostContact, ProcessFailed
from scalewise.runs.bench.common import hosts, reason_unavailable
from test_resume import wait_for

TASK = [
    "train",
    "digits",
    "--set",
    "bn=true",
    "--workers",
    "4",
    "--worker-batch",
    "16",
    "--seed",
    "5",
    "--steps",
    "150",
]
TASK += ["--recipe", "plain", "--optimizer", "adam", "--lr", "0.002", "--json"]
OFTEN = ["--checkpoint-steps", "20"]
TIMELESS = ("seconds", "input_seconds", "samples_per_second", "run", "processes", "task")


class Job:
    """A run with a launcher, and where its processes are."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "tmp").mkdir()
        self.folder = folder
        variables = environment() | {"TMPDIR": str(folder / "tmp")}
        self.process = forking().start([*arguments], folder, variables)

    def heartbeats(self) -> dict[int, heartbeat.Heartbeat]:
        folders = [*(self.folder / "tmp").glob("scalewise-*")]
        return heartbeat.heartbeats(folders[0]) if folders else {}

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: any(b.trains and b.step >= step for b in self.heartbeats().values()), self.process)

    def signal(self, rank: int, number: int) -> None:
        children = psutil.Process(self.process.pid).children()
        os.kill(next(child.pid for child in children if child.name() == f"scalewise-{rank}"), number)

    def end(self) -> tuple[dict, str]:
        stdout, stderr = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, stderr
        return json.loads(stdout), stderr


def timeless(run: Path) -> list[dict]:
    found = records.read(run / "metrics.jsonl")
    return [{key: record[key] for key in record if key not in TIMELESS} for record in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[str, list[dict]]:
    """The weights and the records of a run on one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = forked("scalewise", folder, *TASK, "--processes", 1, "--out", "run", "--quiet")
    return done.json["weights_sha256"], timeless(folder / "run")


DYING = """
    import os
    from pathlib import Path
    import scalewise as sw
    from scalewise.engine.store import shards

    def task(bn: bool = False) -> sw.Task:
        write = shards.save_file

        def die_once(tensors, path, *more):
            write(tensors, path, *more)
            if "step-100" in str(path) and not Path("once").exists():
                Path("once").touch()
                os.kill(os.getpid(), 9)

        shards.save_file = die_once
        return sw.load_task("digits", [f"bn={bn}"])
"""


def test_killed_again_and_again_and_stopped(tmp_path, undisturbed):
    (tmp_path / "dying.py").write_text(textwrap.dedent(DYING))  # digits, and a death while a checkpoint is written
    flags = ["--processes", "2", "--out", "run", "--max-restarts", "9", "--hang-timeout", "5"]
    job = Job(tmp_path, "train", "dying.py", *TASK[2:], *OFTEN, *flags)
    chance = random.Random()
    moments = [chance.randrange(2, 18), chance.randrange(22, 60)]  # far from the death of its own at step 100
    for moment in moments:
        job.wait_for_step(moment)
        job.signal(chance.randrange(2), signal.SIGKILL)
        wait_for(lambda: not job.heartbeats(), job.process)
    job.wait_for_step(102)
    assert (tmp_path / "once").exists()
    job.signal(1, signal.SIGSTOP)
    result, stderr = job.end()
    assert (result["weights_sha256"], timeless(tmp_path / "run")) == undisturbed
    told = re.findall(r"was killed by SIGKILL after step (\d+)", stderr)
    assert len(told) == 3, stderr
    assert "process 1 (workers 2 to 3) said nothing for 5 s and was killed" in stderr.replace("\n", " ")
    assert re.search(r'File ".+?", line \d+ in ', stderr.replace("\n", " "))  # its Python stack
    resumed = [int(step) for step in re.findall(r"resuming run from step (\d+)", stderr)]
    assert len(resumed) == 4
    assert all(moment - 1 <= step for moment, step in zip(moments, resumed, strict=False)), stderr


def test_all_are_paused_and_one_of_three_is_killed(tmp_path, undisturbed):
    job = Job(tmp_path, *TASK, "--processes", "3", "--out", "run", "--hang-timeout", "5")
    job.wait_for_step(10)
    family = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children()]
    for member in family:  # as Ctrl-Z does: nobody hangs
        member.suspend()
    time.sleep(7)  # longer than a process may be silent
    for member in family:
        member.resume()
    job.wait_for_step(30)
    before = max(beat.step for beat in job.heartbeats().values())
    job.signal(0, signal.SIGKILL)  # the one that writes
    result, stderr = job.end()
    assert (result["weights_sha256"], timeless(tmp_path / "run")) == undisturbed
    assert int(re.findall(r"resuming run from step (\d+)", stderr)[0]) >= before - 1
    assert stderr.count("restart") == 1


MINE = """
    import os, time, torch, scalewise as sw
    from pathlib import Path
    from torch.nn import functional as F

    class Model(torch.nn.Linear):
        def forward(self, x):
            {body}
            return super().forward(x)

    def task() -> sw.Task:
        with open("starts", "a") as file:
            file.write(os.environ.get("RANK", "launcher") + "\\n")
        x, y = torch.linspace(0, 1, 300).view(100, 3), torch.zeros(100, dtype=torch.long)
        return sw.Task(model=lambda: Model(3, 2), train=(x, y), test=(x, y), loss=F.cross_entropy)
"""
MY_FLAGS = ["train", "mine.py", "--workers", 2, "--worker-batch", 5, "--steps", 20, "--processes", 2, "--out", "run"]


def write_task(folder: Path, body: str) -> None:
    (folder / "mine.py").write_text(textwrap.dedent(MINE).format(body=body))


def starts(folder: Path) -> list[str]:
    return (folder / "starts").read_text().split()


def test_a_process_that_does_not_come_back_is_done_without(scalewise, tmp_path):
    write_task(tmp_path, "os.environ['WORLD_SIZE'] == '2' and os.environ['RANK'] == '1' and os._exit(7)")
    outcome = scalewise(*MY_FLAGS, "--min-processes", 1, "--json")
    assert outcome.json["processes"] == 1
    said = outcome.stderr.replace("\n", " ")
    assert said.count("process 1 ended with exit code 7") == 2
    assert "restart 1 of at most 3, on 2 processes" in said
    assert "restart 2 of at most 3, on 1 process" in said


def test_what_would_fail_again_is_not_started_again(scalewise, tmp_path):
    write_task(tmp_path, "raise KeyError('my own mistake')")
    outcome = scalewise(*MY_FLAGS)
    assert outcome.code == 1
    assert "my own mistake" in outcome.stderr
    assert sorted(starts(tmp_path)) == ["0", "1", "launcher"]


def test_a_deadlock_is_named_and_recovered_from(scalewise, tmp_path):
    stuck = "Path('once').exists() or os.environ.get('RANK') != '1' or (Path('once').touch(), time.sleep(1000))"
    write_task(tmp_path, stuck)
    outcome = scalewise(*MY_FLAGS, "--hang-timeout", 4, "--json")
    assert outcome.json["steps"] == 20
    said = outcome.stderr.replace("\n", " ")
    assert "process 1 (worker 1) made no progress for 4 s and was killed" in said
    assert "mine.py" in said.split("its Python stack:")[1]


def test_torchrun_restarts_and_the_run_goes_on(tmp_path, undisturbed):
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*agent, "--max-restarts", "2", "-m", "scalewise", *TASK, *OFTEN, "--out", "run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-20").exists(), process)
    children = psutil.Process(process.pid).children()
    next(child for child in children if child.environ().get("RANK") == "0").kill()
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["weights_sha256"] == undisturbed[0]
    assert timeless(tmp_path / "run") == undisturbed[1]
    saved, resumed = re.search(r"state after step (\d+)", stderr), re.search(r"resuming run from step (\d+)", stderr)
    assert resumed is not None, stderr
    assert int(resumed[1]) >= 20
    if saved is not None:  # torchrun's own agent may end a process before it knows that there is something to save
        assert saved[1] == resumed[1]


def test_a_signal_waits_until_the_document_is_said_and_noted(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(
        last_words, "write_atomically", lambda *of: (signal.raise_signal(signal.SIGINT), records.write_atomically(*of))
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            last_words.print_once("document", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / last_words.SAID).exists()
    assert capfd.readouterr().out == "document\n"


def test_an_agent_has_a_document_once(tmp_path, monkeypatch, capfd):
    for run_id, expected in [(None, 2), ("x", 1)]:
        if run_id is not None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        for _ in range(2):
            last_words.print_once("document", tmp_path)
        assert capfd.readouterr().out == "document\n" * expected
    (tmp_path / last_words.SAID).write_text("another agent, of an earlier job")
    last_words.print_once("document", tmp_path)
    assert capfd.readouterr().out == "document\n"


@pytest.mark.skipif(reason_unavailable() is not None, reason=f"no hosts here: {reason_unavailable()}")
def test_a_node_is_cut_off_and_comes_back(tmp_path, undisturbed):
    patience = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
    variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(number: int) -> subprocess.Popen:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:29500", "--rdzv-id", "x"]
        itself = ["--rdzv-conf", f"is_host={int(number == 0)},{patience}", "--local-addr", machines[number].address]
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max-restarts", "3"]
        words = [*agent, *rendezvous, *itself, "-m", "scalewise", *TASK, *OFTEN, "--out", "run", "--hang-timeout", "5"]
        with (tmp_path / f"out-{number}").open("ab") as out, (tmp_path / f"error-{number}").open("ab") as error:
            return subprocess.Popen(
                machines[number].command(words), cwd=tmp_path, env=variables, stdout=out, stderr=error
            )

    def said() -> str:
        return "".join((tmp_path / f"error-{number}").read_text(errors="replace") for number in range(2))

    def set_link(state: str) -> None:
        subprocess.run(["ip", "-n", machines[1].name, "link", "set", machines[1].interface, state], check=True)

    with hosts(2) as machines:
        agents = [start(0), start(1)]
        try:
            wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-20").exists(), agents[0])
            set_link("down")
            wait_for(lambda: "resuming run from step" in said(), agents[0])
            set_link("up")
            agents[1].kill()
            agents[1].wait()
            agents[1] = start(1)  # as whoever runs the cluster would
            assert agents[0].wait(timeout=240) == 0, said()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert "was not heard of for 5 s" in said()
    results = [json.loads(text) for number in range(2) if (text := (tmp_path / f"out-{number}").read_text())]
    assert {result["weights_sha256"] for result in results} == {undisturbed[0]}
    assert timeless(tmp_path / "run") == undisturbed[1]


@pytest.fixture
def training():
    """Some steps of a run with batch norm, on this process."""
    recipe = sw.Recipe(workers=2, worker_batch=16, steps=8, optimizer="adam", lr=0.001, threads=1)
    task = sw.load_task("digits", ["bn=true"])
    with Training(task, recipe, sw.Placement(device="cpu")) as training:
        yield training


def test_an_emergency_checkpoint_is_the_state_after_a_whole_step(tmp_path, training):
    seen = training.records()
    newest = [next(seen) for _ in range(3)]
    expected = {name: tensor.clone() for name, tensor in training.strategy.model.tensors().items()}
    training.gradients()  # a step that breaks off: it changes batch-norm statistics
    training.strategy._computes = True  # as with other processes
    assert checkpoint.save_emergency(training, tmp_path, newest) == 4  # the record of the fourth step was still waiting
    stored = checkpoint.model_tensors(tmp_path / "step-4")
    assert all(stored[name].equal(expected[name]) for name in expected)
    checkpoint.restore_records(tmp_path / "metrics.jsonl", tmp_path / "step-4")
    assert [record["step"] for record in records.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_nothing_is_saved_in_the_middle_of_an_update(tmp_path, training, monkeypatch):
    def fail(lr: float) -> None:
        raise RuntimeError

    seen = training.records()
    next(seen)
    monkeypatch.setattr(training.strategy, "update", fail)
    with pytest.raises(RuntimeError):
        next(seen)
    assert checkpoint.save_emergency(training, tmp_path, []) is None
    assert not [*tmp_path.iterdir()]


def test_an_epoch_that_was_not_recorded_is_recorded_later(tmp_path, training, monkeypatch):
    *_, expected = training.records()
    assert expected.steps == 8
    with Training(training.task, training.recipe, training.placement) as other:
        seen = other.records()
        newest = [next(seen) for _ in range(8)]  # the epoch's record, and training's, comes next
        assert checkpoint.save_emergency(other, tmp_path, newest) == 8
    with Training(training.task, training.recipe, training.placement) as again:
        checkpoint.load(again, tmp_path / "step-8")
        rest = [*again.records()]
    assert [record.kind for record in rest] == ["epoch", "result"]
    assert rest[0].train == expected.train
    assert rest[1].weights_sha256 == expected.weights_sha256


def test_the_records_of_an_emergency_checkpoint_replace_those_from_its_first_step_on(tmp_path, training):
    seen = training.records()
    steps = [next(seen) for _ in range(4)]
    epoch = sw.Epoch(1, 1.0, 32, 0.1, {}, None, False, 0.0, 0.0)
    lines = [records.line(dataclasses.replace(step, loss=0.0)) for step in steps]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:3], '{"torn']))
    assert checkpoint.save_emergency(training, tmp_path, [epoch, *steps[2:]]) == 5
    checkpoint.restore_records(tmp_path / "metrics.jsonl", tmp_path / "step-5")
    found = [*records.read(tmp_path / "metrics.jsonl")]
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    assert [record["loss"] == 0.0 for record in found] == [True, True, False, False, False]


def met(store: HashStore, size: int) -> list:
    """The stores of processes that start one after another."""
    parts = [None] * size

    def begin(rank: int) -> None:
        parts[rank] = fresh_store(store, rank, size)

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(timeout=30)
    return parts


def test_processes_of_a_new_start_do_not_meet_those_of_the_last_one():
    store = HashStore()
    for size in (3, 2, 3):  # each finds what the one before has left
        parts = met(store, size)
        assert not parts[1].check(["key"])
        parts[0].set("key", "value")
        assert {part.get("key") for part in parts} == {b"value"}


def test_who_does_not_come_is_given_up():
    with pytest.raises(LostContact, match="did not start in time"):
        fresh_store(HashStore(), 0, 2, seconds=0.1)


def test_the_reason_names_step_stack_and_last_lines(tmp_path):
    path = tmp_path / "heartbeat-1"
    own = heartbeat.OwnHeartbeat()
    own.share(path)
    own.last = heartbeat.Heartbeat(12, True)
    assert heartbeat.heartbeats(tmp_path) == {1: heartbeat.Heartbeat(12, True)}
    killed = last_words.failure(tmp_path, {0: 1, 1: -9}, "then this")
    assert isinstance(killed, ProcessFailed)
    assert str(killed) == "process 1 was killed by SIGKILL after step 12; then this"
    last_words.leave_watchdog_report(
        tmp_path, 1, "process 1 (worker 1) said nothing for 5 s and was killed", ["File a"]
    )
    hung = str(last_words.failure(tmp_path, {1: -9}, ""))
    assert hung == "process 1 (worker 1) said nothing for 5 s and was killed after step 12, its Python stack:\n  File a"
    (tmp_path / "exit-0.json").write_text('{"exit_code": 2, "message": "wrong", "lost_contact": false}')
    told = last_words.failure(tmp_path, {0: 2}, "")
    assert isinstance(told, Failed)
    assert told.exit_code == 2
    last_words.clear(tmp_path)
    assert not [*tmp_path.iterdir()]
