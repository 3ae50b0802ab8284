"""`scalewise measure` as a person or a script meets it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import scalewise as sw
from scalewise.cli.measure import RecipeFlags, measure
from scalewise.engine.store.folder import RunFolder, RunRecipe
from scalewise.errors import RunFolderError, TaskError, TooLittleMemory, UsageError
from scalewise.runs.measure import measure as parts
from scalewise.runs.run import train_in
from test_resume import start, wait_for

KEYS = {
    "run", "task", "workers", "worker_batch", "global_batch", "optimizer", "noise_scale", "verdict", "plain",
    "preconditioned", "stages", "layers", "steps", "group_samples", "critical_batch", "efficiency", "verified",
    "missed", "largest_worker_batch", "memory", "throughput", "training", "knee", "knee_interval", "best_worker_batch",
    "inference", "flops_per_sample", "peak_flops_per_second", "mfu", "device", "threads", "sharpness", "landscape",
    "seconds",
}  # fmt: skip
ALL_SKIPPED = ["--skip", "noise", "--skip", "memory", "--skip", "throughput"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Three short runs of digits, with small and large global batches."""
    folder = tmp_path_factory.mktemp("runs")
    task = sw.load_task("digits")
    for name, fields in {"small": {"seed": 1}, "large": {"worker_batch": 256}, "third": {"seed": 2}}.items():
        recipe = task.recipe.replace(epochs=2.0, threads=1, **fields)
        train_in(RunFolder(folder / name), task, RunRecipe("digits", [], recipe, []))
    return folder


def test_the_json_is_the_contract(scalewise, tmp_path):
    flags = ["--workers", 8, "--steps", 16, "--memory", "1GB", "--layers", "--out", "measured"]
    outcome = scalewise("measure", "digits", *flags, "--json")
    document = outcome.json
    assert set(document) == KEYS
    assert set(document["noise_scale"]) == {"value", "low", "high", "enough"}
    assert document["noise_scale"]["low"] < document["noise_scale"]["value"] < document["noise_scale"]["high"]
    found, scale = document["critical_batch"], document["noise_scale"]
    assert found["method"] == "noise scale"
    assert min(stage["noise_scale"]["low"] for stage in document["stages"]) < found["value"] <= scale["value"]
    assert found["low"] <= found["value"] / 10 < found["value"] * 10 <= found["high"]  # a predictor, not a measurement
    assert document["largest_worker_batch"] == document["memory"]["largest_worker_batch"] > 32
    assert all(set(row) == {"worker_batch", "samples_per_second"} for row in document["throughput"])
    assert [row["worker_batch"] for row in document["throughput"]][:4] == [1, 2, 4, 8]
    assert document["knee"] in [row["worker_batch"] for row in document["throughput"]]
    assert [stage["name"] for stage in document["stages"]][:: len(document["stages"]) - 1] == ["start", "end"]
    assert [layer["name"] for layer in document["layers"]] == [
        "0.weight", "0.bias", "2.weight", "2.bias", "6.weight", "6.bias",
    ]  # fmt: skip
    critical = document["critical_batch"]["value"]
    at = {row["workers"]: row for row in document["efficiency"]}
    assert [*at] == [1, 2, 4, 8, 16, 32]
    assert at[8]["worth"] == pytest.approx(1 / (1 + 256 / critical))
    assert at[8]["steps"] == pytest.approx((1 + critical / 256) / (1 + critical / 32))
    assert (document["sharpness"], document["landscape"], document["verified"]) == (None, None, None)
    assert (tmp_path / "measured" / "measure.json").read_text() == outcome.stdout
    shown = " ".join(outcome.stderr.split())
    worth = round(100 * at[8]["worth"])
    assert f"At 8 workers it is worth {worth} %." in shown
    assert f"fastest from worker batch {document['knee']:,}" in shown
    assert set(document["seconds"]) == {"memory", "throughput", "noise"}


def test_sharpness_and_landscape_of_stored_runs(scalewise, runs):
    flags = ["--sharpness", "--between", "small", "large", "--plane", "third", "--samples", 64, "--out", "minima"]
    flags += ALL_SKIPPED
    document = scalewise("measure", "digits", *flags, "--json", cwd=runs).json
    assert document["noise_scale"] is None
    line, plane = document["landscape"]["line"], document["landscape"]["plane"]
    at = {row["alpha"]: row for row in line["rows"]}
    for alpha, name in ((0.0, "small"), (1.0, "large")):
        result = json.loads((runs / name / "result.json").read_text())
        assert at[alpha]["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"], abs=0.1)
        own = next(row for row in document["sharpness"] if row["run"] == name)
        assert own["full"]["loss"] == pytest.approx(at[alpha]["train"]["loss"], rel=0.05)
        (wide, narrow) = own["full"]["rows"]
        assert (wide["epsilon"], narrow["epsilon"]) == (1e-3, 5e-4)
        assert wide["value"] > narrow["value"] > own["subspace"]["rows"][1]["value"] > 0
        assert own["subspace"]["subspace"] == 100
    assert line["barrier"] > 0.1  # runs of different seeds do not lie in one basin
    assert plane["direction"] == "third run"
    assert plane["runs"][:2] == [[0.0, 0.0], [1.0, 0.0]]
    assert [row["run"] for row in document["sharpness"]] == ["small", "large", "third"]


def measured(folder: Path, **flags: object) -> list[dict]:
    """The sharpness that a measurement in this process writes into its folder."""
    assert (
        measure("digits", sharpness=True, samples=64, skip=["noise", "memory", "throughput"], quiet=True, **flags) == 0
    )
    return json.loads((folder / "measure.json").read_text())["sharpness"]


def test_a_run_of_the_same_file_is_one_of_this_task_however_its_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from scalewise.tasks.digits import digits as task")
    monkeypatch.chdir(tmp_path)
    task = sw.load_task("mine.py")
    run = RunRecipe("mine.py", [], task.recipe.replace(steps=2, threads=1), [])
    train_in(RunFolder(tmp_path / "run"), task, run)
    skipped = {"skip": ["noise", "memory", "throughput"], "samples": 16, "quiet": True}
    assert (
        measure(str(tmp_path / "mine.py"), sharpness=True, weights=tmp_path / "run", out=tmp_path / "a", **skipped) == 0
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "other" / "mine.py")
    with pytest.raises(RunFolderError, match=r"is a run of task mine.py, got other/mine.py"):
        measure("other/mine.py", sharpness=True, weights=tmp_path / "run", out=tmp_path / "b", **skipped)


def test_sharpness_of_a_checkpoint_and_of_a_run_trained_for_it(runs, tmp_path):
    checkpoint, a, b = runs / "small" / "checkpoints" / "step-90", tmp_path / "a", tmp_path / "b"
    stored = measured(a, weights=checkpoint, out=a)
    trained = measured(b, flags=RecipeFlags(epochs=2.0, seed=1, threads=1), out=b)
    assert stored[0]["run"] == str(checkpoint)
    assert trained[0]["full"] == stored[0]["full"]  # the last checkpoint of the same recipe
    written = (b / "trained" / "result.json").read_bytes()
    assert measured(b, resume=str(b)) == trained
    assert (b / "trained" / "result.json").read_bytes() == written  # read, not trained again
    with pytest.raises(RunFolderError, match=r"was begun with given=.'epochs': 2.0, 'threads': 1, 'seed': 1."):
        measured(b, flags=RecipeFlags(epochs=3.0), resume=str(b))
    with pytest.raises(RunFolderError, match="found one in use"):
        measured(b, out=b)


def test_a_loss_that_is_never_reached_is_said_and_the_rest_is_kept(scalewise, tmp_path):
    flags = ["--epochs", 0.2, "--skip", "memory", "--skip", "throughput", "--verify", "sweep", "--seeds", 1]
    missed = scalewise("measure", "logistic", *flags, "--target", 1e-6, "--out", "run", "--json")
    assert missed.code == 3
    assert "validation loss 1e-06 must be reached" in missed.stderr
    assert missed.json["verified"] is None
    assert "validation loss 1e-06" in missed.json["missed"]
    assert missed.json["critical_batch"]["method"] == "noise scale"
    assert json.loads((tmp_path / "run" / "measure.json").read_text()) == missed.json


def test_the_critical_batch_is_checked_by_branches_that_are_kept(scalewise, tmp_path):
    flags = ["--epochs", 1, "--skip", "memory", "--skip", "throughput", "--verify", "branch", "--seeds", 1]
    outcome = scalewise("measure", "logistic", *flags, "--out", "run", "--json")
    verified = outcome.json["verified"]
    assert verified["cheap"]["method"] == "noise scale"
    assert verified["critical_batch"]["method"] == "branch"
    assert verified["agreement"].startswith("they ")
    assert f"Cheap and direct: {verified['agreement'][:20]}" in outcome.stderr
    assert [stage["name"] for stage in verified["stages"]] == ["start", "middle", "end"]
    assert [*(tmp_path / "run" / "branch").rglob("*.json")]  # which --resume reads instead of training again


def test_a_part_that_does_not_fit_into_memory_leaves_what_was_measured_before(tmp_path, monkeypatch, capsys):
    def short(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(parts, "sharpness", short)
    flags = RecipeFlags(steps=20, threads=1)
    with pytest.raises(TooLittleMemory, match="sharpness must fit into memory, what was measured before it is kept"):
        measure("logistic", flags=flags, skip=["memory", "throughput"], sharpness=True, out=tmp_path / "run")
    document = json.loads((tmp_path / "run" / "measure.json").read_text())
    assert document["noise_scale"]["value"] > 0
    assert document["missed"].startswith("sharpness must fit into memory")
    shown = " ".join(capsys.readouterr().err.split())
    assert "Noise scale over training" in shown
    assert "sharpness must fit into memory" in shown


def test_a_first_part_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch):
    def short(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(parts, "throughput", short)
    with pytest.raises(TooLittleMemory):
        measure("logistic", flags=RecipeFlags(steps=20), skip=["memory"], out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_for_one_sample(scalewise, tmp_path):
    short = scalewise("measure", "digits", "--memory", "20MB")
    assert (short.code, short.stdout) == (1, "")
    assert "must fit into 20 MB" in short.stderr
    assert not [*(tmp_path / "runs").iterdir()]  # nothing is left that one could go on with


def test_an_interrupt_leaves_nothing_half_written(tmp_path):
    process = start(tmp_path, "measure", "digits", "--skip", "memory", "--json")
    folder = tmp_path / "runs"
    wait_for(lambda: folder.is_dir() and any(folder.iterdir()), process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert not [*folder.iterdir()]


def test_an_interrupt_keeps_the_runs_of_a_verification(tmp_path):
    flags = ["--epochs", "1", "--skip", "memory", "--skip", "throughput", "--verify", "branch", "--out", "run"]
    process = start(tmp_path, "measure", "logistic", *flags)
    trials = tmp_path / "run" / "branch"
    wait_for(lambda: trials.is_dir() and any(trials.rglob("single-*")), process)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert (
        "SIGINT stopped the measurement; its runs are saved, continue with the same command and --resume run" in stderr
    )
    assert not (tmp_path / "run" / "measure.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"target": 0.1}, "--target is the loss that a sweep trains to, got 0.1; add --verify sweep"),
        ({"seeds": 3}, "--seeds are the runs of --verify, got 3"),
        ({"verify": "sweep", "seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"verify": "branch", "target": 0.1}, "--target is the loss that a sweep trains to"),
        ({"verify": "branch", "most_seeds": 9}, "--most-seeds bounds the runs of a sweep, got 9; add --verify sweep"),
        ({"verify": "sweep", "most_seeds": 0}, "--most-seeds must be at least 1, got 0"),
        ({"verify": "sweep", "seeds": 5, "most_seeds": 4}, "--most-seeds must be at least --seeds, 5, got 4; raise it"),
        ({"verify": "sweep", "skip": ["noise"]}, "got --skip noise too; drop one of them"),
        ({"verify": "sweep", "target": float("nan")}, "--target must be a finite loss, got nan"),
        ({"skip": ["memory", "noise", "throughput"]}, "something must be left to measure, got --skip noise --skip mem"),
        ({"layers": True, "skip": ["noise"]}, "--layers is the noise scale of every layer, got --skip noise too"),
        ({"memory": "99999999TB"}, "--memory must be at most 1,000,000 TB, got '99999999TB'"),
        ({"memory": "much"}, "--memory must be an amount of memory .* got 'much'"),
        ({"processes": 0}, "--processes must be at least 1, got 0"),
        ({"weights": Path("a")}, "--weights says whose sharpness is measured, got a alone; add --sharpness"),
        ({"plane": "random"}, "--plane needs two runs that lie in it"),
        ({"between": (Path("a"), Path("b"))}, "a must be the folder of a run, or one of its checkpoints"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        measure("digits", **flags)
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.parametrize(
    ("verify", "more", "words"),
    [
        ("sweep", ["--worker-batch", 128], "a sweep needs at least 3 global batches"),
        ("branch", ["--epochs", 0.2], "branches need a single-worker run of 64 steps or more"),
    ],
)
def test_a_verification_without_room_is_refused_before_anything_is_measured(verify, more, words, scalewise, tmp_path):
    outcome = scalewise("measure", "digits", "--set", "bn=true", "--verify", verify, *more, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert words in " ".join(outcome.stderr.split())
    assert "memory:" not in outcome.stderr
    assert not (tmp_path / "run").exists()


def test_data_too_few_for_the_noise_scale_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "largest_worker_batch", None)  # not called
    with pytest.raises(TaskError, match=r"at least 4 groups .* groups of 400; .* leave it out with --skip noise"):
        measure("digits", set=["bn=true"], flags=RecipeFlags(worker_batch=400, threads=1), quiet=True)
    assert not [*tmp_path.glob("runs/*")]


def test_runs_of_another_task_are_refused(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match="is a run of task digits, got digits bn=true; give the task and --set"):
        measure(
            "digits", set=["bn=true"], between=(runs / "small", runs / "large"), skip=["noise", "memory", "throughput"]
        )
