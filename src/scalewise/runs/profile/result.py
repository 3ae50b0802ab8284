"""A profile: where the time of an average step went, phase by phase and layer by layer, on every process.

The phases of a training step, in the order in which a sample meets them.

A phase has **worked** while its own code ran: the data set's `__getitem__` in `read`, a layer's `forward` in `forward`,
whatever they did with that time (computing, reading a file, sleeping). It has **waited** while something else had
to finish first: a loader process that has no batch ready (`queue`) or another process (`communication`).
The seconds of a training process, worked and waited, add up to its step. Work done beside the step, in loader processes
or threads that read ahead, is counted in full under its own phase and is not part of that sum; the step shows what it
waited for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class PhaseRow:
    """One phase of an average step.

    worked_seconds: also what loader processes, or threads that read ahead, did for the step: `beside_seconds` of it.
    waited_seconds: for something else to finish.
    share: of the step's wall time; what is beside the step has no part in it.
    """

    name: str
    worked_seconds: float
    waited_seconds: float
    beside_seconds: float
    share: float

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
    """Operations between processes, per step and process.

    in_flight_seconds: in which at least one was in flight.
    waited_seconds: in which the process did nothing else.
    hidden_seconds: in which it continued its work; `behind_backward_seconds` of that was backward.
    """

    operations: float
    in_flight_seconds: float
    waited_seconds: float
    hidden_seconds: float
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
    """How a process used its machine, in all and over time.

    processor_share: processor time of all its threads ÷ wall time; 1 is one core.
    queued_share: the part of the time in which the step's thread was ready, but other programs had the cores.
    memory_bytes: the most of its own in main memory; device_bytes: the most that torch held on the device.
    memory_over_time: of the device, if any.
    """

    processor_share: float
    queued_share: float
    device_share: float | None
    memory_bytes: int
    device_bytes: int | None
    processor_over_time: tuple[Point, ...]
    memory_over_time: tuple[Point, ...]


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
    """What profiling costs: profiled ÷ plain steps − 1, the median over interleaved rounds, and its 95 % interval.

    processor_share: the same of their processor time, which other programs disturb less.
    """

    share: float
    low: float
    high: float
    processor_share: float
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
        return {
            **content.pop("setting"),
            **content,
            "samples_per_second": self.setting.workers * self.setting.worker_batch / self.step_seconds,
            "utilisation": [_chosen(usage, *UTILISATION) for usage in usages],
            "memory": [_chosen(usage, "process", "memory_bytes", "device_bytes") for usage in usages],
            "over_time": [_chosen(usage, "process", "processor_over_time", "memory_over_time") for usage in usages],
            "by_process": rows,
        }


UTILISATION = ("process", "processor_share", "queued_share", "device_share", "loaders")


def _chosen(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


PhaseName = Literal[
    "read",
    "transport to memory",
    "preprocess",
    "queue",
    "transport to device",
    "forward",
    "loss",
    "output",
    "backward",
    "sum",
    "communication",
    "norms",
    "optimizer",
    "update",
    "return",
]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
OTHER = "other"  # what is left of the step: the loop around the phases
INPUT: tuple[PhaseName, ...] = PHASES[:5]
READING: tuple[PhaseName, ...] = PHASES[:3]  # what loader processes do
COMPUTING: tuple[PhaseName, ...] = ("forward", "loss", "output", "backward")
UPDATING: tuple[PhaseName, ...] = ("sum", "norms", "optimizer", "update")

MEANING: dict[str, str] = {
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
