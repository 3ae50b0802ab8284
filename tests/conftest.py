"""Helpers that use scalewise as a person does: the command in a subprocess, its JSON parsed."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forks
from scalewise.cli import SPINS, main

torch.set_num_threads(1)


LONGEST_FILES = (  # by what they took on 2 cores; begun first, so that none of them is left when all others are done
    "test_docs.py", "test_cli.py", "test_labs.py", "test_parallel.py", "test_measure_memory.py", "test_exactness.py",
    "test_faults.py", "test_resume.py", "test_parity.py", "test_compare.py", "test_bench.py", "test_horovod.py",
)  # fmt: skip
HEAVY_FILES = ("test_adapters.py", "test_labs.py", "test_report_browser.py", "test_trackers.py")  # make test-all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in which few tests take long come first; the order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.path.name in HEAVY_FILES:
            item.add_marker(pytest.mark.heavy)


def pytest_collection_finish() -> None:
    """Every training ends with a collection: it need not look through what was imported, which takes 0.1 s."""
    gc.freeze()


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
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"COLUMNS": "100", "GOMP_SPINCOUNT": SPINS}


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


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One process that has imported torch, from which commands are forked."""
    process = Forks()
    yield process
    process.close()


@pytest.fixture
def scalewise(tmp_path: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Run `scalewise …` in a process of its own in an empty folder."""

    def run(*arguments: object, cwd: Path = tmp_path) -> Outcome:
        files = tmp_path_factory.mktemp("said")
        code = forks.run([*map(str, arguments)], cwd, environment(), files, timeout=240)
        return Outcome(code, *((files / name).read_text() for name in ("stdout", "stderr")))

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


ABORTED_AT_EXIT = "terminate called without an active exception"  # torch 2.13 with gloo, now and then (docs/log.md)


def launched(folder: Path, processes: int, *arguments: object, restarts: int = 0) -> Outcome:
    """Run a script or module of the tests in several processes; once more if torch aborted when it had ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return _run_again_if_aborted([*launcher, "--max-restarts", str(restarts), *map(str, arguments)], folder)


def together(folder: Path, processes: int, *arguments: object) -> Outcome:
    """As `launched`, for scripts to which it does not matter who started them: faster."""
    starter = Path(__file__).with_name("together.py")
    return _run_again_if_aborted([sys.executable, str(starter), str(processes), *map(str, arguments)], folder)


def _run_again_if_aborted(command: list[str], folder: Path) -> Outcome:
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)
        if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script or module of the tests in several processes."""
    return functools.partial(launched, tmp_path)
