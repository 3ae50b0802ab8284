"""Processes that are forks of one that has imported everything: children of the command like any others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import environment
from scalewise.engine.processes.fork_server import NAME, forking_from, preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are given away on Linux only")
PROGRAM = """
import os, sys, time
words = sys.argv[1:]
if words[0] == "say":
    import torch
    print(os.getppid(), os.getcwd(), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), "GONE" in os.environ)
    print("aside", file=sys.stderr)
elif words[0] == "wait":
    time.sleep(600)
sys.exit(int(words[1]))
"""


@pytest.fixture
def fork_server(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GONE", "1")
    before = {child.pid for child in psutil.Process().children()}
    with preloaded() as found:
        assert found is not None
        yield found
    assert {child.pid for child in psutil.Process().children()} <= before


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "program", *map(str, words)]


def test_it_is_a_child_of_ours_with_its_own_folder_environment_and_exit_code(fork_server, tmp_path):
    variables = environment() | {"OMP_NUM_THREADS": "2"}
    del variables["GONE"]
    with Path("out").open("w") as out, Path("error").open("w") as error:
        found = fork_server.start(command("say", 7), variables, out, error)
        assert found.wait(timeout=60) == 7
    assert Path("out").read_text().split() == [str(os.getpid()), str(tmp_path), "2", "2", "False"]
    assert Path("error").read_text() == "aside\n"


def test_it_can_be_killed_and_waited_for(fork_server):
    found = fork_server.start(command("wait", 0), environment(), None, None)
    assert os.getpgid(found.pid) == found.pid  # torch's agent signals the group
    with pytest.raises(subprocess.TimeoutExpired):
        found.wait(timeout=0.05)
    found.send_signal(signal.SIGKILL)
    assert found.wait(timeout=60) == -signal.SIGKILL
    found.send_signal(signal.SIGTERM)  # nobody is there any more


def test_without_a_fork_server_processes_are_started_as_ever(fork_server):
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    while not (spares := [child for child in psutil.Process().children() if child.name() == NAME]):
        time.sleep(0.01)  # until it has named itself
    (spare,) = spares
    spare.kill()
    spare.wait(timeout=60)
    assert fork_server.start(command("say", 0), environment(), None, None) is None
    with forking_from(fork_server):
        handler = SubprocessHandler(sys.executable, ("-c", "exit(5)"), {}, None, None, 0, None)
    assert isinstance(handler.proc, subprocess.Popen)
    assert handler.proc.wait(timeout=60) == 5


def test_only_python_modules_are_taken(fork_server):
    assert fork_server.start(["/bin/true"], environment(), None, None) is None


OWNER = """
import psutil, time
from scalewise.engine.processes.fork_server import preloaded
with preloaded():
    print(psutil.Process().children()[0].pid, flush=True)
    time.sleep(600)
"""


def test_it_ends_with_the_process_that_had_it():
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment(), stdout=subprocess.PIPE, text=True) as owner:
        spare = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        spare.wait(timeout=60)
    assert not spare.is_running()
