"""Which collective runs next: agreed by name among the processes of a group, as Horovod does.

Every process hands its requests to a thread of its own. In a round each announces the names and signatures of
its new requests, in one all-gather of a fixed number of bytes; what all have asked for then runs, in an order that all
work out alike. So processes may ask in any order, tensors that do not fit are an error on all processes instead of a
hang, and a process that has joined (it has no more data) takes part with zeros. A process that asks for nothing starts
no round: nothing is sent while nothing is wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.processes.team import all_gather
from scalewise.horovod.common.exceptions import HorovodInternalError

WORKING, JOINED, LEAVING = range(3)
MOST_NEWS = 32  # requests that a process announces in one round; more wait for the next
PAUSE_SECONDS = 0.001  # between rounds in which processes wait for different things
STALL_SECONDS = 60.0  # after which a process that waits says so; Horovod's variables change it

Perform = Callable[[dist.ProcessGroup], Any]


@dataclass(frozen=True)
class Description:
    """What must be the same on every process for a request to run; None stands for a size that may differ."""

    kind: str
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int | None, ...], ...] = ()
    device: str = "cpu"
    details: tuple[object, ...] = ()

    def __str__(self) -> str:
        sizes = [", ".join("any" if size is None else str(size) for size in shape) for shape in self.shapes]
        tensors = [f"{dtype} ({size})" for dtype, size in zip(self.dtypes, sizes, strict=True)]
        shown = tensors if len(tensors) < 4 else [*tensors[:3], f"… {len(tensors)} tensors"]
        details = [detail.name if isinstance(detail, Enum) else str(detail) for detail in self.details]
        return " ".join([self.kind, ", ".join(shown), "on", self.device, *details])


def describe(kind: str, tensors: Iterable[Tensor], *details: object, free_rows: bool = False) -> Description:
    """The description of a request for these tensors; with free rows, first dimensions may differ."""
    held = [*tensors]
    shapes = tuple((None, *tensor.shape[1:]) if free_rows else tuple(tensor.shape) for tensor in held)
    device = held[0].device.type if held else "cpu"
    return Description(kind, tuple(tensor.dtype for tensor in held), shapes, device, details)


class Handle(futures.Future[Any]):
    """A collective under way."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.release: Callable[[], None] = lambda: None
        self._of_one = False

    def of_one(self) -> Self:
        """The same, of which `wait` returns the only tensor of a group of one."""
        self._of_one = True
        return self

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        done = self.done()
        if done:
            self.release()
        return done

    def wait(self) -> Any:  # noqa: ANN401
        """What came out, once it has."""
        patience = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS") or STALL_SECONDS
        limit = _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
        silent = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") == "1"
        waited = 0.0
        while not futures.wait([self], patience).done:
            waited += patience
            message = (
                f"{self.name!r} has waited {waited:.0f} s for processes that did not ask for it; every process must "
                f"make the same calls, also those that only rank 0 seems to need"
            )
            if limit and waited >= limit:
                raise HorovodInternalError(message)
            if not silent:
                warnings.warn(message, RuntimeWarning, stacklevel=3)
        self.release()
        return self.result()[0] if self._of_one else self.result()

    __call__ = wait  # Horovod gives functions for sparse tensors


def _seconds(variable: str) -> float:
    return float(os.environ.get(variable, "0"))


class Request(Handle):
    """A collective that this process asks for."""

    def __init__(self, name: str, description: Description, perform: Perform, event: torch.cuda.Event | None) -> None:
        super().__init__(name)
        self.description, self.perform = description, perform
        self.event = event  # after which the tensors hold what was computed
        self.begun = time.perf_counter_ns()
        self.number, self.signature = _hashed(name), _hashed(repr(description))  # short enough to send

    def note(self, what: str, begun: int) -> None:
        """Tell the timeline what began then and ends now."""
        timeline.span(self.name, f"{what}{self.description.kind.upper()}", begun)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Negotiator:
    """One process's part in the agreement of a group."""

    def __init__(self, group: dist.ProcessGroup, substitute: Callable[[Description], Perform | None]) -> None:
        self._group = group
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._substitute = substitute  # what a process that has joined does for a request of the others
        self._condition = threading.Condition()
        self._unsent: deque[Request] = deque()
        self._busy: set[str] = set()  # names of requests whose outcome nobody has taken yet
        self._mine: dict[int, Request] = {}  # that the others know of
        self._asked: dict[
            int, dict[int, int]
        ] = {}  # name -> rank -> signature, in an order that is the same everywhere
        self._state = WORKING
        self._join: Handle | None = None
        self._joined: list[int] = []  # in the order of joining
        self._over: str | None = None  # why nothing can run any more
        self._thread = threading.Thread(target=self._serve, name="scalewise-horovod", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Handle:
        """Ask for a collective."""
        with self._condition:
            if self._over is not None:
                raise HorovodInternalError(self._over)
            if request.name in self._busy:
                raise ValueError(
                    f"a name stands for one collective at a time, got a second {request.name!r}; synchronize() the "
                    f"first or give another name"
                )
            self._busy.add(request.name)
            request.release = lambda: self._busy.discard(request.name)
            self._unsent.append(request)
            self._condition.notify()
        return request

    def join(self) -> int:
        """Take part with zeros until every process has joined; the rank of the last one."""
        with self._condition:
            if self._over is not None:
                raise HorovodInternalError(self._over)
            self._join = handle = Handle("join")
            self._state = JOINED
            self._condition.notify()
        return int(handle.wait())

    def leave(self) -> None:
        """End: what other processes still wait for fails there."""
        with self._condition:
            self._state = LEAVING
            self._condition.notify()
        self._thread.join()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._over is None:
                self._round()
        except Exception as error:
            self._end(f"a process of the job is gone, or cannot be reached ({type(error).__name__}: {error})")

    def _end(self, reason: str) -> None:
        with self._condition:
            self._over = reason
            waiting: list[Handle] = [*self._mine.values(), *self._unsent]
            self._unsent.clear()
        for handle in waiting + ([self._join] if self._join is not None else []):
            handle.set_exception(HorovodInternalError(f"{handle.name!r} failed: {reason}"))

    def _round(self) -> None:
        state, news = self._reason_for_a_round()
        timeline.cycle()
        self._mine |= {request.number: request for request in news}
        pairs = [number for request in news for number in (request.number, request.signature)]
        padding = [0] * (2 * MOST_NEWS - len(pairs))
        mine = torch.tensor([state, len(news), *pairs, *padding], dtype=torch.int64)
        everyone = mine.new_empty(len(self._ranks) * len(mine))
        all_gather(everyone, mine, self._group).wait()
        rows = everyone.view(len(self._ranks), -1).tolist()
        states = {rank: row[0] for rank, row in zip(self._ranks, rows, strict=True)}
        leaving = [rank for rank, told in states.items() if told == LEAVING]
        if leaving:
            self._end(f"process {leaving[0]} has shut down")
            return
        self._joined += [rank for rank, told in states.items() if told == JOINED and rank not in self._joined]
        for rank, (_, count, *numbers) in zip(self._ranks, rows, strict=True):
            for name, signature in zip(numbers[: 2 * count : 2], numbers[1 : 2 * count : 2], strict=True):
                self._asked.setdefault(name, {})[rank] = signature
        for name in [*self._asked]:
            if len(self._asked[name].keys() | set(self._joined)) == len(self._ranks):
                self._run(name, self._asked.pop(name))
        if len(self._joined) == len(self._ranks):
            last = self._joined[-1]
            self._joined.clear()
            with self._condition:
                handle, self._join, self._state = self._join, None, WORKING
            assert handle is not None
            handle.set_result(last)

    def _reason_for_a_round(self) -> tuple[int, list[Request]]:
        """Wait until this process has requests to announce, or waits for those of others."""
        with self._condition:
            while not self._unsent and self._state == WORKING:
                self._condition.wait(PAUSE_SECONDS if self._mine else None)
                if self._mine:
                    break
            count = min(MOST_NEWS, len(self._unsent))
            return self._state, [self._unsent.popleft() for _ in range(count)]

    def _run(self, name: int, asked: dict[int, int]) -> None:
        request = self._mine.pop(name, None)
        if request is not None:
            request.note("NEGOTIATE_", request.begun)
        if len(set(asked.values())) > 1:
            self._refuse(request)
        elif len(asked) < len(self._ranks):
            self._run_with_joined(request, min(asked))
        else:
            assert request is not None
            _perform(request, self._group)

    def _refuse(self, request: Request | None) -> None:
        """Tell every process what each asked for under one name."""
        told: list[str | None] = [None] * len(self._ranks)
        dist.all_gather_object(told, str(request.description) if request is not None else None, group=self._group)
        if request is not None:
            everyone = "; ".join(f"process {rank}: {text}" for rank, text in zip(self._ranks, told, strict=True))
            request.set_exception(
                HorovodInternalError(f"{request.name!r} must be the same on every process, got {everyone}")
            )

    def _run_with_joined(self, request: Request | None, source: int) -> None:
        held = [request.description if request is not None else None]
        dist.broadcast_object_list(held, src=source, group=self._group)
        description = held[0]
        assert description is not None
        substitute = self._substitute(description)
        if request is None and substitute is not None:
            substitute(self._group)
        elif request is not None and substitute is not None:
            _perform(request, self._group)
        elif request is not None:
            request.set_exception(
                HorovodInternalError(
                    f"after join() only allreduce can continue, got {description.kind}; process {self._joined[0]} has "
                    f"joined and has nothing to send"
                )
            )


def _perform(request: Request, group: dist.ProcessGroup) -> None:
    begun = time.perf_counter_ns()
    try:
        if request.event is not None:
            request.event.synchronize()
        output = request.perform(group)
        if request.event is not None:
            torch.cuda.current_stream().synchronize()
        request.note("", begun)
    except Exception as error:
        request.set_exception(HorovodInternalError(f"{request.name!r} failed: {type(error).__name__}: {error}"))
        if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
            raise
    else:
        request.set_result(output)


class Timeline:
    """A trace in Chrome's format; nothing is written before `begin` and after `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._mark_cycles = False
        self._start = 0
        self._rows: dict[str, int] = {}

    def begin(self, path: Path, mark_cycles: bool) -> None:
        """Write a timeline from now on, in place of one that is under way."""
        self.end()
        with self._lock:
            self._mark_cycles, self._rows = mark_cycles, {}
            self._start = time.perf_counter_ns()
            self._file = path.open("w")
            began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._file.write("[\n" + json.dumps({"name": "start", "ph": "M", "pid": 0, "args": began}))
            self._file.flush()

    def end(self) -> None:
        """End the file, if there is one; it is then valid JSON."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def span(self, row: str, name: str, begun: int) -> None:
        """Note what began then (`time.perf_counter_ns`) and ends now."""
        now = time.perf_counter_ns()
        with self._lock:
            if self._file is None:
                return
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._write({"name": "process_name", "ph": "M", "args": {"name": row}}, self._rows[row])
            times = {"ts": (begun - self._start) / 1e3, "dur": (now - begun) / 1e3}
            self._write({"name": name, "ph": "X", **times}, self._rows[row])

    def cycle(self) -> None:
        """Note a round of the agreement, if the timeline asks for them."""
        with self._lock:
            if self._mark_cycles:
                at = (time.perf_counter_ns() - self._start) / 1e3
                self._write({"name": "CYCLE_START", "ph": "i", "ts": at, "s": "g"}, 0)

    def _write(self, event: dict[str, object], row: int) -> None:
        if self._file is not None:
            self._file.write(",\n" + json.dumps({**event, "pid": row, "tid": 0}))
            self._file.flush()


timeline = Timeline()
