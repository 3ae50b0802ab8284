"""A fork server: processes that start at once, as forks of one that has imported everything and done nothing else.

Importing torch takes more than a second, in every process of a run and again after each restart. So a command that may
need several processes forks a server before it looks at its task: forking later, after threads have computed, would
leave the child waiting for threads that it does not have. A forked process is a child of the command, not of the
server, as if the command had started it. Without a server (or once it was killed) processes start as usual.
docs/log.md compares it with the standard library's forkserver.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

NAME = "scalewise-forks"  # of the server, where processes are listed
PRELOADED = (
    "scalewise.engine.store.folder",
    "scalewise.engine.auto",
    "scalewise.engine.processes.watchdog",
    "scalewise.engine.processes.launch",
)
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # Assumption: never tried beside one, so not done there
START_SECONDS = 30.0
GO = b"go"
POLL_SECONDS = 0.01
LARGEST_REQUEST = 1 << 16
SET_NAME, SET_CHILD_SUBREAPER = 15, 36  # of prctl


class ForkedProcess:
    """A process from the fork server, a child of this one; as much of `subprocess.Popen` as torch's agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The server, seen from the process that asks it."""

    def __init__(self) -> None:
        for name in PRELOADED:
            import_module(name)
        self._environment = dict(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(theirs, parent)
        theirs.close()

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
    ) -> ForkedProcess | None:
        """Start `python -m MODULE …` as a child of this process; None where the server cannot.

        `words` are the whole command; it prints where this process does unless stdout or stderr is given.
        """
        if tuple(words[:2]) != (sys.executable, "-m"):
            return None
        files = {number: file.fileno() for number, file in ((1, stdout), (2, stderr)) if file is not None}
        request = {
            "module": words[2],
            "arguments": list(words[3:]),
            "folder": str(Path.cwd()),
            "removed": [name for name in self._environment if name not in environment],
            "changed": {name: value for name, value in environment.items() if self._environment.get(name) != value},
            "numbers": list(files),
        }
        text = json.dumps(request).encode()
        pid = self._asked(text, [*files.values()]) if len(text) <= LARGEST_REQUEST else None
        return None if pid is None else ForkedProcess(pid)

    def _asked(self, request: bytes, descriptors: list[int]) -> int | None:
        """The pid of the new process; None where the server was killed or takes too long."""
        ours, theirs = socket.socketpair()
        with ours, theirs, suppress(OSError):
            ours.settimeout(START_SECONDS)
            socket.send_fds(self._socket, [request], [theirs.fileno(), *descriptors])
            theirs.close()
            if pid := ours.recv(64):
                ours.send(GO)  # one that comes too late ends without it
                return int(pid)
        return None

    def close(self) -> None:
        """End it; it has nothing to lose."""
        _take_in_orphans(False)
        self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


@contextmanager
def preloaded(wanted: bool = True) -> Iterator[ForkServer | None]:
    """A fork server, started before this process computes anything; None where it is not wanted or not possible."""
    fork_server = ForkServer() if wanted and _is_possible() else None
    try:
        yield fork_server
    finally:
        if fork_server is not None:
            fork_server.close()


@contextmanager
def forking_from(fork_server: ForkServer | None) -> Iterator[None]:
    """Have torch's agent fork its processes from a server; it has no setting for how a process is started."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    usual = getattr(SubprocessHandler, "_popen", None)
    if fork_server is None or usual is None:
        yield
        return

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:  # noqa: ANN401
        return fork_server.start(args, env, handler._stdout, handler._stderr) or usual(handler, args, env)

    SubprocessHandler._popen = start  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SubprocessHandler._popen = usual  # type: ignore[method-assign]


def set_name(name: str) -> None:
    """Name this process in lists of processes, where the system has such names."""
    if sys.platform == "linux":
        _prctl(SET_NAME, name.encode()[:15])


def _is_possible() -> bool:
    return (
        sys.platform == "linux"
        and "RANK" not in os.environ
        and threading.current_thread() is threading.main_thread()
        and not any(Path(path).exists() for path in ACCELERATORS)
        and _take_in_orphans(True)
    )


def _take_in_orphans(wanted: bool) -> bool:
    """Whether what this process's children leave behind becomes its own child now."""
    return _prctl(SET_CHILD_SUBREAPER, int(wanted)) == 0


def _prctl(what: int, value: int | bytes) -> int:
    result: int = ctypes.CDLL(None).prctl(what, value, 0, 0, 0)
    return result


def _serve(requests: socket.socket, parent: int) -> NoReturn:
    """Fork what is asked for until the parent is gone. Whatever is forked for good is given to the parent."""
    try:
        os.setsid()  # no terminal's signals
        set_name(NAME)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()  # what is imported is shared by all: no collection touches it
        while True:
            text, descriptors, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
            if not text:
                os._exit(0)
            middle = os.fork()
            if middle == 0:
                if os.fork() != 0:
                    os._exit(0)  # the parent takes in what it leaves behind
                requests.close()
                _live(json.loads(text), descriptors, parent)
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(middle, 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _live(request: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
    """Be `python -m MODULE …`, to the end of the process."""
    import torch

    os.setsid()
    while os.getppid() != parent:  # until the one between is gone
        time.sleep(0.0005)
    with socket.socket(fileno=descriptors[0]) as command:
        command.send(str(os.getpid()).encode())
        if command.recv(len(GO)) != GO:
            os._exit(1)
    for number, descriptor in zip(request["numbers"], descriptors[1:], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the command may have redirected its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(request["folder"])
    for name in request["removed"]:
        os.environ.pop(name, None)
    os.environ.update(request["changed"])
    if "OMP_NUM_THREADS" in os.environ:  # what OpenMP reads when it is loaded
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv[1:] = request["arguments"]
    _end(_run(request["module"]))


def _run(module: str) -> int:
    """The exit code of a module that is run as a program."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Do what Python does at the end of a program, without the frames of the one that this process was forked from."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
