"""Folders that an older version wrote still resume, report and are diagnosed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

FOLDERS = Path(__file__).parent / "folders"
STEPS = 20


@pytest.fixture
def trained(tmp_path):
    shutil.copytree(FOLDERS / "trained", tmp_path / "trained")
    return tmp_path / "trained"


def test_an_older_run_resumes_on_other_processes(scalewise, trained):
    """Where the processor is of the kind that began it, to the bytes that one version alone gives."""
    resumed = scalewise("train", "linear", "--resume", trained, "--steps", STEPS, "--processes", 2, "--json").json
    assert resumed["steps"] == STEPS
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [*range(1, STEPS + 1)]
    recipe = ["--workers", 4, "--worker-batch", 8, "--threads", 1, "--recipe", "plain"]
    whole = scalewise("train", "linear", *recipe, "--steps", STEPS, "--processes", 1, "--json").json
    assert whole["test"]["loss"] == pytest.approx(resumed["test"]["loss"], rel=1e-5)
    if json.loads((trained / "env.json").read_text()) == json.loads((FOLDERS / "trained" / "env.json").read_text()):
        assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_an_older_run_has_a_page(scalewise, trained):
    done = scalewise("report", trained, "--out", "page.html")
    assert done.code == 0, done.stderr
    assert "linear" in (trained.parent / "page.html").read_text()


@pytest.mark.parametrize(("folder", "found"), [("trained", []), ("watched", [])])
def test_an_older_run_is_diagnosed(scalewise, folder, found):
    assert scalewise("doctor", FOLDERS / folder, "--json").json["findings"] == found


def test_a_step_of_an_older_run_is_computed_again(scalewise, trained):
    """Bit for bit on the kind of processor that began it; on another one, to the last digits."""
    done = scalewise("replay", trained, "--step", 10, "--json")
    found = json.loads(done.stdout)
    assert found["recomputed"] == pytest.approx(found["recorded"], rel=1e-6)
    same = json.loads((trained / "env.json").read_text())["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert done.code == (0 if found["matches"] else 1), done.stderr
    assert found["matches"] or not same
