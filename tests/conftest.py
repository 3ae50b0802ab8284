"""Helpers that use scalewise as a person does: the command in a subprocess, its JSON parsed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from scalewise.cli import main

torch.set_num_threads(1)


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code in (0, 3), self.stderr
        return json.loads(self.stdout)


def environment() -> dict[str, str]:
    """The environment without what a surrounding job may have set."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"COLUMNS": "100"}


def real_data() -> Path:
    """The folder of real CIFAR-10 and Fashion-MNIST files, or a skip with the reason."""
    folder = Path(os.environ.get("SCALEWISE_DATA") or Path(__file__).parents[2] / "shared" / "data").resolve()
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set SCALEWISE_DATA to a folder with fashion-mnist/ and cifar-10-…/")
    return folder


@pytest.fixture
def data() -> Path:
    """Real CIFAR-10 and Fashion-MNIST."""
    return real_data()


@pytest.fixture
def scalewise(tmp_path: Path) -> Callable[..., Outcome]:
    """Run `scalewise …` in an empty folder."""

    def run(*arguments: object, cwd: Path = tmp_path) -> Outcome:
        command = [sys.executable, "-m", "scalewise", *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def scalewise_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run `scalewise …` in an empty folder within this process: for the many mistakes that end before training."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["scalewise"])

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        spoken = capfd.readouterr()
        return Outcome(int(ended.value.code or 0), spoken.out, spoken.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script or module of the tests in several processes."""

    def run(processes: int, *arguments: object) -> Outcome:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run
