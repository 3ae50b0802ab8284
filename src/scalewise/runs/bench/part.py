"""One process of a job: it does what the command asks the job for, together with the others.

Run by torch's elastic launcher: python -m scalewise.runs.bench.part FOLDER
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.last_words import leave_exit_report
from scalewise.engine.processes.launch import end_with_launcher
from scalewise.engine.processes.pool import speak_into
from scalewise.engine.processes.team import Team, joined
from scalewise.errors import LostContact, ScalewiseError
from scalewise.runs.bench.work import SOCKET, Start


def main(folder: Path) -> None:
    """Serve until the command ends this process, or is gone."""
    end_with_launcher()
    (folder / os.environ["RANK"]).mkdir()
    speak_into(folder / os.environ["RANK"] / "stderr.log")  # to be shown if this process dies
    start = Start.load(folder)
    torch.set_num_threads(start.threads)
    try:
        with joined(start.device) as team, start.work.opened(team) as perform:
            _serve(folder, team, perform)
    except ScalewiseError as error:
        _fail(error)
    except Exception as error:
        traceback.print_exc()
        _fail(translated(error))


def _serve(folder: Path, team: Team, perform: Callable[[Any], Any]) -> NoReturn:
    """The first process hears the requests and tells the others, and sends what all of them answer."""
    command = Client(str(folder / SOCKET), "AF_UNIX") if team.leads else None
    while True:
        request = [command.recv() if command is not None else None]
        dist.broadcast_object_list(request, 0)
        replies: list[Any] = [None] * team.size
        dist.all_gather_object(replies, perform(request[0]))
        if command is not None:
            command.send(replies)


def _fail(error: ScalewiseError) -> NoReturn:
    leave_exit_report(error.exit_code, str(error), isinstance(error, LostContact))
    sys.stderr.flush()
    os._exit(error.exit_code)  # without waiting for processes that may be gone


if __name__ == "__main__":
    main(Path(sys.argv[1]))
