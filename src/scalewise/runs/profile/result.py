"""A profile: where the time of an average step went, phase by phase and layer by layer, and what holds it up.

The phases of a training step, in the order in which a sample meets them.

A phase has **worked** while its own code ran: the data set's `__getitem__` in `read`, a layer's `forward` in `forward`,
whatever they did with that time (computing, reading a file, sleeping). It has **waited** while something else had
to finish first: a loader process that has no batch ready (`queue`) or another process (`communication`).
The seconds of a training process, worked and waited, add up to its step. Work done beside the step, in loader processes
or threads that read ahead, is counted in full under its own phase and is not part of that sum; the step shows what it
waited for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseRow:
    """One phase of an average step."""

    name: str
    worked_seconds: float  # also what loader processes, or threads that read ahead, did for the step
    waited_seconds: float  # for something else to finish
    beside_seconds: float  # what those did
    share: float  # of the step's wall time; what is beside the step has no part in it

    @property
    def step_seconds(self) -> float:
        """Its part of the step's wall time."""
        return self.worked_seconds + self.waited_seconds - self.beside_seconds


@dataclass(frozen=True)
class LayerRow:
    """One layer: the time in it that is not in a layer within it."""

    name: str
    kind: str
    worked_seconds: float
    forward_seconds: float
    backward_seconds: float
    share: float


@dataclass(frozen=True)
class Communication:
    """Operations between processes, per step and process."""

    operations: float
    in_flight_seconds: float  # in which at least one was in flight
    waited_seconds: float  # in which the process did nothing else
    hidden_seconds: float  # in which it continued its work; `behind_backward_seconds` of that was backward
    behind_backward_seconds: float


@dataclass(frozen=True)
class Point:
    """A value at a moment, seconds after the first look."""

    seconds: float
    value: float


@dataclass(frozen=True)
class LoaderRow:
    """A loader process: the part of the time in which it read, and what it did for each step."""

    number: int
    busy_share: float


@dataclass(frozen=True)
class Usage:
    """How a process used its machine, in all and over time."""

    processor_share: float  # processor time of all its threads ÷ wall time; 1 is one core
    queued_share: float  # the part of the time in which the step's thread was ready, but other programs had the cores
    device_share: float | None
    memory_bytes: int  # the most of its own in main memory
    device_bytes: int | None  # the most that torch held on the device
    processor_over_time: tuple[Point, ...]
    memory_over_time: tuple[Point, ...]  # of the device, if any


@dataclass(frozen=True)
class ProcessRow:
    """One training process."""

    process: int
    step_seconds: float
    phases: tuple[PhaseRow, ...]
    communication: Communication
    usage: Usage
    loaders: tuple[LoaderRow, ...]


@dataclass(frozen=True)
class Piece:
    """A stretch of the one step that is drawn: what a process ("0", or "0 loader 1") did, from when, for how long."""

    process: str
    name: str
    layer: str | None
    start_seconds: float
    worked_seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class InFlight:
    """An operation between processes in the step that is drawn."""

    process: str
    name: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class Overhead:
    """What profiling costs: profiled ÷ plain steps − 1, the median over interleaved rounds, and its 95 % interval."""

    share: float
    low: float
    high: float
    processor_share: float  # the same of their processor time, which other programs disturb less
    rounds: int
    profiled_seconds: float
    plain_seconds: float


@dataclass(frozen=True)
class Setting:
    """What was profiled, and where."""

    task: str
    workers: int
    worker_batch: int
    processes: int
    threads: int
    device: str
    cores: int
    in_memory: bool
    loaders: int
    reduce: str
    shard_optimizer: bool
    optimizer: str
    precision: str
    layout: str
    compiled: bool


@dataclass(frozen=True)
class Profile:
    """The whole picture of an average step."""

    setting: Setting
    steps: int
    step_seconds: float
    phases: tuple[PhaseRow, ...]
    layers: tuple[LayerRow, ...]
    communication: Communication
    by_process: tuple[ProcessRow, ...]
    timeline: tuple[Piece, ...]
    flights: tuple[InFlight, ...]
    overhead: Overhead
    bottleneck: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Every field by its name; what belongs to a process in lists of their own."""
        content = asdict(self)
        rows = content.pop("by_process")
        usages = [row.pop("usage") | {"process": row["process"], "loaders": row.pop("loaders")} for row in rows]
        lists = {title: [{name: one[name] for name in ("process", *names)} for one in usages] for title, names in USAGE}
        speed = self.setting.workers * self.setting.worker_batch / self.step_seconds
        return {**content.pop("setting"), **content, "samples_per_second": speed, **lists, "by_process": rows}


USAGE = (
    ("utilisation", ("processor_share", "queued_share", "device_share", "loaders")),
    ("memory", ("memory_bytes", "device_bytes")),
    ("over_time", ("processor_over_time", "memory_over_time")),
)


OTHER = "other"  # what is left of the step: the loop around the phases
MEANING = {
    "read": "samples out of the data set",
    "transport to memory": "samples made one batch",
    "preprocess": "augmentation",
    "queue": "until the next batch was ready",
    "transport to device": "batch to the device",
    "forward": "the model, layer by layer",
    "loss": "the loss of its output",
    "output": "metrics and numbers of it",
    "backward": "gradients, layer by layer",
    "sum": "workers' gradients added up",
    "communication": "with other processes",
    "norms": "gradient norms, clipping",
    "optimizer": "learning rate and new weights",
    "update": "new state put in its place",
    "return": "numbers read, record made",
    OTHER: "the loop around it",
}
PHASES = tuple(name for name in MEANING if name != OTHER)
INPUT, READING = PHASES[:5], PHASES[:3]  # loader processes do the reading
COMPUTING = ("forward", "loss", "output", "backward")
UPDATING = ("sum", "norms", "optimizer", "update")

DISTURBED = 0.2  # of the time, in which the step could not have a core
UNEVEN = 1.25  # processes whose own work takes this much longer hold the others up
SHORT_STEP_SECONDS = 0.01  # a worker's pass this short is mostly the fixed cost of each operation

Verdict = tuple[str, str]  # (bottleneck, advice)


def verdict(
    setting: Setting, wall: float, phases: Sequence[PhaseRow], layers: Sequence[LayerRow], rows: Sequence[ProcessRow]
) -> Verdict:
    """The largest part of the step, and what would make it smaller; and whether others were in the way of seeing it."""
    by_name = {row.name: row for row in phases}
    shares = {
        "input": sum(by_name[name].share for name in INPUT),
        "communication": by_name["communication"].share,
        "updating": sum(by_name[name].share for name in UPDATING),
        "computing": sum(by_name[name].share for name in COMPUTING),
        "loop": by_name["return"].share + by_name[OTHER].share,
    }
    largest = max(shares, key=lambda name: shares[name])
    share = shares[largest]
    if largest == "input":
        bottleneck, advice = _input(setting, wall, by_name, share)
    elif largest == "communication":
        bottleneck, advice = _communication(setting, share, rows)
    elif largest == "updating":
        bottleneck, advice = _updating(setting, by_name, share)
    elif largest == "computing":
        bottleneck, advice = _computing(setting, wall, by_name, layers, share)
    else:
        bottleneck = f"The loop around the phases takes {100 * share:.0f} % of the step, more than computing."
        advice = "Raise --worker-batch: the loop costs the same for a larger one."
    queued = max(row.usage.queued_share for row in rows)
    if queued >= DISTURBED:
        advice += f" Other programs had the cores {100 * queued:.0f} % of the time: look again without them."
    return bottleneck, advice


def _input(setting: Setting, wall: float, phases: dict[str, PhaseRow], share: float) -> Verdict:
    if phases["queue"].waited_seconds > 0.5 * share * wall:
        return _starved(setting, wall, phases)
    largest = max(INPUT, key=lambda name: phases[name].step_seconds)
    bottleneck = (
        f"Samples take {100 * share:.0f} % of the step, most of it in {largest} ({100 * phases[largest].share:.0f} %)."
    )
    if setting.in_memory:
        return bottleneck, "Make the augmentation cheaper, or do once, before training, what does not change."
    return bottleneck, "Read ahead in processes of their own: --loaders 1 or more."


def _starved(setting: Setting, wall: float, phases: dict[str, PhaseRow]) -> Verdict:
    """Loaders that do not keep up: what they work for a step, against the step without the wait."""
    waited = phases["queue"].waited_seconds
    work = sum(phases[name].beside_seconds for name in READING)
    largest = max(READING, key=lambda name: phases[name].beside_seconds)
    count = "1 loader needs" if setting.loaders == 1 else f"{setting.loaders} loaders need"
    bottleneck = (
        f"The step waits for its samples, {_milliseconds(waited)} of {_milliseconds(wall)}: {count} "
        f"{_milliseconds(work)} for those of one step, most of it in {largest}."
    )
    needed = math.ceil(work / max(wall - waited, 1e-9) - 0.05)  # a twentieth of a loader is noise
    spare = setting.cores // setting.processes
    if needed <= spare:
        return bottleneck, f"Use --loaders {needed}: then reading is as fast as the step."
    cheaper = "make it cheaper, as by storing samples decoded, in their final size"
    return bottleneck, (
        f"About {needed} loaders would keep up, and there are {spare} cores for each process: use --loaders {needed} "
        f"if reading waits for a disk or network; else {cheaper}."
    )


def _communication(setting: Setting, share: float, rows: Sequence[ProcessRow]) -> Verdict:
    own = {row.process: row.step_seconds - row.communication.waited_seconds for row in rows}
    slowest = max(own, key=lambda process: own[process])
    quickest = min(own, key=lambda process: own[process])
    if own[slowest] > UNEVEN * own[quickest]:
        bottleneck = (
            f"Processes wait for each other, {100 * share:.0f} % of the step: process {slowest} works "
            f"{_milliseconds(own[slowest])} in each, process {quickest} {_milliseconds(own[quickest])}."
        )
        if setting.workers % setting.processes:
            return bottleneck, "Give every process as many workers: --processes that divides --workers."
        return bottleneck, f"See what else runs beside process {slowest}, or whether its device is slower."
    hidden = sum(row.communication.hidden_seconds for row in rows)
    flying = sum(row.communication.in_flight_seconds for row in rows)
    part = hidden / flying if flying else 0.0
    return (
        f"Communication takes {100 * share:.0f} % of the step; {100 * part:.0f} % of its time in flight is hidden "
        "behind work.",
        "Raise --worker-batch, so that there is more to compute for the same exchange, or use fewer --processes.",
    )


def _updating(setting: Setting, phases: dict[str, PhaseRow], share: float) -> Verdict:
    largest = max(UPDATING, key=lambda name: phases[name].step_seconds)
    bottleneck = f"Summing and updating take {100 * share:.0f} % of the step, most of it in {largest}."
    spreads = setting.processes > 1 and setting.reduce == "ordered" and not setting.shard_optimizer
    if largest == "optimizer" and spreads and setting.optimizer not in ("muon", "soap"):
        return bottleneck, "Use --shard-optimizer: each process then updates its part, with the same result."
    if largest == "norms":
        return bottleneck, "Use --no-noise, if the noise scale is not needed, or raise --worker-batch."
    return bottleneck, "Raise --worker-batch: the update costs the same for a larger one."


def _computing(
    setting: Setting, wall: float, phases: dict[str, PhaseRow], layers: Sequence[LayerRow], share: float
) -> Verdict:
    bottleneck = f"Computing takes {100 * share:.0f} % of the step"
    passes = [(row.backward_seconds, "backward", row) for row in layers]
    passes += [(row.forward_seconds, "forward", row) for row in layers]
    if setting.compiled or not passes:
        larger = max(("forward", "backward"), key=lambda name: phases[name].share)
        bottleneck += f", {larger} {100 * phases[larger].share:.0f} %."
    else:
        seconds, direction, layer = max(passes, key=lambda found: found[0])
        kind = f" ({layer.kind})" if layer.kind != "loss" else ""
        bottleneck += f", the largest part {direction} in {layer.name}{kind}: {100 * seconds / wall:.0f} %."
        if seconds > 0.5 * wall:
            return bottleneck, f"Look into {layer.name} first: nothing else can make the step half as long."
    return bottleneck, _faster(setting, wall, any("Conv2d" in row.kind for row in layers))


def _faster(setting: Setting, wall: float, has_convolutions: bool) -> str:
    """How a step that computes all the time may take less of it."""
    workers_here = math.ceil(setting.workers / setting.processes)
    possible = min(setting.workers, setting.cores // setting.threads)
    if setting.device == "cpu" and setting.processes < possible:
        return f"Use --processes {possible}: {setting.cores} cores are available, and the result is the same."
    if wall / workers_here < SHORT_STEP_SECONDS:
        return (
            "Raise --worker-batch while accuracy allows: in passes this short much is the fixed cost of each operation "
            "(`scalewise measure` shows both)."
        )
    tries = ["--compile"] if not setting.compiled else []
    tries += ["--layout channels_last"] if has_convolutions and setting.layout != "channels_last" else []
    tries += ["--precision bf16"] if setting.device == "cuda" and setting.precision != "bf16" else []
    more = "more workers on more or faster devices"
    return (
        f"Use {', or '.join(tries)}, if that is faster here; else {more}." if tries else f"Only {more} make it faster."
    )


def _milliseconds(seconds: float) -> str:
    """A duration with three digits."""
    return f"{float(f'{1e3 * seconds:.3g}'):g} ms"
