"""Other people's loops and models, against the real libraries: few processes, since importing them is slow."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
import scalewise.adapters
from conftest import environment
from scalewise.doctor.observations import read_folder
from scalewise.doctor.runs import read_run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LOOPS = {  # and how many lines watching may add
    "plain_loop.py": 3,
    "accelerate_loop.py": 2,
    "lightning_digits.py": 2,
    "transformers_symbols.py": 2,
    "keras_digits.py": 2,
}


def python(folder: Path, *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    known = environment() | {"KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", LOOPS)
def test_a_few_lines_give_noise_scale_and_diagnosis_and_change_nothing(tmp_path, name):
    lines = (EXAMPLES / name).read_text().splitlines()
    plain = [line for line in lines if not line.endswith("# sw")]
    assert 0 < len(lines) - len(plain) <= LOOPS[name]
    if name == "plain_loop.py":
        assert len(plain) <= 40
    said = python(tmp_path, EXAMPLES / name)
    assert re.search(r"noise scale [\d,.]+ samples \(95 %: ", said)
    assert "nothing found; " in said
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / name).write_text("\n".join(plain))
    without = python(tmp_path / "without", tmp_path / "without" / name)
    assert re.search("^weights .*$", said, re.MULTILINE)[0] in without
    assert not (tmp_path / "without" / "watch").exists()
    if name == "lightning_digits.py":
        logged = next(tmp_path.glob("lightning_logs/*/metrics.csv")).read_text()
        assert "noise_scale/value" in logged


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    def run(library: str) -> dict:
        said = python(tmp_path_factory.mktemp(library), Path(__file__).parent / "jobs" / "adapted.py", library)
        return json.loads(next(line for line in said.splitlines() if line.startswith("{")))

    return run


def test_a_lightning_module_as_a_task(job):
    said = job("lightning")
    assert said["loss"][0] == pytest.approx(said["loss"][1], rel=1e-6)
    assert said["accuracy"][0] == pytest.approx(said["accuracy"][1])
    recipe = said["recipe"]
    assert (recipe["optimizer"], recipe["lr"], recipe["weight_decay"]) == ("adamw", 0.005, 0.01)
    assert said["loaded"] == 64
    assert "got a tuple of 2; say how" in said["refused"]
    assert {*said["plain"]} == {"loss", "acc"}
    assert "Manual with automatic_optimization = False; remove" in said["manual"]
    assert "with a training_step, got Idle without" in said["idle"]
    assert {"loss", "accuracy"} <= {*said["result"]["test"]}


def test_a_transformers_model_as_a_task_counts_tokens(job):
    said = job("transformers")
    assert said["loss"][0] == pytest.approx(said["loss"][1], rel=1e-5)
    assert said["weight"][0] == said["weight"][1]
    assert said["accuracy"][0] == said["accuracy"][1]
    assert said["result"]["noise_scale"] is not None
    assert "accuracy" in said["bert"]["test"]
    recipe = said["recipe"]
    assert (recipe["worker_batch"], recipe["micro_batch"], recipe["schedule"], recipe["clip_norm"]) == (
        8,
        4,
        "linear",
        1.0,
    )
    assert (recipe["warmup_epochs"], said["warm"]["warmup_epochs"], said["rising"]) == (0.0, 12 * 8 / 64, 0.75)
    assert (recipe["precision"], said["warm"]["precision"]) == ("fp32", "bf16")
    assert "got adamw_torch_fused, linear, label_smoothing_factor; say how" in said["refused"]


def test_a_keras_model_as_a_task(job):
    said = job("keras")
    assert said["loss"][0] == pytest.approx(said["loss"][1], rel=1e-4)
    assert said["accuracy"][0] == pytest.approx(said["accuracy"][1])
    assert said["means"] < 1e-6  # batch norm moved its statistics as Keras does
    assert said["loaded"] < 1e-5
    recipe = said["recipe"]
    assert (recipe["optimizer"], recipe["lr"], recipe["epsilon"]) == ("adam", 0.002, 1e-7)
    assert "RMSprop" in said["refused"]
    # the first mean, by the name that it really has; an IoU is none
    assert said["counts"] == [["sparse_categorical_accuracy", True], ["entropy", False], ["loss", False]]
    hashes = {said[name]["weights_sha256"] for name in ("result", "ghost", "sync")}
    assert len(hashes) == 3  # each kind of batch norm is really that


def test_dropout_and_batch_norm_of_keras_have_the_same_bytes_on_two_processes(scalewise):
    words = ("--workers", 2, "--steps", 2, "--recipe", "plain", "--json", "--quiet")
    one, two = (scalewise("train", EXAMPLES / "keras_digits.py", *words, "--processes", p).json for p in (1, 2))
    assert one["weights_sha256"] == two["weights_sha256"]


def watched_once(tmp_path: Path, extra_path: bool) -> sw.watching.watcher.Watcher:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(9, 6), torch.randint(3, (9,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        loss = F.cross_entropy(model(x), y)
        (loss + model[0].weight.square().sum() if extra_path else loss).backward()
        optimizer.step()
    model.zero_grad()
    squares = []
    for rows in (slice(4), slice(4, None)):
        model.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        squares.append(sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters()))
    (step,) = read_folder(tmp_path / "w")[0].steps
    return watcher, step, sum(squares) / 2


def test_the_parts_of_a_micro_batch_have_the_gradients_of_their_samples_alone(tmp_path):
    _, step, expected = watched_once(tmp_path, extra_path=False)
    assert step.part_square == pytest.approx(expected, rel=1e-4)
    assert step.part_samples == pytest.approx(2 / (1 / 4 + 1 / 5))


def test_a_loss_with_another_path_to_the_weights_is_not_taken_apart(tmp_path):
    watcher, step, _ = watched_once(tmp_path, extra_path=True)
    assert step.part_square is None
    assert "output alone" in watcher._halves.problem


def test_the_noise_scale_of_halves_is_that_of_micro_batches(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator) + torch.randn(4096, 1, generator=generator)
    found = {}
    for micro_batches in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with sw.watch(model, optimizer, tmp_path / str(micro_batches)):
            for step in range(400):
                rows = torch.randint(4096, (64,), generator=torch.Generator().manual_seed(step))
                for part in rows.chunk(micro_batches):
                    (F.mse_loss(model(x[part]), y[part]) / micro_batches).backward()
                optimizer.step()
                optimizer.zero_grad()
        found[micro_batches] = read_run(tmp_path / str(micro_batches)).noise
    assert found[1].low < found[2].high
    assert found[2].low < found[1].high
    assert math.isclose(found[1].value, found[2].value, rel_tol=0.5)


def test_a_missing_extra_is_one_line_with_the_command(scalewise_here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "scalewise.adapters.lightning", raising=False)
    monkeypatch.delitem(vars(scalewise.adapters), "lightning", raising=False)  # another test may have imported it
    (tmp_path / "mine.py").write_text(
        "import scalewise as sw\ndef task():\n    return sw.adapters.lightning.task(0, 0)\n"
    )
    outcome = scalewise_here("train", "mine.py")
    assert outcome.code == 2
    expected = "scalewise: lightning is needed and not installed; run: pip install 'scalewise[lightning]'\n"
    assert outcome.stderr == expected
    (tmp_path / "theirs.py").write_text("import lightning\n")
    assert scalewise_here("train", "theirs.py").stderr == expected


def test_a_missing_tracker_is_said_before_training(scalewise_here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = scalewise_here("train", "linear", "--track", "trackio")
    assert (outcome.code, outcome.stderr) == (
        2,
        "scalewise: trackio is needed and not installed; run: pip install 'scalewise[trackio]'\n",
    )
