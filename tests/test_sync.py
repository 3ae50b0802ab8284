"""Batch norm over all workers: what one worker with the global batch does, whoever computes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from models import counting
from scalewise.engine.parallel.lockstep import Lockstep
from scalewise.engine.processes.team import Team
from scalewise.tasks.digits import load


def normalized() -> sw.Task:
    """A float64 network with both kinds of batch norm, affine and not."""
    (x, y), (tx, ty) = load()
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 20),
        nn.BatchNorm1d(20, affine=False), nn.Tanh(), nn.Linear(20, 10),
    ).double()  # fmt: skip
    return sw.Task(model=model, train=(x[:400].double(), y[:400]), test=(tx.double(), ty), loss=F.cross_entropy)


def losses(**fields: object) -> tuple[list[float], dict[str, float]]:
    recipe = sw.Recipe(**({"steps": 12, "lr": 0.1, "threads": 1, "statistics": "running"} | fields))
    *records, result = sw.train(normalized(), recipe)
    return [record.loss for record in records if isinstance(record, sw.Step)], result.test


def test_workers_together_are_one_worker_with_the_global_batch():
    together, test = losses(workers=5, worker_batch=12, batch_norm="sync")
    alone, expected = losses(workers=1, worker_batch=60)
    assert together == pytest.approx(alone, rel=1e-9)
    assert test == pytest.approx(expected, rel=1e-9)
    apart, _ = losses(workers=5, worker_batch=12)
    assert apart != pytest.approx(alone, rel=1e-3)


def test_an_error_in_one_worker_ends_all():
    lockstep = Lockstep(Team(0, 1, torch.device("cpu")), [3])

    def work(fails: bool) -> int:
        lockstep.exchange(torch.ones(1))
        if fails:
            raise ValueError("mine")
        return int(lockstep.exchange(torch.ones(1))[0].sum())

    with pytest.raises(ValueError, match="mine"):
        lockstep.run([lambda: work(False), lambda: work(True), lambda: work(False)])
    assert lockstep.run([lambda: work(False)] * 3) == [3, 3, 3]


def test_a_worker_that_passes_fewer_layers_is_named():
    lockstep = Lockstep(Team(0, 1, torch.device("cpu")), [2])
    with pytest.raises(sw.ScalewiseError, match="same layers"):
        lockstep.run([lambda: torch.ones(1), lambda: lockstep.exchange(torch.ones(1))[0]])


@pytest.mark.parametrize("fields", [{"compile": True}, {}])
def test_what_lockstep_cannot_do_is_refused(fields):
    task = normalized() if fields else counting()
    recipe = sw.Recipe(workers=2, batch_norm="sync", steps=1, threads=1, **fields)
    with pytest.raises(sw.ScalewiseError, match="--compile" if fields else "seen keeps values of each"):
        [*sw.train(task, recipe)]
