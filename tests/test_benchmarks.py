"""The speed benchmark runs and writes what it should; how fast anything is, is not tested: machines are noisy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment, real_data

SPEED = Path(__file__).parents[1] / "benchmarks" / "speed.py"
PEERS = {"Accelerate": "accelerate", "Lightning": "lightning", "Keras on torch": "keras"}
# The peers take most of a minute; here they count as missing, and `make bench` measures them.
WITHOUT_PEERS = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({[*PEERS.values()]}))
sys.path.insert(0, {str(SPEED.parent)!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ALWAYS = {"hand-written loop", "scalewise", "DataLoader loop"}
ROUNDS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    command = [
        sys.executable,
        "-c",
        WITHOUT_PEERS,
        SPEED,
        "--quick",
        "--rounds",
        ROUNDS,
        "--data",
        real_data(),
        "--results",
        folder,
    ]
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.fixture(scope="module")
def written(results):
    (path,) = results[1].glob("*-speed.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def rows(written):
    (table,) = written["tables"]
    (case,) = table["cases"].values()
    return case["rows"]


def test_every_contestant_has_a_ratio_or_a_reason(rows):
    assert set(rows) > ALWAYS
    for name, row in rows.items():
        if name.startswith((*PEERS,)):
            assert "not installed" in row["failed"]
            assert row["ratio"] is None
        else:
            assert row["failed"] is None, name
            assert len(row["seconds_per_step"]) == len(row["cpu_seconds_per_step"]) == row["ratio"]["n"] == ROUNDS


def test_ratios_are_those_of_rounds_in_the_same_cycle(rows):
    baseline = rows["hand-written loop"]
    assert baseline["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0, "n": ROUNDS}
    for name in ALWAYS:
        each = [a / b for a, b in zip(rows[name]["seconds_per_step"], baseline["seconds_per_step"], strict=True)]
        ratio = rows[name]["ratio"]
        assert ratio["median"] == pytest.approx(sum(each) / 2)  # two rounds
        assert 0 < min(each) <= ratio["low"] <= ratio["median"] <= ratio["high"] <= max(each)


def test_the_conditions_are_complete(written):
    conditions = written["conditions"]
    assert conditions["rounds"] == ROUNDS
    assert conditions["threads"] == 1
    assert f"--rounds {ROUNDS}" in conditions["command"]
    for name in ("date", "commit", "python", "cpu", "cores"):
        assert conditions[name], name
    assert conditions["versions"]["torch"] != "not installed"


def test_the_table_is_printed_and_written_alike(results):
    printed, folder = results
    (path,) = folder.glob("*-speed.md")
    assert path.read_text().strip() == printed.strip()
    assert "| scalewise |" in printed
    assert str(folder) not in printed  # no paths of the machine


def test_the_optimizers_are_compared(tmp_path):
    script = SPEED.with_name("optimizers.py")
    command = [sys.executable, script, "--quick", "--rounds", "2", "--results", tmp_path]
    done = subprocess.run([*map(str, command)], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-optimizers.json")
    tables = {table["title"]: table for table in json.loads(path.read_text())["tables"]}
    assert tables.keys() == {"LAMB", "LARS"}
    for name, table in tables.items():
        (case,) = table["cases"].values()
        assert case["rows"][table["baseline"]]["ratio"]["median"] == 1.0
        assert case["rows"][f"scalewise {name}"]["ratio"]["n"] == 2
