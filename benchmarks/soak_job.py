"""One part of a run that is stopped and gone on with, and what the process that trained it holds afterwards.

As a program it is one of the processes that live as long as the soak: each line on standard input is a part to
train, each line on standard output what the process holds then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import scalewise as sw
from scalewise.engine.loop import Training
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import RunFolder, RunRecipe, begin
from scalewise.errors import Interrupted
from scalewise.records import Result
from scalewise.runs.run import stored_records

CHECKPOINT_STEPS = 7
SETTINGS = {"digits": [], "chars": ["width=16", "layers=1", "context=32"]}
RECIPES = {
    "digits": sw.Recipe(workers=4, worker_batch=16, steps=48, optimizer="lamb", lr=0.01, patience=9, threads=1),
    "chars": sw.Recipe(workers=2, worker_batch=16, steps=40, optimizer="adam", lr=0.002, patience=9, threads=1),
}


@dataclass(frozen=True)
class Part:
    """Train a task in a folder, from its newest checkpoint to the end or until it is told to stop after a step."""

    task: str
    folder: str
    stop_after: int | None


@dataclass(frozen=True)
class Held:
    """What a process has: its own memory and all of it in MB, open files, sockets, threads and children."""

    uss: float
    rss: float
    files: int
    sockets: int
    threads: int
    children: int
    weights_sha256: str | None = None


def train(part: Part) -> str | None:
    """Train a part, as the command does; the weights' hash if it came to the end."""
    task = sw.load_task(part.task, SETTINGS[part.task])
    recipe, folder = RECIPES[part.task], RunFolder(Path(part.folder))
    with Training(task, recipe, sw.Placement(), pause_every=CHECKPOINT_STEPS) as training:
        checkpoint.load_newest(training, folder.checkpoints)
        if training.team.leads:
            begin(folder, RunRecipe(part.task, SETTINGS[part.task], recipe, []), "cpu", training.team.size)
        try:
            for record in stored_records(training, folder, CHECKPOINT_STEPS):
                if not isinstance(record, Result) and part.stop_after is not None and record.step >= part.stop_after:
                    training.signal = signal.SIGTERM
        except Interrupted:
            return None
    assert isinstance(record, Result)
    return record.weights_sha256


def held(weights_sha256: str | None) -> Held:
    """What this process has now."""
    process = psutil.Process()
    memory = process.memory_full_info()
    return Held(
        uss=round(memory.uss / 1e6, 3),
        rss=round(memory.rss / 1e6, 3),
        files=process.num_fds(),
        sockets=len(process.net_connections("all")),
        threads=process.num_threads(),
        children=len(process.children(recursive=True)),
        weights_sha256=weights_sha256,
    )


def main() -> None:
    """Train the parts that are asked for on standard input, with the other processes of the job."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")  # once: what lives on is what may leak
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            found = train(Part(**json.loads(line)))
            print(json.dumps(asdict(held(found))), file=sys.__stdout__, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
