"""Jobs beside the command: new processes that work together through torch's elastic agent and end with the command.

Three ways to use them. `Job` keeps its processes alive and sends them requests; one that nobody asks sleeps, so that
several jobs can be interleaved. `run` starts a function in processes that have a task to do and end. `call` collects
what a function returns. In all of them a launcher, itself a new process, runs the agent of its machine. Requests go
over a socket in the file system, which hosts in other network namespaces reach as well.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

from scalewise.engine.placement import DeviceName
from scalewise.engine.processes.last_words import FOLDER, LAUNCHER, failure, redirect_output
from scalewise.engine.processes.signals import restored
from scalewise.errors import ProcessFailed, ScalewiseError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from scalewise.engine.processes.team import Team

START, SOCKET, CODES, LOG = "start.pickle", "socket", "codes-{node}.json", "launcher-{node}.log"
MODULE = "scalewise.engine.processes"  # `python -m MODULE module:function …`
LAUNCH, SERVE = f"{MODULE}.job:launch_node", f"{MODULE}.job:serve"
FIRST_PORT = 29600
HERE = "127.0.0.1"
START_SECONDS = 180.0
POLL_SECONDS = 0.1
END_SECONDS, END_PROCESS_SECONDS = 15.0, 5
JOB_VARIABLES = re.compile(rf"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|{FOLDER}|{LAUNCHER}|RANK$|WORLD_SIZE$)")

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
RequestToDo = TypeVar("RequestToDo", contravariant=True)
ReplyToSend = TypeVar("ReplyToSend", covariant=True)


class Work(Protocol[RequestToDo, ReplyToSend]):
    """What the processes of a job do with requests; pickled into each of them once."""

    def opened(self, team: Team) -> AbstractContextManager[Callable[[RequestToDo], ReplyToSend]]:
        """Get ready, in a process; the function does what is asked for, in all processes at the same time."""


class Machine(Protocol):
    """Where a launcher runs."""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` there."""


@dataclass(frozen=True)
class Start:
    """One job."""

    work: Work[Any, Any] | None  # what it does with requests; None for processes that take none
    processes: int  # in all
    threads: int  # of each, to compute with
    device: DeviceName = "cpu"
    addresses: tuple[str, ...] = ()  # of the hosts that share the processes evenly; none for this machine itself
    number: int = 0  # of this job among those that run at the same time
    entry: str = SERVE  # the function that every process runs, with the job's folder
    forks: bool = True  # from a server that has imported torch; else each process is a new program
    variables: Mapping[str, str] = field(default_factory=dict)  # to set in the environment, unless the user has

    @property
    def nodes(self) -> int:
        """Machines that take part."""
        return max(1, len(self.addresses))

    def save(self, folder: Path) -> None:
        """Put it where the processes find it."""
        (folder / START).write_bytes(pickle.dumps(self))

    @staticmethod
    def load(folder: Path) -> Start:
        """What `save` wrote: by the command that started this process, in a folder of its own."""
        start: Start = pickle.loads((folder / START).read_bytes())
        return start

    def popen(self, folder: Path, node: int, entry: str, *words: str, machine: Machine | None = None) -> Launcher:
        """Start a function in a new process, outside any job that this one is part of."""
        command = [sys.executable, "-m", MODULE, entry, str(folder), *words]
        kept = {name: value for name, value in os.environ.items() if not JOB_VARIABLES.match(name)}
        ours = {FOLDER: str(folder), LAUNCHER: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with (folder / LOG.format(node=node)).open("wb") as log:
            return subprocess.Popen(
                command if machine is None else machine.command(command),
                env={**self.variables, **kept, **ours, "OMP_NUM_THREADS": str(self.threads), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C reaches the command alone, which ends them
            )


Launcher = subprocess.Popen[bytes]


class Job(Generic[RequestT, ReplyT]):
    """Processes that do the same at the same time, whenever they are asked."""

    def __init__(self, start: Start, machines: Sequence[Machine] = ()) -> None:
        """Nothing is started before `with`; `machines` are the hosts of the start's addresses, if it has any."""
        self._start, self._machines = start, machines
        self._connection: Connection[Any, Any] | None = None
        self._launchers: list[Launcher] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = stack.enter_context(temporary_folder())
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self._folder / SOCKET))
            self._listener.listen(1)
            self._listener.settimeout(POLL_SECONDS)
            self._start.save(self._folder)
            stack.callback(self._kill)
            for node in range(self._start.nodes):
                machine = self._machines[node] if self._machines else None
                self._launchers.append(self._start.popen(self._folder, node, LAUNCH, str(node), machine=machine))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if self._connection is not None:
            self._connection.close()
        self._stack.close()

    def ask(self, request: RequestT) -> list[ReplyT]:
        """What every process answers, in process order; a process that dies fails the job."""
        try:
            connection = self._connected()
            connection.send(request)
            replies: list[ReplyT] = connection.recv()
        except (EOFError, OSError):
            _ended(self._launchers, END_SECONDS)
            advice = f"one of {self._start.processes} that were timed together: start again"
            raise failure(self._folder, _exit_codes(self._folder), advice) from None
        return replies

    def _connected(self) -> Connection[Any, Any]:
        """The connection to the first process, once it is ready."""
        deadline = time.monotonic() + START_SECONDS
        while self._connection is None:
            with suppress(TimeoutError):
                self._connection = Connection(self._listener.accept()[0].detach())
            ended = time.monotonic() > deadline or any(launcher.poll() is not None for launcher in self._launchers)
            if self._connection is None and ended:
                raise EOFError
        return self._connection

    def _kill(self) -> None:
        """End what still runs: the launchers end their processes, and these end themselves without a launcher."""
        for launcher in self._launchers:
            launcher.terminate()
        if not _ended(self._launchers, END_SECONDS):
            for launcher in self._launchers:
                launcher.kill()
                launcher.wait()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that processes may still write into while it is removed."""
    with tempfile.TemporaryDirectory(prefix="scalewise-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _ended(launchers: Sequence[Launcher], seconds: float) -> bool:
    """Whether all launchers, and with them their processes, end in time."""
    deadline = time.monotonic() + seconds
    with suppress(subprocess.TimeoutExpired):
        for launcher in launchers:
            launcher.wait(max(0.0, deadline - time.monotonic()))
        return True
    return False


def _exit_codes(folder: Path) -> dict[int, int]:
    """The exit codes of the processes that failed, by number."""
    files = [json.loads(path.read_text()) for path in folder.glob(CODES.format(node="*"))]
    return {int(rank): int(code) for codes in files for rank, code in codes.items()}


def run(start: Start, folder: Path) -> tuple[int, str]:
    """Run a job's processes to their end; the most telling exit code, and what they printed.

    That is the code of the process itself where there is one. Of several it is a signal that killed one of them, other
    than SIGTERM, which the agent sends to the rest.
    """
    start.save(folder)
    alone = start.processes == 1
    process = start.popen(folder, 0, start.entry) if alone else start.popen(folder, 0, LAUNCH, "0")
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    killed = [code for code in _exit_codes(folder).values() if code < 0 and code != -signal.SIGTERM]
    return next(iter(killed), code), (folder / LOG.format(node=0)).read_text(errors="replace")


def call(function: Callable[[RequestT], ReplyT], argument: RequestT, processes: int) -> list[ReplyT]:
    """What a function returns in each of several new processes that can form a group, in order."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    config = _config(Start(None, processes, 1), "scalewise")
    agent_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # it leaves its own handlers
    try:
        with restored(agent_signals):
            results: dict[int, ReplyT] = elastic_launch(config, function)(argument)
    except ChildFailedError as error:
        raise ProcessFailed(str(error)) from error
    return [results[rank] for rank in sorted(results)]


def _config(start: Start, name: str, node: int = 0, **more: Any) -> LaunchConfig:  # noqa: ANN401  (of the config)
    """How torch's agent starts the processes of one node: once."""
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=start.nodes,
        max_nodes=start.nodes,
        nproc_per_node=start.processes // start.nodes,
        run_id=name,
        rdzv_backend="c10d",
        # where the launchers rendezvous; on one machine any free port will do
        rdzv_endpoint=f"{start.addresses[0]}:{FIRST_PORT + start.number}" if start.addresses else f"{HERE}:0",
        rdzv_configs={"is_host": node == 0},
        local_addr=start.addresses[node] if start.addresses else HERE,
        max_restarts=0,
        **more,
    )


def launch_node(name: str, number: str) -> int:
    """Run the agent of one machine until its processes end, in a launcher; stores their exit codes if they fail."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from scalewise.engine.processes.fork_server import forking_from, preloaded
    from scalewise.engine.processes.launch import end_with_launcher

    end_with_launcher()  # the command that started this process
    os.environ[LAUNCHER] = str(os.getpid())
    logging.disable(logging.ERROR)  # the agent's own messages on children and signals; the command has better ones
    folder, node = Path(name), int(number)
    start, logs = Start.load(folder), folder / f"node-{node}"
    logs.mkdir()
    specs = DefaultLogsSpecs(log_dir=str(logs))
    config = _config(start, folder.name, node, logs_specs=specs, shutdown_timeout=END_PROCESS_SECONDS)
    try:
        with preloaded(start.forks) as server, forking_from(server):
            elastic_launch(config, sys.executable)("-m", MODULE, start.entry, name)
    except SignalException:
        return 1
    except ChildFailedError as error:
        codes = {rank: failed.exitcode for rank, failed in error.failures.items()}
        (folder / CODES.format(node=node)).write_text(json.dumps(codes))
        return 1
    return 0


def serve(name: str) -> None:
    """Be a process of a `Job`: serve until the command ends this process, or is gone."""
    import torch

    from scalewise.engine.processes.launch import taking_part

    folder = Path(name)
    (folder / os.environ["RANK"]).mkdir()
    redirect_output(folder / os.environ["RANK"] / "stderr.log")  # to be shown if this process dies
    start = Start.load(folder)
    assert start.work is not None
    torch.set_num_threads(start.threads)
    try:
        with taking_part(start.device) as team, start.work.opened(team) as perform:
            _answer(folder, team, perform)
    except ScalewiseError as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(error.exit_code)  # without waiting for processes that may be gone


def _answer(folder: Path, team: Team, perform: Callable[[Any], Any]) -> NoReturn:
    """The first process receives the requests, passes them to the others, and sends what all of them answer."""
    command = Client(str(folder / SOCKET), "AF_UNIX") if team.leads else None
    while True:
        request = team.shared(command.recv() if command is not None else None)
        replies = team.gather_objects(perform(request))
        if command is not None:
            command.send(replies)
