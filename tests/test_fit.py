"""Training into a folder from Python: stored, stopped, resumed, and the same bytes as the generator's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import models
import scalewise as sw
from conftest import environment
from scalewise.errors import Interrupted, RunFolderError

CPU = sw.Placement(device="cpu")
RECIPE = sw.Recipe(workers=4, worker_batch=10, steps=12, threads=1)

PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import models
import scalewise as sw

def show(record):
    if isinstance(record, sw.Step):
        print("step", record.step, flush=True)

result = sw.fit(
    models.double_mlp(), sw.Recipe(workers=4, worker_batch=10, steps=40, threads=1), sw.Placement(device="cpu"),
    folder="run", resume="auto", mode="plain", checkpoint_steps=1, on_record=show,
)
print(result.processes, "processes", result.weights_sha256)
"""


def trained(recipe: sw.Recipe = RECIPE) -> str:
    *_, result = sw.train(models.double_mlp(), recipe, CPU)
    return result.weights_sha256


def test_fit_stores_what_train_yields(tmp_path):
    seen: list[object] = []
    result = sw.fit(models.double_mlp(), RECIPE, CPU, folder=tmp_path / "run", mode="plain", on_record=seen.append)
    assert result.weights_sha256 == trained()
    assert [type(record).__name__ for record in seen].count("Step") == RECIPE.steps
    assert seen[-1] == result
    assert json.loads((tmp_path / "run/result.json").read_text()) == result.to_json()
    assert json.loads((tmp_path / "run/recipe.json").read_text())["task"] == "python:task"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_continues(tmp_path, number):
    def stop(record: object) -> None:
        if isinstance(record, sw.Step) and record.step == 5:
            signal.raise_signal(number)

    handler = signal.getsignal(number)
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"{number.name} stopped the run after step") as stopped:
        sw.fit(models.double_mlp(), RECIPE, CPU, folder=folder, mode="plain", on_record=stop)
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is handler
    assert not (folder / "result.json").exists()
    seen: list[object] = []
    result = sw.fit(models.double_mlp(), RECIPE, CPU, folder=folder, resume="auto", mode="plain", on_record=seen.append)
    assert isinstance(seen[0], sw.Step)
    assert 5 < seen[0].step <= 8
    assert result.weights_sha256 == trained()


def test_the_task_fills_in_what_a_recipe_leaves_open(tmp_path):
    task = sw.load_task("linear")
    result = sw.fit(task, sw.Recipe(workers=8, steps=6), CPU, folder=tmp_path / "auto")
    stored = json.loads((tmp_path / "auto/recipe.json").read_text())
    assert stored["recipe"]["worker_batch"] == task.recipe.worker_batch
    assert {value["field"] for value in result.derived} > {"threads"}
    plain = sw.fit(task, sw.Recipe(workers=8, steps=6, threads=1), CPU, folder=tmp_path / "plain", mode="plain")
    assert plain.worker_batch == sw.Recipe().worker_batch
    assert plain.derived == []


def test_resume_needs_the_same_recipe_and_a_new_run_a_new_folder(tmp_path):
    sw.fit(models.double_mlp(), RECIPE, CPU, folder=tmp_path, mode="plain")
    with pytest.raises(RunFolderError, match="new or empty folder"):
        sw.fit(models.double_mlp(), RECIPE, CPU, folder=tmp_path, mode="plain")
    with pytest.raises(RunFolderError, match="was begun with seed=0, got 1"):
        sw.fit(models.double_mlp(), RECIPE.replace(seed=1), CPU, folder=tmp_path, resume="auto")
    longer = RECIPE.replace(steps=15)
    assert sw.fit(models.double_mlp(), longer, CPU, resume=tmp_path).weights_sha256 == trained(longer)


def test_nothing_left_to_train_is_a_warning(tmp_path):
    first = sw.fit(models.double_mlp(), RECIPE, CPU, folder=tmp_path, mode="plain")
    with pytest.warns(UserWarning, match="nothing is left to train"):
        again = sw.fit(models.double_mlp(), RECIPE, CPU, resume=tmp_path)
    assert again.weights_sha256 == first.weights_sha256


def test_killed_and_resumed_by_two_processes_of_a_job(tmp_path, torchrun):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert any(line == "step 7\n" for line in program.stdout)
        program.kill()
    assert not (tmp_path / "run/result.json").exists()
    job = torchrun(2, "program.py")
    assert job.code == 0, job.stderr
    lines = job.stdout.splitlines()
    whole = trained(sw.Recipe(workers=4, worker_batch=10, steps=40, threads=1))
    assert [line for line in lines if "processes" in line] == [f"2 processes {whole}"] * 2
    steps = [int(line.split()[1]) for line in lines if line.startswith("step")]  # by the first process alone
    assert steps == [*range(steps[0], 41)]
    assert 6 <= steps[0] <= 9


def test_a_task_may_be_named(tmp_path):
    recipe = sw.Recipe(workers=2, worker_batch=8, steps=3, threads=1)
    named = sw.fit("linear", recipe, CPU, folder=tmp_path / "named")
    assert named.weights_sha256 == sw.fit(sw.load_task("linear"), recipe, CPU, folder=tmp_path / "own").weights_sha256


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "foo"}, "mode must be one of auto, plain, got 'foo'"),
        ({"on_disk_full": "Stop"}, "on_disk_full must be one of stop, continue, got 'Stop'"),
        ({"folder": "a" * 300}, "a name of at most 255 bytes, got 300"),
    ],
)
def test_wrong_choices_are_refused(tmp_path, monkeypatch, wrong, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sw.ScalewiseError, match=said):
        sw.fit("linear", RECIPE, CPU, **({"folder": "run"} | wrong))
    assert not any(tmp_path.iterdir())
