"""What holds a step up, in a sentence, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalewise.runs.profile.result import (
    COMPUTING,
    INPUT,
    OTHER,
    READING,
    UPDATING,
    LayerRow,
    PhaseRow,
    ProcessRow,
    Setting,
)

DISTURBED = 0.2  # of the time, in which the step could not have a core
UNEVEN = 1.25  # processes whose own work takes this much longer hold the others up
SHORT_STEP_SECONDS = 0.01  # a worker's pass this short is mostly the fixed cost of each operation

Verdict = tuple[str, str]  # (bottleneck, advice)


def verdict(
    setting: Setting, wall: float, phases: Sequence[PhaseRow], layers: Sequence[LayerRow], rows: Sequence[ProcessRow]
) -> Verdict:
    """The largest part of the step, and what would make it smaller; and whether others were in the way of seeing it."""
    bottleneck, advice = _largest(setting, wall, phases, layers, rows)
    queued = max(row.usage.queued_share for row in rows)
    if queued < DISTURBED:
        return bottleneck, advice
    return bottleneck, f"{advice} Other programs had the cores {percent(queued)} of the time: look again without them."


def _largest(
    setting: Setting, wall: float, phases: Sequence[PhaseRow], layers: Sequence[LayerRow], rows: Sequence[ProcessRow]
) -> Verdict:
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
        return _input(setting, wall, by_name, share)
    if largest == "communication":
        return _communication(setting, share, rows)
    if largest == "updating":
        return _updating(setting, by_name, share)
    if largest == "loop":
        return (
            f"The loop around the phases takes {percent(share)} of the step, more than computing.",
            "Raise --worker-batch: the loop costs the same for a larger one.",
        )
    return _computing(setting, wall, by_name, layers, share)


def _input(setting: Setting, wall: float, phases: dict[str, PhaseRow], share: float) -> Verdict:
    if phases["queue"].waited_seconds > 0.5 * share * wall:
        return _starved(setting, wall, phases)
    largest = max(INPUT, key=lambda name: phases[name].step_seconds)
    bottleneck = (
        f"Samples take {percent(share)} of the step, most of it in {largest} ({percent(phases[largest].share)})."
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
        f"The step waits for its samples, {milliseconds(waited)} of {milliseconds(wall)}: {count} "
        f"{milliseconds(work)} for those of one step, most of it in {largest}."
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
            f"Processes wait for each other, {percent(share)} of the step: process {slowest} works "
            f"{milliseconds(own[slowest])} in each, process {quickest} {milliseconds(own[quickest])}."
        )
        if setting.workers % setting.processes:
            return bottleneck, "Give every process as many workers: --processes that divides --workers."
        return bottleneck, f"See what else runs beside process {slowest}, or whether its device is slower."
    hidden = sum(row.communication.hidden_seconds for row in rows)
    flying = sum(row.communication.in_flight_seconds for row in rows)
    return (
        f"Communication takes {percent(share)} of the step; {percent(hidden / flying if flying else 0)} of its time "
        f"in flight is hidden behind work.",
        "Raise --worker-batch, so that there is more to compute for the same exchange, or use fewer --processes.",
    )


def _updating(setting: Setting, phases: dict[str, PhaseRow], share: float) -> Verdict:
    largest = max(UPDATING, key=lambda name: phases[name].step_seconds)
    bottleneck = f"Summing and updating take {percent(share)} of the step, most of it in {largest}."
    spreads = setting.processes > 1 and setting.reduce == "ordered" and not setting.shard_optimizer
    if largest == "optimizer" and spreads and setting.optimizer != "muon":
        return bottleneck, "Use --shard-optimizer: each process then updates its part, with the same result."
    if largest == "norms":
        return bottleneck, "Use --no-noise, if the noise scale is not needed, or raise --worker-batch."
    return bottleneck, "Raise --worker-batch: the update costs the same for a larger one."


def _computing(
    setting: Setting, wall: float, phases: dict[str, PhaseRow], layers: Sequence[LayerRow], share: float
) -> Verdict:
    bottleneck = f"Computing takes {percent(share)} of the step"
    passes = [(row.backward_seconds, "backward", row) for row in layers]
    passes += [(row.forward_seconds, "forward", row) for row in layers]
    if setting.compiled or not passes:
        larger = max(("forward", "backward"), key=lambda name: phases[name].share)
        bottleneck += f", {larger} {percent(phases[larger].share)}."
    else:
        seconds, direction, layer = max(passes, key=lambda found: found[0])
        kind = f" ({layer.kind})" if layer.kind != "loss" else ""
        bottleneck += f", the largest part {direction} in {layer.name}{kind}: {percent(seconds / wall)}."
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


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.0f} %"


def milliseconds(seconds: float) -> str:
    """A duration with three digits.

    >>> milliseconds(0.0123456), milliseconds(0.00042), milliseconds(2.5)
    ('12.3 ms', '420 µs', '2.5 s')
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{float(f'{seconds * factor:.3g}'):g} {unit}"
    return f"{float(f'{seconds * 1e6:.3g}'):g} µs"
