"""How fast processes exchange data: every collective over sizes and process counts, and the link that explains it.

A collective is a function of one process on a buffer of N bytes, counted as nccl-tests does.

The bytes are those of the whole buffer: all that is gathered, all that is scattered. Algorithm bandwidth is bytes ÷
seconds; bus bandwidth multiplies it by what a link must carry at least per byte, so that it can be held against the
hardware's and does not fall with the number of processes by itself (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md):

    2·(P − 1) ÷ P of all-reduce and the ordered reduction, (P − 1) ÷ P of all-gather, reduce-scatter and all-to-all,
    1 of broadcast
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from scalewise.engine.placement import DeviceName, Placement, available_cores
from scalewise.engine.processes.job import Job, Start
from scalewise.engine.processes.team import Team, all_gather
from scalewise.engine.store.folder import check_writable
from scalewise.engine.sums import reductions
from scalewise.engine.sums.flat import FlatLayout
from scalewise.errors import UsageError
from scalewise.plan import hardware
from scalewise.plan.hardware import Link
from scalewise.runs.bench.common import (
    Report,
    Topology,
    benching,
    check_timing,
    chosen_device,
    interleaved,
    topology,
)
from scalewise.runs.measure.throughput import timed
from scalewise.runs.request import Notify, silent
from scalewise.stats.interval import Interval, median_interval
from scalewise.stats.timing import Cost, fit, rounds

NAMES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "ordered")
SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
MOST_ROUNDS, SECONDS = 9, 30.0
SOURCE, LINK_FILE = "scalewise bench collectives", "link.json"
ROUND_SECONDS = 0.03  # of one case in one round, or one exchange if that takes longer
MOST_TIMES = 100


@dataclass(frozen=True)
class Case:
    """A collective on N bytes, to be repeated."""

    name: str
    bytes: int
    times: int


@dataclass(frozen=True)
class Timed:
    """Seconds of one exchange on one process, and the bytes that it really had."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Exchanging:
    """The work of a job that exchanges data."""

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[Case], Timed]]:
        """Buffers are made once, when a case first comes."""
        ready: dict[tuple[str, int], tuple[int, Callable[[], object]]] = {}

        def perform(case: Case) -> Timed:
            key = case.name, case.bytes
            if key not in ready:
                ready[key] = _exchange(case.name, team, case.bytes)
            size, exchange = ready[key]
            exchange()  # caches are cold after another case
            team.barrier()
            return Timed(size, timed(exchange, team.device, case.times))

        yield perform


@dataclass(frozen=True)
class Row:
    """A collective at one size and process count: the median over rounds of the slowest process, and its interval."""

    collective: str
    processes: int
    bytes: int
    seconds: float
    seconds_low: float
    seconds_high: float
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float
    rounds: int


@dataclass(frozen=True)
class Line:
    """seconds = α + bytes ÷ bandwidth of one collective and process count."""

    collective: str
    processes: int
    latency_seconds: Interval[float]
    algorithm_bytes_per_second: Interval[float]
    bus_bytes_per_second: Interval[float]
    misfit: float  # the median relative distance from the line of what was timed


@dataclass(frozen=True)
class CollectivesReport(Report):
    """All that was timed, the fits, and the link for `plan`.

    link_processes: the process counts that the link was fitted to: those that have a core each, if any.
    """

    kind = "collectives"
    rows: tuple[Row, ...]
    fits: tuple[Line, ...]
    link: Link
    link_latency_seconds: Interval[float]
    link_bytes_per_second: Interval[float]
    link_misfit: float
    link_processes: tuple[int, ...]
    hosts: int | None
    rate: str | None
    device: str
    topology: Topology


def collectives(
    *,
    processes: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    seconds: float = SECONDS,
    hosts: int | None = None,
    rate: str | None = None,
    device: DeviceName = "auto",
    out: Path | None = None,
    source: str = SOURCE,
    notify: Notify = silent,
) -> CollectivesReport:
    """Time every collective, and store the report and the link profile that `plan` reads.

    Arguments:
        processes: how many take part, one number after another; by default 2, 4, … up to the cores.
        sizes: bytes of the whole buffer, two at least; by default six from 4 KiB to 16 MiB.
        seconds: how long to time, in rounds; three rounds at least.
        hosts, rate: spread over N network namespaces of this machine, whose links carry this rate.
        device: where the data are.
        out: folder of the result, or a .json file for the link profile; by default runs/bench-collectives-<time>.
        source: what the link profile says about its origin.
        notify: receives what is being done.
    """
    profile = out if out is not None and out.suffix == ".json" else None
    folder = None if profile else out
    counts = processes or [1 << power for power in range(1, max(2, available_cores().bit_length()))]
    with benching(folder):
        check_timing(counts, 2, hosts, rate, seconds)
        if sizes is not None and len(set(sizes)) < 2:
            raise UsageError(
                "--sizes must name two sizes at least, to tell latency from bandwidth; "
                "write for example --sizes 64kB,1MB,16MB"
            )
        if profile is not None and profile.is_dir():
            raise UsageError(f"--out {profile} must be a file if it ends in .json, got a folder; choose another")
        if profile is not None:
            check_writable(profile.absolute().parent)
        chosen = chosen_device(device, max(counts))
        found = measure_collectives(
            counts,
            sizes or SIZES,
            hosts=hosts,
            rate=rate,
            seconds=seconds,
            device=chosen,
            source=f"{source}, {time.strftime('%Y-%m-%d')}",
            notify=notify,
        )
        report = found.stored(folder)
        assert report.run is not None
        for path in [report.run / LINK_FILE, *([profile] if profile else [])]:
            hardware.save_link(path, report.link)
    return report


def measure_collectives(
    processes: Sequence[int],
    sizes: Sequence[int],
    *,
    seconds: float,
    device: DeviceName,
    source: str,
    notify: Notify,
    hosts: int | None = None,
    rate: str | None = None,
) -> CollectivesReport:
    """Time every collective in interleaved rounds, and fit what it costs; nothing is checked or stored."""
    machine = topology()
    starts = {count: Start(Exchanging(), count, threads=1, device=device) for count in processes}
    notify(f"collectives: starting {', '.join(map(str, processes))} processes")
    with interleaved(starts, hosts, rate) as jobs:
        cases = {
            count: [_calibrated(job, name, size) for name in NAMES for size in sizes] for count, job in jobs.items()
        }
        found: dict[tuple[int, str, int], list[Timed]] = {}
        for number in rounds(MOST_ROUNDS, seconds):
            notify(f"collectives: round {number + 1}")
            for count, job in jobs.items():
                for case in cases[count]:
                    found.setdefault((count, case.name, case.bytes), []).append(_slowest(job, case))
    counts = sorted(processes)
    fitting = tuple(count for count in counts if count <= machine.cores) or tuple(counts)
    link = _fit_link({key: timed for key, timed in found.items() if key[0] in fitting})
    bandwidth = link.unit_seconds.inverse()
    place = f"{hosts} hosts{f' at {rate}' if rate else ''}" if hosts is not None else "one machine"
    return CollectivesReport(
        rows=tuple(_row(count, name, timed) for (count, name, _), timed in found.items()),
        fits=tuple(_line(found, count, name) for count in counts for name in NAMES),
        link=Link(f"{place}, {device}", link.fixed_seconds.value, bandwidth.value, source),
        link_latency_seconds=link.fixed_seconds,
        link_bytes_per_second=bandwidth,
        link_misfit=link.misfit,
        link_processes=fitting,
        hosts=hosts,
        rate=rate,
        device=device,
        topology=machine,
    )


def _slowest(job: Job[Case, Timed], case: Case) -> Timed:
    return max(job.ask(case), key=lambda timed: timed.seconds)


def _calibrated(job: Job[Case, Timed], name: str, size: int) -> Case:
    """Repeated until a round has its length."""
    first = _slowest(job, Case(name, size, 1))
    return Case(name, size, min(MOST_TIMES, max(1, round(ROUND_SECONDS / first.seconds))))


def _row(processes: int, name: str, timed: Sequence[Timed]) -> Row:
    seconds = [one.seconds for one in timed]
    middle = statistics.median(seconds)
    speed = timed[0].bytes / middle
    bus = bus_factor(name, processes) * speed
    return Row(name, processes, timed[0].bytes, middle, *median_interval(seconds), speed, bus, len(seconds))


def _line(found: dict[tuple[int, str, int], list[Timed]], processes: int, name: str) -> Line:
    own = [timed for key, timed in found.items() if key[:2] == (processes, name)]
    cost = fit([1.0] * len(own), [timed[0].bytes for timed in own], _seconds(own))
    factor = bus_factor(name, processes)
    speeds = cost.unit_seconds.inverse(), cost.unit_seconds.inverse(factor)
    return Line(name, processes, cost.fixed_seconds, *speeds, cost.misfit)


def _fit_link(found: dict[tuple[int, str, int], list[Timed]]) -> Cost:
    """The link by which the engine's own reduction takes as long as it does, at all sizes and process counts."""
    own = [(count, timed) for (count, name, _), timed in found.items() if name == "ordered"]
    messages = [2.0 * (count - 1) for count, _ in own]
    carried = [2 * (count - 1) / count * timed[0].bytes for count, timed in own]
    return fit(messages, carried, _seconds([timed for _, timed in own]))


def _seconds(cases: Sequence[Sequence[Timed]]) -> list[list[float]]:
    return [[timed.seconds for timed in case] for case in cases]


ELEMENT_BYTES = 4


def _exchange(name: str, team: Team, size: int) -> tuple[int, Callable[[], object]]:
    """A collective on at least `size` bytes, in equal parts for the processes: its bytes, and what does it once."""
    part = max(1, -(-size // (ELEMENT_BYTES * team.size)))
    whole = torch.zeros(part * team.size, device=team.device)
    if name == "ordered":
        return _ordered(team, whole)
    mine = whole.chunk(team.size)[team.rank].clone()
    incoming = torch.empty_like(whole)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    runs: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: all_gather(whole, mine).wait(),
        "reduce-scatter": lambda: scatter(mine, whole),
        "all-to-all": lambda: dist.all_to_all_single(incoming, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return whole.nbytes, runs[name]


def _ordered(team: Team, gradient: Tensor) -> tuple[int, Callable[[], object]]:
    """The engine's own reduction of a gradient, one worker per process; its flat vector has whole chunks."""
    layout = FlatLayout({"gradient": gradient}, {}, team.size)
    _, reduction = reductions.build(Placement(), layout, team, team.size)

    def run() -> None:
        for bucket in reduction.buckets:
            reduction.launch(bucket)
        reduction.finish(lambda stretch, start: None)

    return layout.size * ELEMENT_BYTES, run


def bus_factor(name: str, processes: int) -> float:
    """What a link must carry at least, as a part of the bytes.

    >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    part = (processes - 1) / processes
    return {"all-reduce": 2 * part, "ordered": 2 * part, "broadcast": 1.0}.get(name, part)
