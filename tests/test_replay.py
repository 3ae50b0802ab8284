"""A step computed again is the step that was; two runs part where they were made to."""

from __future__ import annotations

import json
import shutil

import pytest

from conftest import environment
from scalewise.records import read
from scalewise.runs import bisect, replay

FLAGS = ["--workers", 2, "--recipe", "plain", "--steps", 24, "--checkpoint-steps", 10]
FLAGS += ["--processes", 1, "--quiet"]

NOT_FINITE = """
import torch
import scalewise as sw
from torch import nn
from torch.nn import functional as F

class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(context, x, wrong):
        context.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * (float("inf") if context.wrong else 1.0), None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(Infinite.apply(torch.relu(self.first(x)), bool((x[:, 0] > 90).any())))

def task():
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    x[123, 0] = 100.0
    return sw.Task(name="infinite", model=Model, train=(x, x.argmax(1) % 3), test=(x[:9], x[:9].argmax(1) % 3),
                   loss=F.cross_entropy, recipe=sw.Recipe(worker_batch=8, optimizer="sgd", lr=0.01))
"""


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory):
    """A run of 24 steps with the checkpoints of steps 20 and 24."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["train", "linear", *map(str, FLAGS), "--worker-batch", "8", "--out", "run"]
    assert forks.run(words, folder, environment(), tmp_path_factory.mktemp("said"), timeout=240) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(("step", "start"), [(1, 0), (7, 0), (21, 20), (24, 20)])
def test_a_step_is_computed_again_bit_for_bit(scalewise_here, run, step, start):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = scalewise_here("replay", "run", "--step", step, "--json").json
    (recorded,) = [one for one in read(run / "metrics.jsonl") if one["kind"] == "step" and one["step"] == step]
    assert found["matches"] is True
    assert found["recomputed"] == {name: recorded[name] for name in ("loss", "gradient_norm", "lr")}
    assert (found["start"], found["trained_steps"]) == (start, step - 1 - start)
    assert [len(one["samples"]) for one in found["workers"]] == [8, 8]
    mean = sum(one["loss"] * one["weight"] for one in found["workers"]) / sum(one["weight"] for one in found["workers"])
    assert mean == pytest.approx(recorded["loss"])
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_python_replays_and_bisects(run, tmp_path):
    found = replay.replay(run, step=7)
    assert (found.run, found.matches, found.trained_steps) == (run, True, 6)
    shutil.copytree(run, tmp_path / "other")
    same = bisect.bisect(run, tmp_path / "other")
    assert (same.comparison.differ, same.recomputed) == (False, None)


def test_a_record_that_does_not_come_out_again_is_said(scalewise_here, run):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    wrong = json.loads(lines[6])
    lines[6] = json.dumps(wrong | {"loss": wrong["loss"] * (1 + 1e-12)})
    metrics.write_text("\n".join(lines) + "\n")
    outcome = scalewise_here("replay", "run", "--step", 7)
    assert outcome.code == 1
    assert "Not what the run recorded" in outcome.stderr
    assert f"loss: recorded {wrong['loss'] * (1 + 1e-12)!r}, now {wrong['loss']!r}" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "25"], ["from 1 to the run's 24 steps", "got 25"]),
        (["--step", "0"], ["got 0"]),
        ([], ["--step", "did not fail"]),
        (["--step", "3", "--task", "digits"], ["task linear", "digits"]),
    ],
)
def test_what_cannot_be_replayed(scalewise_here, run, arguments, words):
    outcome = scalewise_here("replay", "run", *arguments)
    assert outcome.code == 2
    for word in words:
        assert word in outcome.stderr


def test_a_gradient_that_is_not_finite_is_named_saved_and_replayed(scalewise, tmp_path):
    (tmp_path / "infinite.py").write_text(NOT_FINITE)
    flags = ["--workers", 4, "--recipe", "plain", "--steps", 30, "--processes", 2, "--checkpoint-steps", 2]
    outcome = scalewise("train", "infinite.py", *flags, "--out", "run")
    assert outcome.code == 1
    failure = [*read(tmp_path / "run" / "metrics.jsonl")][-1]
    assert failure["kind"] == "failure"
    assert failure["parameter"] == "first.weight"
    assert 123 in failure["samples"]
    assert failure["reason"] in outcome.stderr.replace("\n", " ")
    untrusted = scalewise("replay", "run")
    assert untrusted.code == 2
    assert "--task infinite.py" in untrusted.stderr
    found = scalewise("replay", "run", "--task", "infinite.py", "--json").json
    assert found["step"] == failure["step"]
    assert found["matches"] is True
    wrong = [(one["worker"], one["not_finite"]) for one in found["workers"] if one["not_finite"]]
    assert wrong == [(failure["worker"], ["first.weight", "first.bias"])]


def test_runs_that_do_not_differ(scalewise_here, run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    outcome = scalewise_here("bisect", "run", "other", "--json")
    assert outcome.json["differ"] is False
    assert outcome.json["step"] is None
    assert outcome.json["checkpoints"]["same"] == [20, 24]
    assert "They do not differ: the records of 24 steps" in outcome.stderr


@pytest.mark.parametrize(
    ("flags", "step", "stage", "reason"),
    [
        (["--worker-batch", 8, "--seed", 1], 1, "start", "seed"),
        (["--worker-batch", 8, "--weight-decay", 0.1], 1, "update", "weight_decay"),
        (["--worker-batch", 4], 1, "samples", "worker_batch"),
    ],
)
def test_runs_that_differ(scalewise, run, flags, step, stage, reason):
    assert scalewise("train", "linear", *FLAGS, *flags, "--out", "other").code == 0
    found = scalewise("bisect", "run", "other", "--json").json
    assert (found["differ"], found["step"], found["stage"]) == (True, step, stage)
    assert reason in [one["what"] for one in found["reasons"]]
    assert (found["worker"] == 0) == (stage == "samples")
    assert (found["tensor"] in ("0.bias", "0.weight")) == (stage != "samples")


def test_a_run_that_was_not_computed_right_is_found(scalewise_here, run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    metrics = tmp_path / "other" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    wrong = json.loads(lines[12])
    lines[12] = json.dumps(wrong | {"loss": wrong["loss"] * (1 + 1e-12)})
    metrics.write_text("\n".join(lines) + "\n")
    outcome = scalewise_here("bisect", "run", "other", "--json")
    assert outcome.json["step"] == 13
    assert outcome.json["reproduced"] == [True, False]
    assert "not what right recorded" in outcome.stderr
    assert "silent fault" in outcome.stderr


@pytest.mark.parametrize("step", ["", ', "step": []', ', "step": "7"', ', "step": 7.5'])
def test_records_of_no_step_are_refused(scalewise_here, run, tmp_path, step):
    shutil.copytree(run, tmp_path / "other")
    metrics = run / "metrics.jsonl"
    metrics.write_text(f'{{"kind": "failure"{step}}}\n' + metrics.read_text())
    (run / "env.json").write_text('{"task": [1]}')
    for words in (["replay", "run", "--step", 7], ["bisect", "run", "other"]):
        outcome = scalewise_here(*words)
        assert outcome.code == 2
        assert "metrics.jsonl, line 1 must be a record" in " ".join(outcome.stderr.split())
    metrics.unlink()
    assert scalewise_here("bisect", "run", "other", "--json").json["differ"] is False


def test_a_run_is_not_compared_with_itself(scalewise_here, run):
    outcome = scalewise_here("bisect", "run", "run")
    assert outcome.code == 2
    assert "twice" in outcome.stderr
