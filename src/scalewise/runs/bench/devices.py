"""How fast the devices here are: operations over sizes, in interleaved rounds, and from which size a device pays.

The break-even size is the one from which sending an operation to a device pays, both copies included:

fixed_host + unit_host · work(n)  ≥  fixed_device + unit_device · work(n) + fixed_copy + unit_copy · bytes(n)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scalewise.runs.bench.common import Report, Topology, benching, topology
from scalewise.runs.bench.workloads import (
    OPERATIONS,
    TRANSFERS,
    Operation,
    Place,
    Run,
    Trained,
    missing,
    places,
    trained,
)
from scalewise.runs.measure.throughput import matrix_product_peak, timed
from scalewise.runs.request import Notify, silent
from scalewise.stats.interval import median_interval
from scalewise.stats.timing import Cost, fit, rounds

MOST_ROUNDS, SECONDS, QUICK_SECONDS = 15, 20.0, 5.0  # of operations; training takes as long again
ROUND_SECONDS = 0.01  # of one operation in one round, or once if that takes longer
MOST_TIMES = 1000
PEAK_SECONDS, QUICK_PEAK_SECONDS = 0.3, 0.1  # of each size of matrix product
GIGA = 1e9
Key = tuple[Place, Operation, int]


@dataclass(frozen=True)
class Row:
    """An operation at one size on one device: the median over rounds and its interval."""

    operation: str
    device: str
    threads: int
    size: int
    unit: str
    bound: str  # what limits it at large sizes, compute or memory
    bytes: int  # what comes in and goes out
    seconds: float
    seconds_low: float
    seconds_high: float
    gflops: float
    gigabytes_per_second: float
    peak_share: float  # of the most FLOPs per second that were measured on the device, or of the most bytes per second
    rounds: int


@dataclass(frozen=True)
class Peak:
    """The best that was measured on a device."""

    device: str
    threads: int
    gflops: float
    gigabytes_per_second: float


@dataclass(frozen=True)
class Worth:
    """From which size an operation is faster on `device` than on `host`, both copies included."""

    operation: str
    unit: str
    host: str
    device: str
    from_size: int | None
    extrapolated: bool
    looked_to_size: int
    misfit: float  # the worst of the median relative distances of timings from the lines that were compared


@dataclass(frozen=True)
class DevicesReport(Report):
    """All that was timed."""

    kind = "devices"
    rows: tuple[Row, ...]
    peaks: tuple[Peak, ...]
    break_even: tuple[Worth, ...]
    training: tuple[Trained, ...]
    missing: tuple[str, ...]
    topology: Topology


def devices(*, quick: bool = False, out: Path | None = None, notify: Notify = silent) -> DevicesReport:
    """Time operations and a training on every device of this machine.

    Arguments:
        quick: fewer rounds, in a quarter of the time.
        out: folder of the result; by default runs/bench-devices-<time>.
        notify: receives what is being done.
    """
    with benching(out):
        machine = topology()
        found = places()
        seconds = QUICK_SECONDS if quick else SECONDS
        notify("devices: the fastest matrix product of each")
        products = {}
        for place in found:
            with place.used() as device:
                peak_seconds = QUICK_PEAK_SECONDS if quick else PEAK_SECONDS
                products[place] = matrix_product_peak(device, torch.float32, peak_seconds)
        timings = _timings(found, seconds, notify)
        fastest = {
            place: max(products[place], _most(timings, place, lambda operation, size: operation.flops(size)))
            for place in found
        }
        widest = {place: _most(timings, place, Operation.moved_bytes) for place in found}
        return DevicesReport(
            rows=tuple(_row(key, times, fastest[key[0]], widest[key[0]]) for key, times in timings.items()),
            peaks=tuple(Peak(at.device, at.threads, fastest[at] / GIGA, widest[at] / GIGA) for at in found),
            break_even=tuple(worths(found, timings)),
            training=trained(found, seconds, notify),
            missing=tuple(missing(found)),
            topology=machine,
        ).stored(out)


def _timings(found: Sequence[Place], limit: float, notify: Notify) -> dict[Key, list[float]]:
    """Seconds of every operation, size and device in every round."""
    ready: dict[tuple[str, str, int], Run] = {}
    times: dict[Key, int] = {}
    # devices next to each other, so that the machine is as busy for all of them
    keys: list[Key] = [
        (place, operation, size) for operation in OPERATIONS for size in operation.sizes for place in found
    ]
    keys += [
        (place, copy, size) for copy in TRANSFERS for size in copy.sizes for place in found if place.device != "cpu"
    ]
    for key in keys:
        place, operation, size = key
        data = place.device, operation.name, size  # the CPU's data serve any number of threads
        with place.used() as device:
            if data not in ready:
                ready[data] = operation.prepare(size, device)
            timed(ready[data], device)
            times[key] = max(1, min(MOST_TIMES, round(ROUND_SECONDS / timed(ready[data], device))))
    seconds: dict[Key, list[float]] = {key: [] for key in times}
    for number in rounds(MOST_ROUNDS, limit):
        notify(f"devices: operations, round {number + 1}")
        for key in times:
            place, operation, size = key
            run = ready[place.device, operation.name, size]
            with place.used() as device:
                run()  # threads and caches wake up
                seconds[key].append(timed(run, device, times[key]))
    return seconds


def _most(timings: dict[Key, list[float]], place: Place, amount: Callable[[Operation, int], int]) -> float:
    """FLOPs or bytes per second of the operation that has most of them on a device."""
    own = {key: seconds for key, seconds in timings.items() if key[0] == place and key[1] in OPERATIONS}
    return max(amount(operation, size) / statistics.median(seconds) for (_, operation, size), seconds in own.items())


def _row(key: Key, seconds: Sequence[float], product_peak: float, most_bytes: float) -> Row:
    place, operation, size = key
    middle = statistics.median(seconds)
    flops, speed = operation.flops(size) / middle, operation.moved_bytes(size) / middle
    return Row(
        operation=operation.name,
        device=place.device,
        threads=place.threads,
        size=size,
        unit=operation.unit,
        bound=operation.bound,
        bytes=operation.moved_bytes(size),
        seconds=middle,
        seconds_low=median_interval(seconds)[0],
        seconds_high=median_interval(seconds)[1],
        gflops=flops / GIGA,
        gigabytes_per_second=speed / GIGA,
        peak_share=flops / product_peak if operation.bound == "compute" else speed / most_bytes,
        rounds=len(seconds),
    )


def worths(found: Sequence[Place], timings: dict[Key, list[float]]) -> list[Worth]:
    """What is worth more threads, and what is worth sending to an accelerator from the CPU with all its threads."""
    one, *others = found
    host = [place for place in found if place.device == "cpu"][-1]
    pairs = [(one, host)] if host != one else []
    pairs += [(host, place) for place in others if place.device != "cpu"]
    return [_worth(operation, *pair, timings) for pair in pairs for operation in OPERATIONS]


def _worth(operation: Operation, host: Place, device: Place, timings: dict[Key, list[float]]) -> Worth:
    ours, its = (_cost(place, operation, timings) for place in (host, device))
    copies = _round_trip(device, timings) if device.device != "cpu" else None
    limits = min(operation.sizes), max(operation.sizes)
    found: BreakEven = break_even(ours, its, copies, operation.work, operation.moved_bytes, limits)
    misfit = max(cost.misfit for cost in (ours, its, copies) if cost is not None)
    return Worth(
        operation.name, operation.unit, host.name, device.name, found.size, found.extrapolated, found.looked_to, misfit
    )


def _cost(place: Place, operation: Operation, timings: dict[Key, list[float]]) -> Cost:
    cases = [timings[place, operation, size] for size in operation.sizes]
    return fit([1.0] * len(cases), [operation.work(size) for size in operation.sizes], cases)


def _round_trip(device: Place, timings: dict[Key, list[float]]) -> Cost:
    """There and back: two messages, and each byte is carried once."""
    keys = [(copy, size) for copy in TRANSFERS for size in copy.sizes]
    cases = [timings[device, copy, size] for copy, size in keys]
    cost = fit([1.0] * len(keys), [copy.moved_bytes(size) for copy, size in keys], cases)
    twice = cost.fixed_seconds
    return Cost(type(twice)(2 * twice.value, 2 * twice.low, 2 * twice.high), cost.unit_seconds, cost.misfit)


POINTS = 400
REACH = 64  # a break-even beyond this multiple of the largest timed size is none


@dataclass(frozen=True)
class BreakEven:
    """The smallest size from which on sending pays; None where it does not pay up to `looked_to`."""

    size: int | None
    extrapolated: bool  # whether it lies outside the sizes that were timed
    looked_to: int


def break_even(
    host: Cost,
    device: Cost,
    copies: Cost | None,
    work: Callable[[int], float],
    moved: Callable[[int], float],
    timed: tuple[int, int],
) -> BreakEven:
    """Where the device begins to be faster for good.

    Arguments:
        host, device: what the operation costs, by its work.
        copies: what carrying costs, by bytes; None where nothing has to be carried.
        work, moved: an operation's work and the bytes to carry, by its size; both rise with it.
        timed: the smallest and the largest size that were timed.
    """

    def gain(size: int) -> float:
        carried = copies.seconds(moved(size)) if copies is not None else 0.0
        return host.seconds(work(size)) - device.seconds(work(size)) - carried

    last = REACH * timed[1]
    sizes = sorted({round(float(size)) for size in np.geomspace(1, last, POINTS)})
    losing = [place for place, size in enumerate(sizes) if gain(size) < 0]
    if not losing:
        return BreakEven(1, timed[0] > 1, last)
    if losing[-1] == len(sizes) - 1:
        return BreakEven(None, False, last)
    low, high = sizes[losing[-1]], sizes[losing[-1] + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) < 0 else (low, middle)
    return BreakEven(high, not timed[0] <= high <= timed[1], last)
