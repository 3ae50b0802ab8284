"""What is known about a run, and what may be said about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scalewise.doctor.observations import Watched
from scalewise.stats.noise_scale import NoiseEstimate

Severity = Literal["high", "medium", "low"]

# Optimizers whose step is proportional to the gradient: their rate may grow with the gain, not with its root.
PROPORTIONAL = frozenset({"sgd", "momentum", "nesterov"})
# A final loss this much above another run's is worse: repeated runs of the built-in tasks differ by one or two percent.
WORSE = 1.03
# A loss that has settled falls by less than this share of all it fell in the last quarter of a run: the built-in tasks'
# single-worker runs, at their full budget, by 1 to 4 percent.
STILL_FALLING = 0.05


@dataclass(frozen=True)
class Finding:
    """A cause of lost accuracy: one sentence of evidence with the numbers, one with what to change."""

    cause: str
    severity: Severity
    evidence: str
    fix: str


@dataclass(frozen=True)
class Unknown:
    """A cause that could not be looked for, and why."""

    reason: str


Verdict = Finding | Unknown | None


@dataclass(frozen=True)
class Baseline:
    """A recipe that this run may have been scaled up from: its rate for its global batch, and its samples in all."""

    lr: float
    global_batch: float
    samples: float | None = None


@dataclass(frozen=True)
class BatchNorm:
    """The batch-norm layers of a model."""

    layers: int
    group: float  # samples that statistics are taken over
    momentum: float | None
    batches: int  # that the running statistics have seen
    gap: float | None = None  # from them to a batch's, in standard deviations; None where nobody looked
    recalibrated: bool = False


@dataclass(frozen=True)
class Evidence:
    """What is known about a run; None or empty where nothing is."""

    name: str
    workers: int
    worker_batch: float
    steps: int
    optimizer: str
    task: str | None = None
    rates: tuple[float, ...] = ()  # by step
    losses: tuple[float, ...] = ()  # by step, NaN where unknown
    noise: NoiseEstimate | None = None
    baselines: tuple[Baseline, ...] = ()
    batch_norm: BatchNorm | None = None
    non_finite: tuple[int, ...] = ()  # steps whose loss or gradient was not
    failure: str | None = None
    test_loss: float | None = None
    samples_per_epoch: int | None = None
    samples_seen: float | None = None  # in all, where steps are of different sizes
    follows_noise: bool = False  # the rate follows the measured gain
    counts_progress: bool = False  # the schedule is counted in the run's own progress, so that it ends with the run
    processes: tuple[Watched, ...] = ()

    @property
    def watched(self) -> bool:
        """Whether it comes from somebody's own loop."""
        return bool(self.processes)

    @property
    def global_batch(self) -> float:
        """Samples per step over all workers."""
        return self.workers * self.worker_batch

    @property
    def samples(self) -> float:
        """Samples seen in all."""
        return self.steps * self.global_batch if self.samples_seen is None else self.samples_seen

    @property
    def peak(self) -> float:
        """The largest learning rate."""
        return max(self.rates, default=0.0)

    @property
    def proportional(self) -> bool:
        """Whether the optimizer's step is proportional to the gradient."""
        return self.optimizer.lower() in PROPORTIONAL


def final_loss(evidence: Evidence) -> float | None:
    """The mean loss of the last tenth of the steps."""
    losses = np.array(evidence.losses)
    tail = losses[-max(1, len(losses) // 10) :]
    tail = tail[np.isfinite(tail)]
    return float(tail.mean()) if len(tail) else None


def worse(evidence: Evidence, reference: Evidence) -> tuple[float, float] | None:
    """The final losses (of this run, of the other) if this run's is clearly higher, on training or else test data."""
    pairs = [(final_loss(evidence), final_loss(reference)), (evidence.test_loss, reference.test_loss)]
    for mine, other in pairs:
        if mine is not None and other is not None and mine > other + (WORSE - 1) * abs(other):
            return mine, other
    return None


def still_falling(evidence: Evidence) -> float | None:
    """The share of all that the loss has fallen that came in the last quarter of the run; None if it has settled."""
    losses = np.array(evidence.losses)
    quarter = max(1, len(losses) // 4)
    if len(losses) < 2 or not np.isfinite(losses[[0, *range(-2 * quarter, 0)]]).all():
        return None
    before, after = losses[-2 * quarter : -quarter], losses[-quarter:]
    scatter = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / quarter) if quarter > 1 else 0.0
    fall = float(before.mean() - after.mean())
    learned = float(losses[0] - after.mean())
    return fall / learned if learned > 0 and fall > max(2 * scatter, STILL_FALLING * learned) else None


def shown(value: float) -> str:
    """A number in a sentence.

    >>> shown(0.0123456), shown(12345.6), shown(3.0), shown(1.5e9)
    ('0.0123', '12,346', '3', '1.5e+09')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
