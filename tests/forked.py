"""Starts programs in processes of their own that need not import torch again: each is a fork of one that has.

Run as a program it is that one. A request is a line of JSON on standard input: which program (a key of `PROGRAMS`), its
arguments, folder, environment, and the files for what is said. The answers, on the file descriptor named on the command
line, are the process's number and, when it has ended, its exit code.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NoReturn

import psutil

from scalewise.cli import SPINS

PACKAGES = ("cli", "doctor", "plan", "present", "runs", "stats", "tasks")
PRELOADED = ("scalewise.engine.parallel.data", "scipy.optimize", "torch.distributed.run", "torch.optim")


class Started:
    """A command that runs; as much of `subprocess.Popen` as tests use."""

    def __init__(self, pid: int, files: Path) -> None:
        self.pid, self._files = pid, files
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (self._files / "code").exists():
            self.returncode = int((self._files / "code").read_text())
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        self.wait(timeout)
        return (self._files / "stdout").read_text(), (self._files / "stderr").read_text()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _kill(number: int) -> None:
    """End a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        for one in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                one.kill()


class Forks:
    """The process that has imported everything, seen from the tests."""

    def __init__(self) -> None:
        answers, theirs = os.pipe()
        command = [sys.executable, __file__, str(theirs)]
        hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[theirs], env=environment, text=True
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self._said = Path(tempfile.mkdtemp())

    def run(
        self,
        arguments: list[str],
        cwd: Path,
        environment: dict[str, str],
        files: Path,
        timeout: float,
        program: str = "scalewise",
    ) -> int:
        """Run one command to its end; what it says goes into files/stdout and files/stderr."""
        number = self._ask(program, arguments, cwd, environment, files, wait=True)
        alarm = threading.Timer(timeout, _kill, (number,))
        alarm.start()
        try:
            return int(self._answers.readline())
        except BaseException:  # the test's own time is over: without this the next test would wait for this command
            _kill(number)
            self._answers.readline()
            raise
        finally:
            alarm.cancel()

    def start(self, arguments: list[str], cwd: Path, environment: dict[str, str]) -> Started:
        """Start `scalewise …`."""
        files = Path(tempfile.mkdtemp(dir=self._said))
        return Started(self._ask("scalewise", arguments, cwd, environment, files, wait=False), files)

    def _ask(
        self, program: str, arguments: list[str], cwd: Path, environment: dict[str, str], files: Path, wait: bool
    ) -> int:
        assert self._process.stdin is not None
        request = {"program": program, "arguments": arguments, "cwd": str(cwd), "environment": environment}
        request |= {"files": str(files), "wait": wait}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._answers.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._answers.close()
        shutil.rmtree(self._said)


def serve(answers: int) -> None:
    """Answer requests until there are no more; a child returns from here with its request."""
    os.environ["GOMP_SPINCOUNT"] = SPINS  # as the command does before torch is loaded
    preload()
    gc.freeze()  # the children's collections need not look through what was imported
    keepers: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        for keeper in [*keepers]:
            if os.waitpid(keeper, os.WNOHANG)[0]:
                keepers.discard(keeper)
        child = os.fork()
        if child == 0:
            if request["wait"]:
                os.close(answers)
                become(request)
            keep(request, answers)
        if request["wait"]:
            os.write(answers, f"{child}\n".encode())
            _, status = os.waitpid(child, 0)
            os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        else:
            keepers.add(child)


def keep(request: dict[str, Any], answers: int) -> NoReturn:
    """Be the parent of a command that runs beside others, and write down how it ended."""
    child = os.fork()
    if child == 0:
        os.close(answers)
        become(request)
    os.write(answers, f"{child}\n".encode())
    os.close(answers)
    _, status = os.waitpid(child, 0)
    written = Path(request["files"]) / "ended"
    with suppress(FileNotFoundError):  # the tests are over
        written.write_text(str(os.waitstatus_to_exitcode(status)))
        written.rename(written.with_name("code"))
    os._exit(0)


def preload() -> None:
    """Import whatever a command may import, and read the templates of the page that each of them leaves."""
    for name in PRELOADED:
        import_module(name)
    for package in PACKAGES:
        folder = import_module(f"scalewise.{package}").__path__
        for module in walk_packages(folder, f"scalewise.{package}."):
            import_module(module.name)
    import_module("scalewise.present.page").render("", [], "")


def become(request: dict[str, Any]) -> NoReturn:
    """Be the command that was asked for, to the end of the process."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # where temporary files go is asked once
    files = Path(request["files"])
    for number, path in ((0, Path(os.devnull)), (1, files / "stdout"), (2, files / "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    try:
        PROGRAMS[request["program"]](request["arguments"])
    except SystemExit as ended:
        end(int(ended.code or 0))
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)


def scalewise(arguments: list[str]) -> None:
    """`scalewise …`."""
    from scalewise.cli import main

    main(arguments)


def torchrun(arguments: list[str]) -> None:
    """`torchrun …`; what it starts is no fork."""
    from torch.distributed.run import main

    main(arguments)


def script(arguments: list[str]) -> None:
    """`python SCRIPT …` or `python -m MODULE …`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


def together(arguments: list[str]) -> None:
    """A script in several processes: PROCESSES SCRIPT …."""
    from together import main

    main(int(arguments[0]), arguments[1:])


PROGRAMS = {"scalewise": scalewise, "torchrun": torchrun, "script": script, "together": together}


def end(code: int) -> NoReturn:
    """End a forked process. To take down all that was imported, as Python does, would copy it first: 0.25 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a command sets one to None where nobody reads it
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
