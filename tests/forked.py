"""Starts `scalewise …` in processes of their own that need not import torch again: each is a fork of one that has.

Run as a program it is that one. A request is a line of JSON on standard input: folder, environment, arguments, and the
files for what is said. The answers, on the file descriptor named on the command line, are the process's number and,
when it has ended, its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from scalewise.cli import SPINS

PRELOADED = (
    "scalewise.engine.store.folder",
    "scalewise.engine.auto",
    "scalewise.cli.train",
    "scalewise.runs.train",
    "scalewise.cli.compare",
    "scalewise.cli.measure",
    "scalewise.present",
    "scipy.optimize",
    "scipy.stats",
    "torch.distributed.run",
    "torch.optim",
    "rich.console",
)


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

    def run(self, arguments: list[str], cwd: Path, environment: dict[str, str], files: Path, timeout: float) -> int:
        """Run one command to its end; what it says goes into files/stdout and files/stderr."""
        assert self._process.stdin is not None
        request = {"arguments": arguments, "cwd": str(cwd), "environment": environment, "files": str(files)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        number = int(self._answers.readline())
        alarm = threading.Timer(timeout, os.kill, (number, signal.SIGKILL))
        alarm.start()
        try:
            return int(self._answers.readline())
        finally:
            alarm.cancel()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._answers.close()


def serve(answers: int) -> None:
    """Answer requests until there are no more; a child returns from here with its request."""
    os.environ["GOMP_SPINCOUNT"] = SPINS  # as the command does before torch is loaded
    for name in PRELOADED:
        __import__(name)
    gc.freeze()  # the children's collections need not look through what was imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            become(json.loads(line))
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Be the command that was asked for, to the end of the process."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    files = Path(request["files"])
    for number, path in ((0, Path(os.devnull)), (1, files / "stdout"), (2, files / "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    from scalewise.cli import main

    main(request["arguments"])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
