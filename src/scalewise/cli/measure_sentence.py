"""A measurement in one sentence that a person can act on, and the words for its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalewise.present.words import number

if TYPE_CHECKING:
    from scalewise.runs.measure.efficiency import Efficiency
    from scalewise.runs.measure.measurement import Measurement
    from scalewise.runs.measure.memory.largest import MemoryReport
    from scalewise.runs.measure.minima.sharpness import Sharpness
    from scalewise.runs.measure.throughput import ThroughputReport
    from scalewise.stats.critical_batch import CriticalBatch
    from scalewise.stats.noise_scale import NoiseEstimate


def sentence(found: Measurement) -> str:
    """What a person can act on, in one sentence."""
    parts = []
    if found.noise is not None:
        parts.append(f"noise scale {with_interval(found.noise.used)}")
    if found.critical is not None and found.efficiencies:
        parts.append(f"critical batch {_about(found.critical)}{_by(found)}")
        own = next(row for row in found.efficiencies if row.workers == found.recipe.workers)
        parts.append(f"at {own.workers} × {found.recipe.worker_batch:,} each sample is worth {worth(own)}")
    if found.memory is not None:
        parts.append(_largest(found.memory))
    if found.throughput is not None:
        parts.append(_knee(found.throughput))
    return "; ".join([*parts, *_minima(found)])


def _knee(speed: ThroughputReport) -> str:
    """From which worker batch on it is fast; with what noise leaves open, where that is more than one doubling."""
    low, high = speed.knee_interval.low, speed.knee_interval.high
    interval = f" ({low:,}–{high:,})" if high > 2 * low else ""
    rising = ", the largest tried" if speed.knee == speed.rows[-1].worker_batch else ""
    return f"best throughput from {speed.knee:,}{interval}{rising}"


def _minima(found: Measurement) -> list[str]:
    """What was found between runs, and around each."""
    parts = []
    if found.line is not None:
        known = "of unknown height" if found.line.barrier is None else number(found.line.barrier)
        parts.append(f"loss barrier between the runs {known}")
    if found.sharpness:
        first = [minimum.full.rows[:1] for minimum in found.sharpness]
        box = next((f" (ε {rows[0].epsilon:g})" for rows in first if rows), "")
        parts.append(f"sharpness {', '.join(percents(rows)[0] for rows in first)}{box}")
    return parts


def _about(critical: CriticalBatch) -> str:
    if critical.value:
        return f"≈ {rough(critical.value)}"
    return f"at least {critical.low:,.0f}" if critical.low else f"at most {critical.high or 0.0:,.0f}"


def _by(found: Measurement) -> str:
    """Where the critical batch comes from, once there are two that it may come from."""
    assert found.critical is not None
    if found.verified is None:
        return ""
    direct = found.verified.critical
    if found.critical.method == direct.method:
        return f" by {direct.method}"
    said = f"{direct.method}: {direct}" if direct.bounded else f"not bounded by the {direct.method}"
    return f" by {found.critical.method} ({said})"


def worth(row: Efficiency) -> str:
    """Of a sample; its bound where nothing else is known of the critical batch."""
    if row.worth:
        return percent(row.worth)
    return f"at least {percent(row.low)}" if row.low else f"at most {percent(row.high)}"


def _largest(memory: MemoryReport) -> str:
    most = f"{memory.largest_worker_batch:,}"
    where = " with --loaders 0" if memory.loaders else ""
    if memory.limited_by == "data":
        return f"largest worker batch: all {most} training samples fit at once{where}"
    return f"largest worker batch that fits {most}{where}"


def with_interval(estimate: NoiseEstimate) -> str:
    """A noise scale with its 95 % interval."""
    if estimate.value is None:
        return "not known" if not estimate.low else f"at least {rough(estimate.low)}"
    if estimate.low is None:
        return f"{rough(estimate.value)} (no interval)"
    high = "∞" if estimate.high is None else rough(estimate.high)
    return f"{rough(estimate.value)} ({rough(estimate.low)}–{high})"


def rough(value: float) -> str:
    """Three digits, as nothing here is known better, and no fractions of a sample above ten.

    >>> rough(1234.5), rough(97.31), rough(3.14159), rough(2.34e21)
    ('1,230', '97', '3.1', '2.34e+21')
    """
    if value >= 1e15:
        return f"{value:.3g}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def percent(share: float | None) -> str:
    """A share in whole percent."""
    return "?" if share is None else f"{100 * share:.0f} %"


def percents(rows: Sequence[Sharpness]) -> list[str]:
    """How far the loss rises at every size of the box; undefined where there is no such number."""
    return [f"{row.value:.3g} %" for row in rows] or ["undefined"]
