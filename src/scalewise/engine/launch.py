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

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scalewise.errors import Failed, ProcessFailed, ScalewiseError

OUTCOME = "SCALEWISE_OUTCOME"  # the folder in which a process leaves what the launching one should say
LAUNCHER = "SCALEWISE_LAUNCHER"  # the number of the launching process
WATCH_SECONDS = 0.2
LAST_LINES = 10


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
            # the first process speaks; what the others say is kept for when one of them dies
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=dict.fromkeys(range(1, processes), Std.ERR)),
            local_addr="127.0.0.1",
        )
        try:
            elastic_launch(config, sys.executable)("-m", "scalewise", *arguments)
        except SignalException as error:
            told = _outcomes(Path(folder)).get(0, {})
            raise Failed(str(told.get("message", "stopped by a signal")), 128 + int(error.sigval)) from None
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
        name = signal.Signals(number).name
        return ProcessFailed(f"process {rank} was killed by {name}; {resume}{_last_lines(folder, rank)}")
    outcomes = _outcomes(folder)
    told = [outcome for _, outcome in sorted(outcomes.items()) if outcome["exit_code"] and not outcome["lost_contact"]]
    told.sort(key=lambda outcome: outcome["exit_code"] in (130, 143))
    if told:
        return Failed(str(told[0]["message"]), int(told[0]["exit_code"]))
    silent = {rank: code for rank, code in codes.items() if rank not in outcomes and code > 0}
    if silent:
        rank, code = min(silent.items())
        return ProcessFailed(f"process {rank} ended with exit code {code}; {resume}{_last_lines(folder, rank)}")
    lost = [str(outcome["message"]) for outcome in outcomes.values() if outcome["lost_contact"]]
    return ProcessFailed(f"{lost[0] if lost else 'a process was stopped'}; {resume}")


def _last_lines(folder: Path, rank: int) -> str:
    """The last things a process said, indented under the message."""
    logs = [path for path in folder.rglob("stderr.log") if path.parent.name == str(rank)]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "".join([", its last lines:", *(f"\n  {line}" for line in lines[-LAST_LINES:])]) if lines else ""
