"""The promise: one recipe, the same bytes on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import together

JOB = Path(__file__).parent / "jobs" / "hashes.py"


def hashes(folder, processes: int, workers: int, *names: str) -> dict:
    outcome = together(folder, processes, JOB, workers, *names)
    assert outcome.code == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def known() -> dict:
    """What one process gave, by number of workers; filled by the first test that needs it."""
    return {}


def reference(known: dict, folder, workers: int, *names: str) -> dict:
    if workers not in known:
        known[workers] = hashes(folder, 1, workers, *names)
    return known[workers]


def check_same(found: dict, expected: dict) -> None:
    for name, run in found.items():
        if name == "allreduce (allreduce)":
            assert run["losses"] == pytest.approx(expected[name]["losses"], rel=1e-3)
            assert not run["exact"]
        else:
            assert run == expected[name], name


@pytest.mark.timeout(400)
def test_every_recipe_on_three_processes(tmp_path, known):
    expected = reference(known, tmp_path, 8)
    found = hashes(tmp_path, 3, 8)
    assert found.keys() == expected.keys()
    check_same(found, expected)


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        (2, ["ghost batch norm", "batch norm over all workers", "growth", "adascale", "lars", "lamb", "muon", "soap"]),
        (2, ["schedule-free", "schedule-free, early stopping"]),
        (8, ["batch norm", "several buckets, micro batches"]),
    ],
)
def test_remedies_on_other_numbers_of_processes(tmp_path, known, processes, names):
    found = hashes(tmp_path, processes, 8, *names)
    assert {name.rpartition(" (")[0] for name in found} == {*names}
    check_same(found, reference(known, tmp_path, 8))


@pytest.mark.parametrize("processes", [5])
def test_six_workers_on_any_number_of_processes(tmp_path, known, processes):
    names = ["batch norm", "tokens"]
    assert hashes(tmp_path, processes, 6, *names) == reference(known, tmp_path, 6, *names)


def test_placements_agree_and_recipes_differ(tmp_path, known):
    by_recipe: dict[str, set[str]] = {}
    for name, run in reference(known, tmp_path, 8).items():
        by_recipe.setdefault(name.rpartition(" (")[0], set()).add(run["sha256"])
    assert all(len(found) == 1 for found in by_recipe.values())
    by_recipe.pop("allreduce")  # on one process it has nothing to reduce: momentum's bytes
    everything = [sha for found in by_recipe.values() for sha in found]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("processes", [1, 4])
def test_the_command_gives_one_hash(scalewise, known, processes):
    flags = ["--workers", 8, "--worker-batch", 32, "--epochs", 1, "--seed", 0]
    result = scalewise("train", "digits", *flags, "--processes", processes, "--json", "--quiet").json
    assert result["processes"] == processes
    assert result["exact"] is True
    assert result["weights_sha256"] == known.setdefault("command", result["weights_sha256"])


def test_real_images_give_one_hash(scalewise, data):
    """With augmentation and batch norm; folders of photographs: tests/test_images.py."""
    flags = ["--data", data, "--workers", 3, "--worker-batch", 16, "--steps", 5, "--json", "--quiet"]
    found = [scalewise("train", "cifar10-small", *flags, "--processes", processes).json for processes in (1, 3)]
    assert len({result["weights_sha256"] for result in found}) == 1
    assert found[0]["test"] == found[1]["test"]
