"""Several processes on this machine, through torch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scalewise.errors import ProcessFailed, ScalewiseError

OUTCOME = "SCALEWISE_OUTCOME"  # the folder in which a process leaves what the launching one should say
LAUNCHER = "SCALEWISE_LAUNCHER"  # the number of the launching process
WATCH_SECONDS = 0.2


class Failed(ScalewiseError):
    """A process failed on purpose; its message and exit code are passed on."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(processes: int, arguments: Sequence[str], threads: int) -> int:
    """Run `scalewise …` in several processes that take part in one job; returns the exit code.

    Arguments:
        processes: how many.
        arguments: the command line without the program's name.
        threads: computing threads of each process.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    logging.disable(logging.ERROR)  # the agent's own words on children and signals; ours follow
    with tempfile.TemporaryDirectory(prefix="scalewise-") as folder:
        os.environ[OUTCOME] = folder
        os.environ[LAUNCHER] = str(os.getpid())
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            local_addr="127.0.0.1",
        )
        try:
            elastic_launch(config, sys.executable)("-m", "scalewise", *arguments)
        except SignalException as error:
            return 128 + int(error.sigval)
        except ChildFailedError as error:
            raise _reason(Path(folder), error) from None
        finally:
            del os.environ[OUTCOME], os.environ[LAUNCHER]
        return int(_outcomes(Path(folder)).get(0, {}).get("exit_code", 0))


def end_with_launcher() -> None:
    """End this process when the one that launched it is gone, so that nobody writes into the run of a dead job."""
    if LAUNCHER in os.environ:
        threading.Thread(target=_watch, args=(int(os.environ[LAUNCHER]),), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_outcome(exit_code: int, message: str = "", lost_contact: bool = False) -> bool:
    """Tell the launching process how this one ends; False when nobody launched it."""
    folder = os.environ.get(OUTCOME)
    if folder is None or "RANK" not in os.environ:
        return False
    path = Path(folder) / f"outcome-{os.environ['RANK']}.json"
    if not path.exists():  # the first reason is the real one
        path.write_text(json.dumps({"exit_code": exit_code, "message": message, "lost_contact": lost_contact}))
    return True


def _outcomes(folder: Path) -> dict[int, dict[str, int | str]]:
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("outcome-*.json")}


def _reason(folder: Path, error: ChildFailedError) -> ScalewiseError:
    """What to tell the person: the process that was killed, else a process's own last word, else how it ended."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    killed = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    resume = "the run can go on from its last checkpoint with --resume"
    if killed:  # the others then lost contact, and say so; that is not the reason
        rank, number = min(killed.items())
        return ProcessFailed(f"process {rank} was killed by {signal.Signals(number).name}; {resume}")
    told = [outcome for _, outcome in sorted(_outcomes(folder).items()) if outcome["exit_code"]]
    told.sort(key=lambda outcome: (outcome["lost_contact"], outcome["exit_code"] in (130, 143)))
    if told:
        return Failed(str(told[0]["message"]), int(told[0]["exit_code"]))
    rank, code = min(codes.items())
    return ProcessFailed(f"process {rank} ended with exit code {code}; {resume}")
