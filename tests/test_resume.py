"""Whatever ends a run, resuming it gives the weights of the undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

import scalewise as sw
from conftest import environment, forked, forking
from forked import Started
from scalewise import records

BUDGET = ["--epochs", "4"]
RECIPE = ["--workers", "8", "--worker-batch", "16", "--seed", "3", "--lr", "0.002", "--lr-rule", "sqrt"]
RECIPE += ["--optimizer", "adam"]
FLAGS = [*RECIPE, *BUDGET, "--warmup-epochs", "0.4"]
TASK = ["train", "digits", "--set", "bn=true", "--set", "dropout=0.2"]


def start(folder: Path, *arguments: str) -> Started:
    return forking().start([*arguments], folder, environment())


def wait_for(condition, process: Started, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_tree(process: Started) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        os.kill(member.pid, signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(family, timeout=20)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = forked("scalewise", folder, *TASK, *FLAGS, "--processes", 1, "--out", "run", "--json", "--quiet")
    return done.json | {"records": list(records.read(folder / "run" / "metrics.jsonl"))}


@pytest.mark.parametrize(("before", "after", "extra"), [(1, 3, []), (3, 2, ["--shard-optimizer"])])
def test_killed_in_mid_epoch_and_resumed_elsewhere(scalewise, tmp_path, undisturbed, before, after, extra):
    run = tmp_path / "run"
    flags = [*FLAGS, "--out", "run", "--checkpoint-steps", "5", "--processes", str(before), *extra]
    process = start(tmp_path, *TASK, *flags)
    wait_for(lambda: (run / "checkpoints" / "step-15").exists(), process)
    kill_tree(process)
    assert not (run / "result.json").exists()
    result = scalewise(*TASK, "--resume", "run", "--processes", after, "--json", "--quiet").json
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    for key in ("test", "train", "noise_scale", "steps", "samples"):
        assert result[key] == undisturbed[key], key
    timeless = ("seconds", "input_seconds", "samples_per_second", "run", "processes")
    kept = [
        {key: record[key] for key in record if key not in timeless} for record in records.read(run / "metrics.jsonl")
    ]
    expected = [{key: record[key] for key in record if key not in timeless} for record in undisturbed["records"]]
    assert kept == expected


@pytest.mark.parametrize(("number", "code", "processes"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)])
def test_stopped_by_a_signal_and_resumed(scalewise, tmp_path, undisturbed, number, code, processes):
    process = start(tmp_path, *TASK, *FLAGS, "--out", "run", "--checkpoint-steps", "5", "--processes", str(processes))
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "step-5").exists(), process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "its state is saved" in stderr
    result = scalewise(*TASK, "--resume", "run", "--processes", 3 - processes, "--json", "--quiet").json
    assert result["weights_sha256"] == undisturbed["weights_sha256"]
    assert result["noise_scale"] == undisturbed["noise_scale"]


def test_killed_before_the_first_checkpoint(scalewise, tmp_path, undisturbed):
    process = start(tmp_path, *TASK, *FLAGS, "--out", "run", "--processes", "1")
    wait_for(lambda: (tmp_path / "run" / "recipe.json").exists(), process)
    kill_tree(process)
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    outcome = scalewise(*TASK, "--resume", "run", "--processes", 1, "--json")
    assert outcome.json["weights_sha256"] == undisturbed["weights_sha256"]
    assert "no checkpoint yet" in outcome.stderr


def test_a_damaged_checkpoint_is_passed_over(scalewise, tmp_path, undisturbed):
    flags = [*FLAGS, "--steps", "20", "--checkpoint-steps", "7", "--processes", "1", "--out", "run"]
    assert scalewise(*TASK, *flags).code == 0
    shards = sorted((tmp_path / "run" / "checkpoints").glob("step-*/shard-0.safetensors"))
    newest = max(shards, key=lambda path: int(path.parent.name.split("-")[1]))
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    steps = undisturbed["steps"]
    outcome = scalewise(*TASK, "--resume", "run", "--steps", steps, "--processes", 1, "--json")
    assert "is damaged" in outcome.stderr
    assert outcome.json["weights_sha256"] == undisturbed["weights_sha256"]


def test_a_finished_run_with_nothing_left_says_so(scalewise):
    assert scalewise("train", "digits", "--steps", 3, "--quiet").code == 0
    again = scalewise("train", "digits", "--resume", "auto")
    assert again.code == 0
    assert "nothing is left to train" in again.stderr
    assert "nothing is left" not in scalewise("train", "digits", "--resume", "auto", "--steps", 5).stderr


def test_a_finished_run_goes_on_with_more_epochs(scalewise, undisturbed):
    assert scalewise(*TASK, *RECIPE, "--epochs", 2, "--processes", 2, "--warmup-epochs", 0.4).code == 0
    result = scalewise(*TASK, "--resume", "auto", "--epochs", 4, "--processes", 1, "--json", "--quiet").json
    assert result["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.parametrize(
    ("optimizer", "lr", "before", "after"),
    [
        ("lars", 0.5, ["--processes", 1], ["--processes", 2, "--shard-optimizer"]),
        ("lamb", 0.01, ["--processes", 3, "--shard-optimizer"], ["--processes", 2, "--reduce", "server"]),
        ("muon", 0.005, ["--processes", 2], ["--processes", 1]),
        ("soap", 0.005, ["--processes", 3], ["--processes", 2, "--reduce", "server"]),
        ("schedule-free", 0.01, ["--processes", 3, "--shard-optimizer"], ["--processes", 2, "--reduce", "server"]),
    ],
)
def test_optimizers_of_whole_layers_go_on_elsewhere(scalewise, optimizer, lr, before, after):
    fields = {"workers": 3, "worker_batch": 16, "optimizer": optimizer, "lr": lr, "momentum": 0.8, "weight_decay": 0.01}
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert scalewise("train", "digits", *flags, "--recipe", "plain", "--steps", 7, *before, "--quiet").code == 0
    found = scalewise("train", "digits", "--resume", "auto", "--steps", 12, *after, "--json", "--quiet").json
    recipe = sw.Recipe(**fields, steps=12, threads=1)
    *_, expected = sw.train(sw.load_task("digits"), recipe, sw.Placement(device="cpu"))
    assert found["weights_sha256"] == expected.weights_sha256
    assert found["test"] == expected.test


def test_old_checkpoints_go_and_the_best_stays(scalewise, tmp_path):
    flags = ["--epochs", "8", "--patience", "3", "--lr", "0.3", "--out", "run"]
    result = scalewise("train", "mlp", *flags, "--json", "--quiet").json
    epochs = [record for record in records.read(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "epoch"]
    best = [record["step"] for record in epochs if record["best"]][-1]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    newest = {f"step-{record['step']}" for record in epochs[-2:]}
    assert kept == newest | {f"step-{best}"}
    assert result["best_sha256"] != result["weights_sha256"]
    assert result["validation"]["accuracy"] == max(record["validation"]["accuracy"] for record in epochs)


def test_no_usable_checkpoint_is_an_error_and_loses_nothing(scalewise, tmp_path):
    assert scalewise("train", "linear", "--steps", 200, "--checkpoint-steps", 100, "--out", "run").code == 0
    records_before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/index.json"):
        path.write_bytes(b"\xff\xfe not json")
    outcome = scalewise("train", "linear", "--resume", "run", "--steps", 300)
    assert outcome.code == 1
    assert "none of the checkpoints can be used" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == records_before


def test_a_checkpoint_of_another_model_is_refused(scalewise, tmp_path):
    text = Path(__file__).parents[1].joinpath("examples", "simple_task.py").read_text()
    (tmp_path / "mine.py").write_text(text)
    assert scalewise("train", "mine.py", "--steps", 5, "--out", "run").code == 0
    (tmp_path / "mine.py").write_text(text.replace("width: int = 32", "width: int = 33"))
    outcome = scalewise("train", "mine.py", "--resume", "run", "--steps", 9)
    assert outcome.code == 1
    assert "does not fit this model" in outcome.stderr


def test_settings_that_would_change_the_training_data_are_refused(scalewise):
    assert scalewise("train", "linear", "--steps", 5, "--out", "run").code == 0
    outcome = scalewise("train", "linear", "--resume", "run", "--steps", 9, "--patience", 2)
    assert outcome.code == 2
    assert "hold a tenth out" in outcome.stderr


def test_exactness_once_lost_is_not_claimed_again(scalewise):
    flags = ["--workers", 2, "--recipe", "plain", "--processes", 1, "--out", "run"]
    assert scalewise("train", "linear", *flags, "--epochs", 1, "--reduce", "allreduce", "--json").json["exact"] is False
    assert scalewise("train", "linear", "--resume", "run", "--epochs", 2, "--json").json["exact"] is False


def test_epochs_on_resume_win_over_stored_steps(scalewise):
    assert scalewise("train", "linear", "--steps", 5, "--out", "run").code == 0
    assert scalewise("train", "linear", "--resume", "run", "--epochs", 1, "--json").json["steps"] == 80


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A finished run of digits."""
    folder = tmp_path_factory.mktemp("two-steps")
    process = start(folder, "train", "digits", "--steps", "2", "--out", "run", "--quiet")
    assert process.communicate()[1] == ""
    return folder / "run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "digits", "--resume", "run", "--lr", "0.5"], ["lr=0.02", "0.5", "--lr"]),
        (["train", "mlp", "--resume", "run"], ["task digits", "mlp"]),
        (["train", "digits", "--set", "bn=true", "--resume", "run"], ["digits", "bn=true"]),
        (["train", "digits", "--resume", "nowhere"], ["nowhere", "no recipe.json"]),
        (["train", "digits", "--out", "run"], ["new or empty folder", "--resume run"]),
    ],
)
def test_another_task_or_recipe_is_refused(scalewise_here, tmp_path, two_steps, arguments, words):
    shutil.copytree(two_steps, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    outcome = scalewise_here(*arguments)
    assert outcome.code == 2
    assert len(outcome.stderr.splitlines()) == 1
    for word in words:
        assert word in outcome.stderr
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
