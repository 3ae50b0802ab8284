from __future__ import annotations

from pathlib import Path

import pytest

from conftest import forked

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = ["simple_task.py", "step_task.py", "noise_scale.py", "noise_own_loop.py", "watch_ddp.py"]


def run(path: Path, cwd: Path, *arguments: str) -> str:
    done = forked("script", cwd, path, *arguments)
    assert done.code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHORT)
def test_examples_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


def test_simple_task(tmp_path):
    assert float(run(EXAMPLES / "simple_task.py", tmp_path).split("test accuracy ")[1].split(",")[0]) > 0.9


def test_step_task(tmp_path):
    assert float(run(EXAMPLES / "step_task.py", tmp_path).split("per token ")[1].split(" ")[0]) < 0.6


def test_noise_scale(tmp_path):
    assert "'enough': True" in run(EXAMPLES / "noise_scale.py", tmp_path)


def test_noise_in_an_accumulating_loop(tmp_path):
    assert run(EXAMPLES / "noise_own_loop.py", tmp_path).rstrip().endswith(": enough")


def test_noise_in_ddp(torchrun):
    outcome = torchrun(2, EXAMPLES / "noise_own_loop.py")
    assert outcome.code == 0, outcome.stderr
    assert "noise scale " in outcome.stdout


def test_demo(tmp_path):
    assert "the same, byte for byte" in run(EXAMPLES / "demo.py", tmp_path, "--epochs", "2")
    assert not list(tmp_path.iterdir())


def test_the_simple_task_is_also_a_task_file(scalewise):
    assert (
        scalewise("train", EXAMPLES / "simple_task.py", "--set", "width=8", "--steps", 2, "--json").json["steps"] == 2
    )


@pytest.mark.parametrize(("arguments", "causes"), [([], ["same-data"]), (["--sharded"], [])])
def test_watch_ddp(arguments, causes, torchrun, scalewise):
    outcome = torchrun(2, EXAMPLES / "watch_ddp.py", *arguments)
    assert outcome.code == 0, outcome.stderr
    found = scalewise("doctor", "watch", "--json").json["findings"]
    assert [finding["cause"] for finding in found] == causes
