"""Processes of a job beside the command: what becomes of those that run to their end, and of those that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scalewise.engine.processes.job import Start, call, run
from scalewise.errors import ProcessFailed

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture(autouse=True)
def own_programs(monkeypatch):
    monkeypatch.syspath_prepend(JOBS)


@pytest.mark.parametrize(
    ("processes", "planted", "code"),
    [(1, "0", 0), (1, "7", 7), (1, "kill", -signal.SIGKILL), (2, "0", 0), (2, "kill", -signal.SIGKILL)],
)
def test_run_returns_the_exit_code_and_the_output(tmp_path, monkeypatch, processes, planted, code):
    monkeypatch.setenv("RANK", "5")  # of a job that this process may be part of
    start = Start(None, processes, 1, entry="ending:end", forks=False, variables={"PLANTED": planted})
    found, said = run(start, tmp_path)
    assert found == code
    assert f"threads 1, of {processes}, planted {planted}" in said


def test_call_returns_what_every_process_returned_in_order():
    from ending import place

    before = signal.getsignal(signal.SIGTERM)
    assert call(place, "a", 2) == ["a 0 of 2", "a 1 of 2"]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessFailed, match="planted"):
        call(place, "fail", 2)
    assert "WORLD_SIZE" not in os.environ
