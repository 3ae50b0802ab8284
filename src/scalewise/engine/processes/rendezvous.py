"""Rendezvous: how the processes of one start find each other in a store that outlives them.

torch's elastic agent hosts one store for all starts of a job (torch 2.13, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1),
so a restarted process may read the address of a dead one. No variable distinguishes the starts: each agent counts its
own restarts. So the first process calls the roll until every process present has answered it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from scalewise.errors import LostContact

SECONDS = 600.0  # that processes may start apart
POLL_SECONDS = 0.01
T = TypeVar("T")


def fresh_store(store: Store, rank: int, size: int, seconds: float = SECONDS) -> Store:
    """A part of the store that belongs to the processes of this start alone.

    Arguments:
        store: the one that all starts of the job share.
        rank, size: of this process and of the job.
        seconds: to wait for the other processes.
    """
    name = uuid.uuid4().hex
    store.set(f"scalewise/present/{rank}", name)
    deadline = time.monotonic() + seconds
    token = _call(store, name, size, deadline) if rank == 0 else _answer(store, rank, name, deadline)
    return PrefixStore(token, store)


def _call(store: Store, name: str, size: int, deadline: float) -> str:
    """Call the roll of those who seem to be there, again whenever somebody else has taken a place."""
    keys = [f"scalewise/present/{rank}" for rank in range(size)]
    _wait(lambda: store.check(keys), deadline)
    while True:
        names = _names(store, keys)
        token = uuid.uuid4().hex
        answers = [f"{token}/here/{rank}" for rank in range(1, size)]
        store.set("scalewise/roll", json.dumps([token, names]))
        _wait(lambda: (not answers or store.check(answers)) or _names(store, keys) != names, deadline)  # noqa: B023
        if names[0] == name and (not answers or store.check(answers)):
            store.set(f"{token}/complete", "")
            return token


def _answer(store: Store, rank: int, name: str, deadline: float) -> str:
    """Answer every roll with this process's name on it, until one is complete."""
    while True:
        token = _wait(lambda: _called(store, rank, name), deadline)
        store.set(f"{token}/here/{rank}", "")
        _wait(lambda: store.check([f"{token}/complete"]) or _called(store, rank, name) != token, deadline)  # noqa: B023
        if store.check([f"{token}/complete"]):
            return str(token)


def _called(store: Store, rank: int, name: str) -> str | None:
    """The token of the present roll if this process is on it."""
    if not store.check(["scalewise/roll"]):
        return None
    token, names = json.loads(store.get("scalewise/roll"))
    return str(token) if names[rank : rank + 1] == [name] else None


def _names(store: Store, keys: list[str]) -> list[str]:
    return [value.decode() for value in store.multi_get(keys)]


def _wait(condition: Callable[[], T], deadline: float) -> T:
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise LostContact("the other processes of this job did not start in time")
        time.sleep(POLL_SECONDS)
    return found
