"""Helpers that use scalewise as a person does: the command in a subprocess, its JSON parsed."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forks
from scalewise.cli import SPINS, main

torch.set_num_threads(1)


LONGEST_FILES = (  # by what they took on 2 cores; begun first, so that none of them is left when all others are done
    "test_labs.py", "test_docs.py", "test_cli.py", "test_horovod.py", "test_measure.py", "test_exactness.py",
    "test_parallel.py", "test_machines.py", "test_faults.py", "test_measure_memory.py", "test_compare.py",
    "test_examples.py", "test_structure.py", "test_sweep.py", "test_plan.py", "test_auto.py", "test_resume.py",
    "test_images.py", "test_bench.py", "test_noise.py", "test_parity.py", "test_watch.py", "test_doctor.py",
)  # fmt: skip
HEAVY_FILES = (  # make test-all
    *(f"tests/test_{name}.py" for name in ("adapters", "labs", "report_browser", "trackers")),
    *(f"tests/test_{name}.py" for name in ("benchmarks", "faults", "machines", "measure_memory")),
    *(f"src/scalewise/adapters/{name}.py" for name in ("accelerate", "keras", "lightning", "transformers")),
    "src/scalewise/horovod/keras",
)
collect_ignore = ["jobs"]  # programs that tests start


def pytest_configure(config: pytest.Config) -> None:
    """Heavy components are not even imported where nothing needs them: that takes 7 s in each of three processes."""
    if config.option.markexpr == "not heavy":
        config.option.ignore = [*(config.option.ignore or ()), *(config.rootpath / name for name in HEAVY_FILES)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in which few tests take long come first; the order within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.path.relative_to(item.config.rootpath).as_posix() in HEAVY_FILES:
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


forking = functools.cache(Forks)  # one process that has imported torch, from which commands are forked


def pytest_sessionfinish() -> None:
    if forking.cache_info().currsize:
        forking().close()


@pytest.fixture(scope="session")
def forks() -> Forks:
    """One process that has imported torch, from which commands are forked."""
    return forking()


def forked(program: str, folder: Path, *arguments: object, timeout: float = 240) -> Outcome:
    """Run a program of forked.py to its end in a process of its own."""
    with tempfile.TemporaryDirectory() as files:
        code = forking().run([*map(str, arguments)], folder, environment(), Path(files), timeout, program)
        return Outcome(code, *((Path(files) / name).read_text() for name in ("stdout", "stderr")))


@pytest.fixture
def scalewise(tmp_path: Path) -> Callable[..., Outcome]:
    """Run `scalewise …` in a process of its own in an empty folder."""

    def run(*arguments: object, cwd: Path = tmp_path) -> Outcome:
        return forked("scalewise", cwd, *arguments)

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
    flags = ["--standalone", "--nproc-per-node", processes, "--max-restarts", restarts]
    return _run_again_if_aborted("torchrun", folder, *flags, *arguments)


def together(folder: Path, processes: int, *arguments: object) -> Outcome:
    """As `launched`, for scripts to which it does not matter who started them: faster."""
    return _run_again_if_aborted("together", folder, processes, *arguments)


def _run_again_if_aborted(program: str, folder: Path, *arguments: object) -> Outcome:
    for _ in range(3):
        done = forked(program, folder, *arguments, timeout=280)
        if done.code == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    return done


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script or module of the tests in several processes."""
    return functools.partial(launched, tmp_path)
