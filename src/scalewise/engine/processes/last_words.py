"""What the processes of a job leave for the one that launched them, in a folder that it made."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from scalewise.engine.processes import heartbeat, signals
from scalewise.errors import Failed, ProcessFailed, ScalewiseError
from scalewise.files import read_bytes
from scalewise.records import write_atomically

FOLDER = "SCALEWISE_OUTCOME"  # variable: the folder in which a process leaves what the launching one should say
LAUNCHER = "SCALEWISE_LAUNCHER"  # variable: the pid of the launching process
BROKEN = "broken"  # there when a process has died and the others should end
DOCUMENT = "document"  # what the launching process prints in the end
SAID = ".said"  # in a run's folder: to whom its document was printed
LAST_LINES = 10
ExitReport = dict[str, int | str]


def own_folder() -> Path | None:
    """The folder for this process's exit report; None when nobody launched it."""
    folder = os.environ.get(FOLDER)
    return None if folder is None or "RANK" not in os.environ else Path(folder)


def leave_exit_report(exit_code: int, message: str = "", lost_contact: bool = False) -> bool:
    """Report to the launching process how this one ends; False when nobody launched it."""
    folder = own_folder()
    if folder is None:
        return False
    path = folder / f"exit-{os.environ['RANK']}.json"
    if not path.exists():  # the first reason is the real one
        report = {"exit_code": exit_code, "message": message, "lost_contact": lost_contact}
        write_atomically(path, json.dumps(report))
    return True


def leave_document(text: str) -> bool:
    """Have the launching process print a document, once, however often this one is started; False without one."""
    folder = own_folder()
    if folder is not None:
        (folder / DOCUMENT).write_text(text)
    return folder is not None


def print_once(text: str, run: Path) -> None:
    """Print the document of a run, unless the agent that started this process has had it from an earlier start.

    torchrun restarts a run that has just ended if a node arrives, or another process fails, at that moment.
    """
    agent, said = None, run / SAID
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(psutil.Error):
            agent = f"{machine()} {os.getppid()} {psutil.Process(os.getppid()).create_time()}"
    with suppress(OSError):
        if agent is not None and read_bytes(said) == agent.encode():
            return
    with signals.deferred():  # both of these, or neither
        print(text, file=sys.__stdout__, flush=True)
        if agent is not None:
            with suppress(OSError):
                write_atomically(said, agent)


def machine() -> str:
    """What identifies this machine since it was last booted."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def read(folder: Path) -> dict[int, ExitReport]:
    """The exit reports by process."""
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("exit-*.json")}


def clear(folder: Path) -> None:
    """Remove what the processes of an earlier start have left."""
    for pattern in ("exit-*", "heartbeat-*", "watchdog-*", "stack-*", BROKEN):
        for path in folder.glob(pattern):
            path.unlink()


def leave_watchdog_report(folder: Path, rank: int, message: str, stack: list[str]) -> None:
    """Record why the watchdog killed a process, and where that process was."""
    write_atomically(folder / f"watchdog-{rank}.json", json.dumps([message, stack]))


def failure(folder: Path, codes: Mapping[int, int], advice: str) -> ScalewiseError:
    """The error to show: the process that was killed, else a process's own exit report, else how it ended.

    `codes` are the exit codes by process, as the launcher saw them.
    """
    then = f"; {advice}" if advice else ""
    killed = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    reports = read(folder)
    if killed:  # the others then lost contact, and say so; that is not the reason
        rank, number = min(killed.items())
        path = folder / f"watchdog-{rank}.json"
        if path.exists():
            message, stack = json.loads(path.read_text())
            return ProcessFailed(f"{message}{_where(folder, rank)}{then}{_indented('its Python stack', stack)}")
        how = f"{how_it_ended(-number)}{_where(folder, rank)}"
        return ProcessFailed(f"process {rank} {how}{then}{last_lines(_log(folder, rank))}")
    reported = [report for _, report in sorted(reports.items()) if report["exit_code"] and not report["lost_contact"]]
    reported.sort(key=lambda report: report["exit_code"] in (130, 143))
    if reported:
        return Failed(str(reported[0]["message"]), int(reported[0]["exit_code"]))
    unsaid = {rank: code for rank, code in codes.items() if rank not in reports and code > 0}
    if unsaid:
        rank, code = min(unsaid.items())
        where = _where(folder, rank)
        return ProcessFailed(f"process {rank} {how_it_ended(code)}{where}{then}{last_lines(_log(folder, rank))}")
    lost = [str(report["message"]) for report in reports.values() if report["lost_contact"]]
    return ProcessFailed(f"{lost[0] if lost else 'a process was stopped'}{then}")


def _where(folder: Path, rank: int) -> str:
    last = heartbeat.heartbeats(folder).get(rank)
    return f" after step {last.step}" if last is not None and last.step else ""


def _log(folder: Path, rank: int) -> str:
    """What a process has printed since it was last started."""
    logs = [path for path in folder.rglob("stderr.log") if path.parent.name == str(rank)]
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return newest.read_text(errors="replace") if newest else ""


def how_it_ended(code: int) -> str:
    """An exit code in words, negative for a signal.

    >>> how_it_ended(-9), how_it_ended(7)
    ('was killed by SIGKILL', 'ended with exit code 7')
    """
    return f"was killed by {signals.name(-code)}" if code < 0 else f"ended with exit code {code}"


def last_lines(printed: str) -> str:
    """The last lines that a process printed, indented, to follow a message; nothing if it printed nothing."""
    lines = [line for line in printed.splitlines() if line.strip()]
    return _indented("its last lines", lines[-LAST_LINES:])


def _indented(what: str, lines: list[str]) -> str:
    return "".join([f", {what}:", *(f"\n  {line}" for line in lines)]) if lines else ""


def redirect_output(log: Path) -> None:
    """Write what this process prints, and what its libraries print, into a file from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
