"""Where a step's time goes: phases that add up, delays found where they were planted, nothing changed by looking."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from conftest import environment
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.errors import UsageError
from scalewise.runs.processes import answer
from scalewise.runs.profile import profile
from scalewise.runs.profile.profiler import profiled as profiling
from scalewise.runs.profile.result import OTHER, PHASES
from scalewise.runs.profile.session import observe
from scalewise.runs.profile.spans import Label, Layers, Recorder, segments, spans
from scalewise.tasks.digits import load

PLANTED = Path(__file__).parent / "jobs" / "planted.py"
DELAY = 0.005


def planted(**delays) -> sw.Task:
    spec = importlib.util.spec_from_file_location("planted", PLANTED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.task(**delays)


def profiled(task, placement=None, steps=6, **recipe):
    outcome = answer(profiling(task, task.recipe.replace(**recipe), placement or sw.Placement(), steps), print)
    return outcome.profile, outcome.trace


def row(found, name):
    return next(phase for phase in found.phases if phase.name == name)


def layer(found, name):
    return next(one for one in found.layers if one.name == name)


def check_sum(document):
    """Phases are those of the mission, and what was worked and waited in the step adds up to it."""
    assert [phase["name"] for phase in document["phases"]] == [*PHASES, OTHER]
    numbers = [value for phase in document["phases"] for value in phase.values() if not isinstance(value, str)]
    assert min(numbers) >= 0
    total = sum(
        phase["worked_seconds"] + phase["waited_seconds"] - phase["beside_seconds"] for phase in document["phases"]
    )
    assert total == pytest.approx(document["step_seconds"], rel=0.05)
    assert sum(phase["share"] for phase in document["phases"]) == pytest.approx(1, rel=0.05)


def check_trace(document):
    """Every span is in the trace-event format, and spans of one thread lie within each other or apart."""
    events = document["traceEvents"]
    threads = {}
    for event in events:
        assert {"ph", "name", "pid"} <= event.keys()
        assert event.get("ts", 0) >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start, length = (round(1000 * event[name]) for name in ("ts", "dur"))  # whole nanoseconds
            threads.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    opened = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(opened) == sorted(event["id"] for event in events if event["ph"] == "e")
    for found in threads.values():
        stack = []
        for start, stop in sorted(found, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or stop <= stack[-1]
            stack.append(stop)
    return events


def test_segments_belong_to_the_innermost_span():
    times = iter(range(10))
    recorder = Recorder(clock=lambda: float(next(times)))
    outer, inner = Label("loss"), Label("forward", "0")
    recorder.around(outer, recorder.around(inner, lambda: None))()  # 0, 1, 2, 3
    lane = recorder.take()[0]
    assert [(piece.label, piece.start, piece.stop) for piece in segments(lane.events)] == [
        (outer, 0, 1),
        (inner, 1, 2),
        (outer, 2, 3),
    ]
    assert [(span.label, span.start, span.stop) for span in spans(lane.events)] == [(outer, 0, 3), (inner, 1, 2)]
    assert recorder.take()[0].events == []


def test_an_open_span_is_left_for_the_next_time():
    recorder = Recorder()
    recorder.around(Label("read"), lambda: None)()
    recorder.open(Label("read"))
    assert len(recorder.take()[0].events) == 2
    recorder.close()
    assert len(spans(recorder.take()[0].events)) == 1


@pytest.mark.parametrize("busy", [False, True], ids=["asleep", "busy"])
def test_a_delay_in_the_data_set_is_worked_in_read(busy):
    found, trace = profiled(planted(read=DELAY, busy=busy), sw.Placement(loaders=0))
    check_sum(found.to_json())
    check_trace(trace)
    read = row(found, "read")
    assert read.worked_seconds >= DELAY * found.setting.worker_batch
    assert read.share > 0.5
    assert (read.waited_seconds, read.beside_seconds) == (0, 0)
    assert "most of it in read" in found.bottleneck


@pytest.mark.parametrize(("where", "busy"), [("forward", False), ("forward", True), ("backward", False)])
def test_a_delay_in_a_layer_is_worked_there(where, busy):
    found, trace = profiled(planted(**{where: 4 * DELAY}, busy=busy))
    check_sum(found.to_json())
    check_trace(trace)
    slow = layer(found, "3")
    assert getattr(slow, f"{where}_seconds") >= 4 * DELAY
    assert row(found, where).worked_seconds >= 4 * DELAY
    assert row(found, where).waited_seconds == 0
    assert f"the largest part {where} in 3 (SlowLinear)" in found.bottleneck


def test_loader_processes_work_beside_the_step_which_waits():
    found, trace = profiled(planted(read=2 * DELAY), sw.Placement(loaders=1), steps=6)
    document = found.to_json()
    check_sum(document)
    read, queue = row(found, "read"), row(found, "queue")
    assert read.worked_seconds >= 2 * DELAY * found.setting.worker_batch
    assert read.beside_seconds == pytest.approx(read.worked_seconds)
    assert read.share == 0
    assert queue.waited_seconds > 0.3 * found.step_seconds
    assert "waits for its samples" in found.bottleneck
    assert "loaders" in found.advice
    assert {piece["process"] for piece in document["timeline"]} == {"0", "0 loader 0"}
    assert all(0 < loader["busy_share"] <= 1.01 for loader in document["utilisation"][0]["loaders"])
    names = {event["args"]["name"] for event in check_trace(trace) if event["ph"] == "M"}
    assert {"process 0", "step", "loader 0"} <= names


def residual() -> sw.Task:
    """In-place operations, a shared layer, functions outside layers, dropout and a weight that is not used."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
            self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.1)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            x = self.norm(self.first(x.flatten(1)))
            x = F.relu(x, inplace=True)
            x = x + torch.tanh(self.shared(self.shared(x)))
            return self.last(self.drop(x).view(len(x), -1))

    return sw.Task(
        name="residual",
        model=Model,
        train=load()[0],
        test=load()[1],
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        augment=lambda batch, keys: (batch[0] + 0.01 * (keys % 7).view(-1, 1, 1, 1), batch[1]),
        recipe=sw.Recipe(worker_batch=16, optimizer="adam", lr=0.001, threads=1),
    )


@pytest.mark.parametrize(
    "recipe",
    [
        {"workers": 3},
        {"workers": 2, "micro_batch": 8, "clip_norm": 1.0},
        {"workers": 2, "batch_norm": "sync"},
    ],
    ids=["workers", "micro batches", "lockstep"],
)
def test_looking_changes_no_byte(recipe):
    task = residual()
    chosen = task.recipe.replace(steps=1000, **recipe)
    with Training(task, chosen, sw.Placement(), alone=True) as training:
        notes = answer(observe(training, 4), print)
        taken, looked = training.progress.step, sha256(training.strategy.model.tensors())
    with Training(task, chosen, sw.Placement(), alone=True) as training:
        records = training.records()
        while training.progress.step < taken:
            next(records)
        assert sha256(training.strategy.model.tensors()) == looked
    named = {piece.label.layer for step in notes.steps for lane in step.lanes for piece in segments(lane.events)}
    assert {"", "first", "shared", "last", "norm", "drop"} <= named
    assert "unused" not in named
    assert not vars(training.strategy.feed).get("batch"), "a probe was left behind"


def test_every_phase_of_several_workers_has_its_time():
    found, _ = profiled(residual(), workers=2, micro_batch=8, clip_norm=1.0)
    document = found.to_json()
    check_sum(document)
    alone = {"transport to memory", "communication"}
    assert {phase.name for phase in found.phases if phase.worked_seconds == 0} == alone
    for name in ("first", "shared", "norm", "last"):
        assert layer(found, name).forward_seconds > 0
        assert layer(found, name).backward_seconds > 0
    assert layer(found, "model").backward_seconds > 0, "functions outside layers are the model's own"
    backward = sum(one.backward_seconds for one in found.layers)
    assert backward == pytest.approx(row(found, "backward").worked_seconds, rel=0.2)


def test_lockstep_adds_up():
    """Workers' threads take turns: each one's time counts, and the time in which it waits for its turn does not."""
    found, trace = profiled(residual(), workers=2, batch_norm="sync")
    check_sum(found.to_json())
    check_trace(trace)
    assert row(found, "forward").worked_seconds > 0
    assert layer(found, "norm").backward_seconds > 0


def test_of_a_compiled_model_the_whole_is_seen():
    """Hooks within it would be compiled, too; this one stands in for it, as the compiler takes its time."""
    model, recorder = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Recorder()
    layers = Layers(model, recorder, compiled=True)
    layers.install(ExitStack())
    loss = model(torch.zeros(1, 2)).sum()
    assert not model[0]._forward_hooks
    assert [span.label for span in spans(recorder.take()[0].events)] == [Label("forward", "")]
    layers.follow(loss)
    recorder.open(Label("backward", "(loss)"))
    loss.backward()
    recorder.close()
    labels = [span.label for span in spans(recorder.take()[0].events) if not span.label.hidden]
    assert labels == [Label("backward", "(loss)"), Label("backward", "")]


def test_python_profiles_a_task_into_a_folder(tmp_path):
    said = []
    outcome = profile(residual(), steps=2, workers=2, out=tmp_path / "run", notify=said.append)
    assert json.loads((tmp_path / "run" / "profile.json").read_text()) == json.loads(json.dumps(outcome.to_json()))
    assert (outcome.profile.setting.workers, outcome.profile.setting.processes, outcome.profile.steps) == (2, 1, 2)
    assert "with the profiler" in said[0]
    with pytest.raises(UsageError, match="several processes need a task that each of them can load"):
        profile(residual(), workers=2, processes=2, out=tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """`profile digits --json`, as a person runs it."""
    folder = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-m", "scalewise", "profile", "digits", "--json", "--steps", "60", "--out", "one"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder / "one"


def test_profile_digits(digits):
    document, screen, folder = digits
    check_sum(document)
    assert json.loads((folder / "profile.json").read_text()) == document
    check_trace(json.loads((folder / "trace.json").read_text()))
    assert [one["kind"] for one in document["layers"]].count("Conv2d") == 2
    other = next(phase for phase in document["phases"] if phase["name"] == OTHER)
    assert other["share"] < 0.2
    assert document["overhead"]["rounds"] >= 3
    assert document["overhead"]["low"] <= document["overhead"]["share"] <= document["overhead"]["high"]
    assert document["memory"][0]["memory_bytes"] > 50e6
    assert 0 < document["utilisation"][0]["processor_share"] < 4
    times = [
        (piece["start_seconds"], piece["worked_seconds"] + piece["waited_seconds"]) for piece in document["timeline"]
    ]
    assert times == sorted(times)
    covered = sum(seconds for _, seconds in times)
    assert 0.5 * document["step_seconds"] < covered < 3 * document["step_seconds"]
    for words in (
        document["bottleneck"],
        "Where the time of a step goes",
        "Layer by layer",
        "one step",
        "more processor time",
    ):
        assert words in " ".join(screen.split())


def test_two_processes_show_what_is_hidden(scalewise, tmp_path):
    done = scalewise("profile", "digits", "--workers", 4, "--processes", 2, "--steps", 12, "--json", "--out", "two")
    document = done.json
    check_sum(document)
    assert document["processes"] == 2
    assert [one["process"] for one in document["by_process"]] == [0, 1]
    for one in document["by_process"]:
        check_sum(one)
    exchanged = document["communication"]
    assert exchanged["operations"] >= 2
    assert exchanged["waited_seconds"] > 0
    assert exchanged["hidden_seconds"] >= exchanged["behind_backward_seconds"] >= 0
    flying = exchanged["in_flight_seconds"]
    assert 0 < exchanged["hidden_seconds"] <= flying
    waited = next(phase for phase in document["phases"] if phase["name"] == "communication")["waited_seconds"]
    assert waited == pytest.approx(exchanged["waited_seconds"], rel=0.01)
    assert {piece["process"] for piece in document["timeline"]} == {"0", "1"}
    check_trace(json.loads((tmp_path / document["trace"]).read_text()))
    assert "hidden behind work" in " ".join(done.stderr.split())
    assert document["steps"] == 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--processes", "2"], "processes must be between 1 and the number of workers (1), got 2"),
        (["digits", "--steps", "0"], "steps must be at least 1, got 0"),
        (["digits", "--worker-batch", "0"], "worker_batch"),
        (["nothing"], "nothing"),
        (["digits", "--loaders", "-1"], "loaders must be at least 0"),
        (["digits", "--out", "used"], "must be a new or empty folder"),
    ],
)
def test_bad_input_is_one_line(scalewise_here, tmp_path, arguments, words):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    done = scalewise_here("profile", *arguments)
    assert done.code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_failing_task_leaves_no_folder(scalewise_here, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import scalewise as sw, torch\nfrom torch.nn import functional as F\n"
        "class Bad(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        raise ValueError('no such thing')\n"
        "def task():\n    x = torch.zeros(8, 2)\n    y = torch.zeros(8, dtype=torch.long)\n"
        "    return sw.Task(model=Bad, train=(x, y), test=(x, y), loss=F.cross_entropy)\n"
    )
    done = scalewise_here("profile", "broken.py")
    assert done.code == 1
    assert "no such thing" in done.stderr
    assert not (tmp_path / "runs").exists()
