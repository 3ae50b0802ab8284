"""The job of `speed.py` on several processes: scalewise and DistributedDataParallel live in the same ones, by turns.

Run by torchrun: two_processes.py OUTPUT CYCLES THREADS DATA TASK WORKER_BATCH [TASK WORKER_BATCH …]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from contestants import scalewise
from rounds import Contestant, Measured, Ready, Work, endless, images, interleave
from scalewise import Placement
from scalewise.engine.processes.team import joined

DDP, EXACT, ALLREDUCE = "DistributedDataParallel", "scalewise, exact", "scalewise, allreduce"
QUIET = ", noise scale off"


def distributed(tuned: bool) -> Ready:
    """The loop written by hand, with the model in a DistributedDataParallel."""

    def steps(work: Work) -> Iterator[None]:
        model = DistributedDataParallel(work.model(), gradient_as_bucket_view=tuned, broadcast_buffers=not tuned)
        optimizer = work.optimizer(model)
        x, y = work.data
        for epoch in itertools.count():
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            mine = order[dist.get_rank() :: dist.get_world_size()][: len(x) // dist.get_world_size()]
            for start in range(0, len(mine) - work.batch + 1, work.batch):
                indices = mine[start : start + work.batch]
                optimizer.zero_grad()
                work.loss(model(images(x[indices])), y[indices]).backward()
                optimizer.step()
                yield

    return endless(steps)


def contestants(processes: int) -> list[Contestant]:
    """One worker per process."""

    def ours(placement: Placement) -> Ready:
        return scalewise(workers=processes, placement=placement)

    exact, allreduce = Placement(device="cpu"), Placement(device="cpu", reduce="allreduce")
    return [
        Contestant(
            DDP, "the hand-written loop in DDP as it is (batch-norm buffers broadcast)", distributed(tuned=False)
        ),
        Contestant(
            f"{DDP}, tuned",
            "gradients as bucket views, buffers not broadcast",
            distributed(tuned=True),
        ),
        Contestant(EXACT, "as it is: ordered sum, batch-norm statistics averaged, noise scale", ours(exact)),
        Contestant(EXACT + QUIET, "ordered sum", ours(dataclasses.replace(exact, noise=False))),
        Contestant(ALLREDUCE, "the backend's sum, noise scale", ours(allreduce)),
        Contestant(ALLREDUCE + QUIET, "the backend's sum", ours(dataclasses.replace(allreduce, noise=False))),
    ]


WHAT = {contestant.name: contestant.what for contestant in contestants(2)}


def slowest(seconds: float) -> float:
    """The largest of all processes' values."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def main(output: str, cycles: str, threads: str, data: str, *cases: str) -> None:
    torch.set_num_threads(int(threads))
    measured: dict[str, Measured] = {}
    with joined("cpu") as team:
        for name, batch in zip(cases[::2], cases[1::2], strict=True):
            case = Case(name, int(batch))
            work = Work(case.load(Path(data) if data else None), case.worker_batch, int(threads))
            measured[case.title] = interleave(contestants(team.size), work, int(cycles), slowest)
            if team.leads:
                found = {title: dataclasses.asdict(result) for title, result in measured.items()}
                Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
