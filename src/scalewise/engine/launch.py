"""Several processes on this machine, through torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters

from scalewise.engine import outcomes
from scalewise.engine.agent import Agent, Elasticity
from scalewise.engine.nursery import Nursery, set_name
from scalewise.engine.outcomes import OUTCOME
from scalewise.engine.pulse import FILE, PULSE, hang_up
from scalewise.errors import Failed

LAUNCHER = "SCALEWISE_LAUNCHER"  # the number of the launching process
PROCESS = "scalewise-{rank}"  # its name, where processes are listed
HOST = "127.0.0.1"
WATCH_SECONDS = 0.2
MONITOR_SECONDS = 0.1
RESUME = "the run can go on from its last checkpoint with --resume"


def launch(
    processes: int,
    arguments: Sequence[str],
    threads: int,
    advice: str = RESUME,
    elasticity: Elasticity | None = None,
    nursery: Nursery | None = None,
) -> int:
    """Run `scalewise …` in several processes that take part in one job; returns the exit code.

    Arguments:
        processes: how many.
        arguments: the command line without the program's name.
        threads: computing threads of each process.
        advice: what to do about a process that died.
        elasticity: whether to start again when one dies; by default not.
        nursery: where the processes come from, if they need not import everything themselves.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable(logging.ERROR)  # the agent's own words on children and signals; ours follow
    with tempfile.TemporaryDirectory(prefix="scalewise-") as name:
        folder = Path(name)
        os.environ[OUTCOME] = name
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            return _run(processes, arguments, folder, advice, elasticity or Elasticity(), nursery)
        finally:
            del os.environ[OUTCOME], os.environ[LAUNCHER]


def _run(
    processes: int,
    arguments: Sequence[str],
    folder: Path,
    advice: str,
    elasticity: Elasticity,
    nursery: Nursery | None,
) -> int:
    parameters = RendezvousParameters("c10d", f"{HOST}:0", folder.name, 1, 1, local_addr=HOST)
    spec = WorkerSpec(
        role="scalewise",
        local_world_size=processes,
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        args=("-m", "scalewise", *arguments),
        max_restarts=elasticity.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr=HOST,
    )
    # the first process speaks; what the others say is kept for when one of them dies
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=dict.fromkeys(range(1, processes), Std.ERR))
    agent = Agent(spec, logs, folder, elasticity, nursery)
    try:
        result = agent.run()
    except SignalException as error:
        told = outcomes.read(folder).get(0, {})
        raise Failed(str(told.get("message", "stopped by a signal")), 128 + int(error.sigval)) from None
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        raise outcomes.reason(folder, agent.codes(result), advice)
    if (folder / outcomes.DOCUMENT).exists():
        print((folder / outcomes.DOCUMENT).read_text(), file=sys.__stdout__, flush=True)
    return int(outcomes.read(folder).get(0, {}).get("exit_code", 0))


def end_with_launcher() -> None:
    """End this process with the job that it belongs to.

    When the launching process is gone at once, so that nobody writes into the run of a dead job. When another process
    has died as soon as it learns of that, which is when what connects them is cut.
    """
    if LAUNCHER not in os.environ:
        return
    if "RANK" in os.environ:
        set_name(PROCESS.format(rank=os.environ["RANK"]))
    folder = outcomes.own_folder()
    if folder is not None:
        PULSE.share(folder / FILE.format(rank=os.environ["RANK"]))
    threading.Thread(target=_watch, args=(int(os.environ[LAUNCHER]), folder), daemon=True).start()


def _watch(launcher: int, folder: Path | None) -> None:
    broken = None if folder is None else folder / outcomes.BROKEN
    while os.getppid() == launcher:
        if broken is not None and broken.exists():
            if not PULSE.beat.trains:
                os._exit(1)
            hang_up("it has died")
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
