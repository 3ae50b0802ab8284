"""The critical batch: what it is, what the noise scale says of it, and what more workers bring at it.

To reach a given loss at global batch B takes (McCandlish et al. 2018, section 2.3)

    S = S_min · (1 + B_crit ÷ B) steps        E = S · B = E_min · (1 + B ÷ B_crit) samples        E_min = S_min · B_crit

so that (S ÷ S_min − 1) · (E ÷ E_min − 1) = 1. At B = B_crit both are twice their minimum: a sample is worth half.
`scalewise.stats.steps_law` fits this law to measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from scalewise.stats.interval import Interval, t_quantile, weighted_sum
from scalewise.stats.noise_scale import trapezoid_weights

Method = Literal["noise scale", "branch", "sweep", "runs", "sweep and noise scale", "runs and noise scale"]

# Assumption: in 95 % of tasks the critical batch lies within a factor of 10 of the noise scale (McCandlish et al. 2018
# speak of an order of magnitude; factors of 0.3 to 7 were seen here).
NOISE_FACTOR = 10.0
NEAR = 2.0  # ratio up to which two methods are said to be near each other
WORKERS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class CriticalBatch(Interval[float | None]):
    """A critical batch in samples with its interval (`high` None: unbounded), and how it was found.

    `value` is None where it is beyond anything that was measured, or nothing is known at all.
    """

    method: Method

    @property
    def bounded(self) -> bool:
        """Whether anything is ruled out: a number from data that fit 0 and infinity as well is none to go by.

        >>> CriticalBatch(13.0, 0.0, None, "sweep").bounded, CriticalBatch(None, 1024.0, None, "branch").bounded
        (False, True)
        """
        if self.low is None and self.high is None:
            return self.value is not None  # its interval is not known, which is not the same as without end
        return bool(self.low) or self.high is not None

    def efficiency(self, global_batch: float) -> Interval[float | None]:
        """What a sample is worth at a global batch, beside one at a tiny batch.

        >>> CriticalBatch(900.0, 450.0, None, "sweep").efficiency(100)
        Interval(value=0.9, low=0.8181818181818182, high=1.0, level=0.95)
        """
        ends = (self.value, self.low, self.high)
        value, low, high = (None if end is None else efficiency(global_batch, end) for end in ends)
        return Interval(value, low, 1.0 if high is None else high, level=self.level)

    def at_level(self, level: float) -> CriticalBatch:
        """The same with an interval of another level, as if log B were normal on either side of the value.

        >>> found = CriticalBatch(100.0, 10.0, None, "noise scale").at_level(0.8)
        >>> round(found.low), found.high
        (22, None)
        """
        if not self.value:
            return replace(self, level=level)
        value, ratio = self.value, t_quantile(math.inf, level) / t_quantile(math.inf, self.level)
        low, high = (value * (end / value) ** ratio if end else end for end in (self.low, self.high))
        return replace(self, low=low, high=high, level=level)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `critical_batch`."""
        return super().to_json() | {"method": self.method}

    def __str__(self) -> str:
        if self.value is not None and not self.bounded:
            return f"not bounded (best fit {self.value:,.0f})"
        if self.value is None:
            return f"at least {self.low:,.0f}" if self.low else "not known"
        if self.high is None:
            return f"{self.value:,.0f} (at least {self.low:,.0f})" if self.low else f"{self.value:,.0f} (no interval)"
        return f"{self.value:,.0f} ({self.low or 0:,.0f} to {self.high:,.0f})"


def from_noise(stages: Sequence[tuple[int, Interval[float | None]]], worker_batch: int) -> CriticalBatch:
    """The one B that gives the steps which a noise scale B(t) along a single worker's training gives.

    N workers take Σ (1 + B(t) ÷ (N·b)) ÷ (1 + B(t) ÷ b) over the steps t of one worker, which is (w + (1 − w) ÷ N)
    of them with w the mean of 1 ÷ (1 + B(t) ÷ b), whatever N. So B = b·(1 ÷ w − 1): the mean of B(t) over S_min.
    The interval holds the sampling error only; `predicted` adds that of the noise scale as a predictor.

    Arguments:
        stages: (step, noise scale) along the training; those without an interval are left out if others have one.
        worker_batch: b, of that training.

    >>> from_noise([(0, Interval(32.0, 16.0, None)), (9, Interval(32.0, 16.0, None))], worker_batch=32).value
    32.0
    """
    known = [stage for stage in stages if stage[1].low is not None]
    used = known or [stage for stage in stages if stage[1].value is not None]
    if not used:
        return CriticalBatch(None, None, None, "noise scale")
    weights = trapezoid_weights([step for step, _ in used])
    share = weighted_sum([_share(noise, worker_batch) for _, noise in used], weights)
    value, low, high = (
        max(worker_batch * (1 / end - 1), 0.0) if end > 0 else None for end in (share.value, share.high, share.low)
    )
    return CriticalBatch(value, low, high, "noise scale") if known else CriticalBatch(value, None, None, "noise scale")


def _share(noise: Interval[float | None], worker_batch: int) -> Interval[float]:
    """1 ÷ (1 + B ÷ b) of a noise scale B; 0 of an unbounded one."""
    least = noise.value if noise.low is None else noise.low
    value, low, high = (
        0.0 if end is None else 1 / (1 + end / worker_batch) for end in (noise.value, noise.high, least)
    )
    return Interval(value, low, high)


def predicted(noise: CriticalBatch) -> CriticalBatch:
    """The critical batch as a noise scale predicts it: the sampling error, and the factor by which it may be off.

    >>> found = predicted(CriticalBatch(100.0, 100.0, None, "noise scale"))
    >>> round(found.low, 6), found.high
    (10.0, None)
    """
    value = noise.value or 1.0

    def widened(end: float | None, factor: float) -> float | None:
        if not end or not noise.value:
            return end and end * factor
        return value * math.exp(math.copysign(math.hypot(math.log(end / value), math.log(factor)), math.log(factor)))

    low = noise.value if noise.low is None else noise.low
    return replace(noise, low=widened(low, 1 / NOISE_FACTOR), high=widened(noise.high, NOISE_FACTOR))


def efficiency(global_batch: float, critical: float) -> float:
    """Share of a sample's worth that is left at a global batch: 1 ÷ (1 + B ÷ B_crit).

    >>> efficiency(900, 900)
    0.5
    """
    return critical / (critical + global_batch)


@dataclass(frozen=True)
class Efficiency:
    """What a number of workers brings: steps and samples to the same loss are multiples of what one worker needs."""

    workers: int
    global_batch: int
    worth: Interval[float | None]  # of a sample, as a share of one in very small global batches
    steps: float | None
    samples: float | None

    def to_json(self) -> dict[str, float | None]:
        """As it stands in `efficiency` of the document."""
        worth = {"worth": self.worth.value, "low": self.worth.low, "high": self.worth.high}
        sizes = {"workers": self.workers, "global_batch": self.global_batch}
        return sizes | worth | {"steps": self.steps, "samples": self.samples}


def efficiency_of(critical: CriticalBatch, worker_batch: int, workers: int) -> Efficiency:
    """What a number of workers brings, each with this worker batch.

    >>> found = efficiency_of(CriticalBatch(900.0, 450.0, 1800.0, "sweep"), worker_batch=100, workers=9)
    >>> found.worth.value, round(found.steps, 3), found.samples
    (0.5, 0.2, 1.8)
    """
    global_batch = workers * worker_batch
    share, one = critical.efficiency(global_batch), critical.efficiency(worker_batch)
    samples = one.value / share.value if one.value and share.value else None
    steps = None if samples is None else samples / workers
    return Efficiency(workers, global_batch, share, steps, samples)


def agreement(cheap: CriticalBatch, direct: CriticalBatch) -> str:
    """One sentence on whether the noise scale and the direct measurement say the same."""
    pair = f"{cheap.method} {cheap}, {direct.method} {direct}"
    if not cheap.bounded or not direct.bounded:
        unknown = direct if cheap.bounded else cheap
        return f"they cannot be compared, as the {unknown.method} gives no critical batch: {pair}"
    apart, factor = "", math.inf
    if cheap.value and direct.value:
        larger, smaller = (cheap, direct) if cheap.value >= direct.value else (direct, cheap)
        factor = max(cheap.value / direct.value, direct.value / cheap.value)
        apart = f"the {larger.method}'s is {factor:.2g} times the {smaller.method}'s"
    if direct.value is None and overlap(cheap, direct):
        return f"they do not contradict each other, but the {direct.method} gives a lower bound only: {pair}"
    if overlap(cheap, direct):
        return f"they agree, their intervals overlap{f' ({apart})' if apart else ''}: {pair}"
    near = ", though not by much" if factor <= NEAR else ""
    return (
        f"they disagree{near}: {apart or 'their intervals do not overlap'}: {pair}; "
        f"trust the {direct.method}, which was measured by training"
    )


def overlap(one: CriticalBatch, other: CriticalBatch) -> bool:
    """Whether some critical batch lies in both intervals."""

    def ends(batch: CriticalBatch) -> tuple[float, float]:
        bounded = batch.low is not None or batch.high is not None
        value = math.inf if batch.value is None else batch.value
        return (batch.low or 0.0, math.inf if batch.high is None else batch.high) if bounded else (value, value)

    (one_low, one_high), (other_low, other_high) = ends(one), ends(other)
    return one_low <= other_high and other_low <= one_high
