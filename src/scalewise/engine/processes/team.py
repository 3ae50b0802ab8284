"""The processes of a run, seen from one of them."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from scalewise.engine.placement import DeviceName
from scalewise.errors import LostContact, PlacementError

INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's own setting
HOLDERS_OF_THE_GROUP = ("torch.distributed.nn.functional", "torch.distributed.fsdp.sharded_grad_scaler")
REST_SECONDS = 2.0
START_TIMEOUT = timedelta(minutes=30)
APART_SECONDS = 600.0  # that processes may start apart
POLL_SECONDS = 0.01
T = TypeVar("T")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


@dataclass(frozen=True)
class Team:
    """The rank of this process, the number of processes, its device, and the number on this machine."""

    rank: int
    size: int
    device: torch.device
    here: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Gathered:
        """Start to gather every process's rows, of which process i has counts[i], in rank order."""
        if self.size == 1:
            return Gathered(rows, None, counts)
        most = max(counts)
        mine = rows.new_zeros(most, rows.shape[1])
        mine[: len(rows)] = rows
        out = rows.new_empty(self.size * most, rows.shape[1])
        return Gathered(out, all_gather(out, mine), counts)

    def total(self, number: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.gather_rows(number.view(1, 1), [1] * self.size).wait().sum()

    def gather_objects(self, mine: T) -> list[T]:
        """Every process's object, in rank order; pickled, between processes of one job only."""
        found = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(found, mine)
        return found

    def shared(self, mine: T, source: int = 0) -> T:
        """One process's object, on every process."""
        box = [mine]
        if self.size > 1:
            dist.broadcast_object_list(box, source)
        return box[0]

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()


@dataclass(frozen=True)
class Gathered:
    """Rows that are being gathered from every process."""

    rows: Tensor
    work: dist.Work | None
    counts: list[int]

    def arrive(self) -> None:
        """Wait for the rows; on an accelerator, order its next work after them."""
        if self.work is not None:
            self.work.wait()

    def wait(self) -> Tensor:
        """All rows, in rank order."""
        self.arrive()
        if self.work is None:
            return self.rows
        parts = self.rows.view(len(self.counts), max(self.counts), -1)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])


def all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start to gather every process's `mine` into `out`, in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    work: dist.Work = gather(out, mine, group=group, async_op=True)
    return work


def choose_device(name: DeviceName, local_rank: int) -> torch.device:
    """The device of this process: one CUDA device per process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[name]:
        have = ", ".join(kind for kind, there in available.items() if there)
        raise PlacementError(f"--device {name} is not available here; available: {have}")
    if name != "cuda":
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise PlacementError(
            f"one CUDA device per process is needed, got {torch.cuda.device_count()} devices for process "
            f"{local_rank} of this machine; lower --processes"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def takes_part() -> bool:
    """Whether this process was started as one of several, by torchrun or by our own launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leave() -> None:
    """End this process's part in the job.

    Some of torch's functions bind the process group as a default argument when they are imported. Its threads would
    outlive `destroy_process_group` and abort when Python exits (torch 2.13, gloo). torch's compiler
    imports them, and much of torch imports the compiler when first used.
    """
    for function in _functions_with_a_group():
        defaults = function.__defaults__ or ()
        function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)
    dist.destroy_process_group()
    gc.collect()  # whoever keeps the group keeps its threads
    _let_threads_come_to_rest()


def _let_threads_come_to_rest() -> None:
    """Wait until gloo's threads, where somebody still holds a group, have let go of what belongs to Python.

    The last operation is done for the caller before its thread has dropped it, for which the thread needs the
    interpreter; a thread that asks for it while Python exits is ended, and with it the process (SIGABRT).
    """
    deadline = time.monotonic() + REST_SECONDS
    looks_at_rest = 0
    while looks_at_rest < 3 and time.monotonic() < deadline:
        time.sleep(0.005)  # whoever waits for the interpreter gets it now
        looks_at_rest = looks_at_rest + 1 if "R" not in _gloo_thread_states() else 0


def _gloo_thread_states() -> str:
    """A letter for each of gloo's threads: R where it runs; nothing where the system does not say."""
    states = []
    for folder in Path("/proc/self/task").glob("*"):
        with suppress(OSError):
            name, state = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            states.append(state.split()[0] if "gloo" in name else "")
    return "".join(states)


def _functions_with_a_group() -> list[FunctionType]:
    modules = [vars(sys.modules[name]) for name in HOLDERS_OF_THE_GROUP if name in sys.modules]
    classes = [vars(value) for module in modules for value in module.values() if isinstance(value, type)]
    return [value for names in modules + classes for value in names.values() if isinstance(value, FunctionType)]


def choose_interface() -> None:
    """Have gloo listen where the other processes of the job can reach it, unless the user chose an interface.

    Left alone, gloo listens on the address of this machine's host name. That is often a loopback address (Debian writes
    127.0.1.1 into /etc/hosts, containers 127.0.0.1), and then processes on other machines try to connect to
    themselves.
    """
    if INTERFACE not in os.environ and "MASTER_ADDR" in os.environ:
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface is not None:
            os.environ[INTERFACE] = interface


def interface_towards(host: str) -> str | None:
    """The network interface with the IPv4 address that `host` sees this machine under; None when that is unknown.

    An address of this machine leads to the interface that carries it, although packets to it go through loopback: the
    machine that others know as the master listens where they look for it.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # finds the route and sends nothing
            mine = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _address(probe, name) == mine), None)
    except (OSError, UnicodeError):  # no route, only IPv6, or not a host name
        return None


def _address(probe: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


def connect(cuda: bool, device: torch.device | None = None, timeout: timedelta = START_TIMEOUT) -> None:
    """Join the process group of the job that this process was started in.

    Its store is one that neither an earlier start of the job nor an earlier group of this process has written to.
    """
    choose_interface()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    shared, rank, size = next(iter(rendezvous("env://", timeout=START_TIMEOUT)))
    store = fresh_store(shared, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)


def fresh_store(store: Store, rank: int, size: int, seconds: float = APART_SECONDS) -> Store:
    """A part of the store that belongs to the processes of this start alone.

    torch's elastic agent hosts one store for all starts of a job (torch 2.13, unless
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), so a restarted process may read the address of a dead one. No variable
    distinguishes the starts: each agent counts its own restarts. So the first process calls the roll until every
    process present has answered it.
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


@contextmanager
def alone(device_name: DeviceName) -> Iterator[Team]:
    """This process by itself, whatever job it was started in."""
    yield Team(0, 1, choose_device(device_name, int(os.environ.get("LOCAL_RANK", "0"))))


@contextmanager
def joined(device_name: DeviceName) -> Iterator[Team]:
    """The team of this process: alone, or of the job it was started in."""
    if not takes_part():
        yield Team(0, 1, choose_device(device_name, 0))
        return
    device = choose_device(device_name, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "mps":
        raise PlacementError("several processes cannot share MPS; use --processes 1 or --device cpu")
    owner = not dist.is_initialized()
    if owner:
        cuda = device.type == "cuda"
        connect(cuda, device if cuda else None)
    try:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Team(dist.get_rank(), dist.get_world_size(), device, here)
    finally:
        if owner:
            leave()
