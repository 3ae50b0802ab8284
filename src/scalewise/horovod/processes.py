"""The processes of the job, as Horovod numbers them, and sets of them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from scalewise.engine.processes.team import connect, leave, takes_part
from scalewise.errors import PlacementError
from scalewise.horovod.negotiation import Description, Handle, Negotiator, Perform, Request, timeline
from scalewise.horovod.wire import with_zeros

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_by_id",
    "process_set_ids",
    "process_sets",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

# Horovod waits for slow processes as long as it takes; torch's own limit is half an hour.
TIMEOUT = timedelta(days=7)
TORCHRUN = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "cross_rank": "GROUP_RANK",
    "cross_size": "GROUP_WORLD_SIZE",
}


class _Entry:
    """What the job stores of a set: its number, and for members the group and its negotiator.

    Two `ProcessSet`s of the same processes, both given to `init`, share one.
    """

    def __init__(self, number: int, group: dist.ProcessGroup | None) -> None:
        self.number: int | None = number  # None once the set is removed
        self.negotiator = Negotiator(group, with_zeros) if group is not None else None
        self._group = group
        self.counters: dict[str, count[int]] = {}

    def close(self) -> None:
        """Remove the set; a group of its own ends with it, and nothing here keeps the job's alive."""
        if self.negotiator is not None:
            self.negotiator.leave()
        group, self._group, self.negotiator, self.number = self._group, None, None, None
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class ProcessSet:
    """Some processes of the job, for collectives among them alone.

    The script makes it; the job gets it by `add_process_set`, or as an argument of `init`.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ValueError(
                f"a process set needs the numbers of its processes, got a {type(ranks).__name__}; there are no "
                f"communicators of MPI here: pass a list of ranks"
            )
        self.ranks: list[int] | None = sorted(set(ranks))
        self._entry: _Entry | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number in the job, once it is added."""
        return self._entry.number if self._entry is not None else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self.ranks == other.ranks

    __hash__ = object.__hash__

    def _known(self) -> tuple[list[int], _Entry]:
        _current()
        if self._entry is None or self._entry.number is None or self.ranks is None:
            raise ValueError(
                f"a process set must be added to the job first, got {self}; call add_process_set() or init()"
            )
        return self.ranks, self._entry

    def size(self) -> int:
        """How many processes belong to it."""
        return len(self._known()[0])

    def included(self) -> bool:
        """Whether this process does."""
        return rank() in self._known()[0]

    def rank(self) -> int:
        """This process's place in it."""
        ranks, _ = self._known()
        if rank() not in ranks:
            raise ValueError(f"only processes of a set have a place in it, got process {rank()} and {self}")
        return ranks.index(rank())

    def ask(self, name: str | None, description: Description, perform: Perform) -> Handle:
        """Start a collective."""
        _, entry = self._known()
        if entry.negotiator is None:
            raise ValueError(
                f"only processes of a set can use it, got process {rank()} and {self}; ask process_set.included()"
            )
        kind = description.kind
        name = f"{kind}.noname.{self.next_number(kind)}" if name is None else f"{kind}.{name}"
        event = torch.cuda.current_stream().record_event() if description.device == "cuda" else None
        return entry.negotiator.submit(Request(name, description, perform, event))

    def next_number(self, kind: str) -> int:
        """A number that is the same on every process that asks as often."""
        return next(self._known()[1].counters.setdefault(kind, count(1)))

    def join(self) -> int:
        """Take part with zeros until all have joined."""
        _, entry = self._known()
        assert entry.negotiator is not None
        last = entry.negotiator.join()
        # Who joined early made fewer calls, so numbers begin at 1 again; optimizers still exist.
        entry.counters = {kind: numbers for kind, numbers in entry.counters.items() if kind == "optimizer"}
        return last

    def close(self) -> None:
        """Leave the job."""
        self._known()[1].close()


global_process_set = ProcessSet([])
global_process_set.ranks = None  # until `init`


@dataclass
class _Job:
    """What `init` found; dropped by `shutdown`."""

    numbers: dict[str, int]  # by the names of TORCHRUN
    owns_group: bool
    sets: dict[int, ProcessSet] = field(default_factory=dict)


_job: _Job | None = None


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None
) -> None:
    """Take part in the job that torchrun started, or be a job of one process."""
    global _job
    if comm:
        raise PlacementError(f"processes are those that torchrun started, got comm={comm!r}; use process_sets instead")
    if _job is not None:
        return
    owns = not dist.is_initialized()
    if owns and takes_part():
        connect(torch.cuda.is_available(), timeout=TIMEOUT)
    elif owns:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)  # type: ignore[attr-defined]
    given = os.environ if takes_part() and dist.get_world_size() > 1 else {}  # alone without torchrun
    numbers = {name: int(given.get(variable, name.endswith("size"))) for name, variable in TORCHRUN.items()}
    _job = _Job(numbers | {"rank": dist.get_rank(), "size": dist.get_world_size()}, owns)
    for name, number in _job.numbers.items():  # what Horovod's launcher sets: scripts read it
        os.environ[f"HOROVOD_{name.upper()}"] = str(number)
    wanted = os.environ.get("HOROVOD_TIMELINE") or "DYNAMIC"  # which stands for start_timeline()
    if wanted != "DYNAMIC":
        start_timeline(wanted, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") == "1")
    global_process_set.ranks = [*range(size())]
    global_process_set._entry = _Entry(0, dist.group.WORLD)
    _job.sets[0] = global_process_set
    atexit.unregister(shutdown)  # of an earlier init
    atexit.register(shutdown)
    for ranks in process_sets if process_sets and not isinstance(process_sets, str) else []:
        added = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
        same = next((known for known in _job.sets.values() if added == known), None)
        if same is not None:
            added._entry = same._entry
        else:
            add_process_set(added)


def shutdown() -> None:
    """Leave the job; `init` may follow."""
    global _job
    if _job is None:
        return
    for process_set in _job.sets.values():
        process_set.close()
    timeline.end()
    if _job.owns_group and dist.is_initialized():
        leave()
    global_process_set.ranks = None
    _job = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write from now on, on process 0, when each collective was requested and run."""
    if rank() == 0:
        timeline.begin(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the timeline, if there is one."""
    _current()
    timeline.end()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _job is not None


def _current() -> _Job:
    if _job is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _job


def _reports(name: str, text: str) -> Callable[[], int]:
    def number() -> int:
        return _current().numbers[name]

    number.__name__, number.__doc__ = name, text
    return number


rank = _reports("rank", "This process's number in the job.")
size = _reports("size", "How many processes the job has.")
local_rank = _reports("local_rank", "This process's number on its machine.")
local_size = _reports("local_size", "How many processes this machine has.")
cross_rank = _reports("cross_rank", "This machine's number in the job.")
cross_size = _reports("cross_size", "How many machines the job has.")


def is_homogeneous() -> bool:
    """Whether every machine has as many processes."""
    return local_size() * cross_size() == size()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set of processes to the job; every process must call this."""
    job = _current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or not 0 <= ranks[0] <= ranks[-1] < size():
        raise ValueError(f"a process set needs processes between 0 and {size() - 1}, got {ranks}")
    if any(added == known for known in job.sets.values()):
        raise ValueError(f"a process set must have other processes than those known already, got {ranks} again")
    group = dist.new_group(ranks, timeout=TIMEOUT)
    number = next(number for number in count(1) if number not in job.sets)
    added._entry = _Entry(number, group if rank() in ranks else None)
    job.sets[number] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; every process must call this. False for one that the job does not have, or all processes."""
    job = _current()
    number = process_set.process_set_id
    if not number or job.sets.get(number) != process_set:
        return False
    process_set.close()
    del job.sets[number]
    return True


def process_set_by_id(number: int) -> ProcessSet:
    """The process set of this number."""
    sets = _current().sets
    if number not in sets:
        raise ValueError(f"a process set's number must be one of {[*sets]}, got {number}")
    return sets[number]


def process_set_ids() -> list[int]:
    """The numbers of all process sets."""
    return sorted(_current().sets)


def process_sets() -> list[ProcessSet]:
    """All process sets, by number."""
    return [process_set_by_id(number) for number in process_set_ids()]


def _says(answer: bool, text: str) -> Callable[..., bool]:
    def ask(verbose: bool = False) -> bool:
        return answer

    ask.__doc__ = text
    return ask


mpi_built = mpi_enabled = mpi_threads_supported = _says(False, "No: there is no MPI.")
gloo_built = _says(True, "Yes: gloo comes with torch.")
gloo_enabled = _says(True, "Yes: gloo carries what lies on the CPU.")
ddl_built = ccl_built = _says(False, "No.")
cuda_built = _says(torch.version.cuda is not None, "Whether torch was built with CUDA.")
rocm_built = _says(torch.version.hip is not None, "Whether torch was built with ROCm.")


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as Horovod writes it (2.18.3 is 21803), or 0."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


if takes_part():  # scripts read Horovod's variables before `init`, too
    for _name, _theirs in TORCHRUN.items():
        if _theirs in os.environ:
            os.environ[f"HOROVOD_{_name.upper()}"] = os.environ[_theirs]
