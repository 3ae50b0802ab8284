"""Throughput from timed rounds: medians, their spread, and the knee of the curve.

Costs from timings: a fixed part and a part per unit, whatever else the machine was doing.

    seconds = α · messages + β · units

With one message and units in bytes this is the α–β model of a collective (Hockney 1994); with two messages per process
and the bytes that a ring sends it is the link between processes (scalewise.plan.hardware); with units in FLOPs it is an
operation on a device.

Parts of a step when processes are added:

All processes end a step together. One that has computed its gradients waits until the slowest has (imbalance), and then
all wait for the exchange itself (communication). So what the process that waits least in a step waits is communication,
and what the others wait beyond that is imbalance. Communication hidden behind computing costs nothing and is not seen
here; the processor time that it takes from computing is, in the rest. On CUDA a process waits on its device, where this
clock does not see it: there all of it is in the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from scalewise.stats.interval import LEVEL, Interval, median_interval

KNEE = 0.9  # share of the best throughput


@dataclass(frozen=True)
class Rate:
    """Samples per second at one worker batch: the median over rounds and its interval."""

    worker_batch: int
    samples_per_second: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Knee:
    """The smallest worker batch with 90 % of the best throughput."""

    worker_batch: int
    low: int  # the smallest that may have it, given the noise of the rounds
    high: int  # the smallest that surely has it


def rate(worker_batch: int, rounds: Sequence[float]) -> Rate:
    """The throughput of one worker batch from its rounds."""
    low, high = median_interval(rounds)
    return Rate(worker_batch, statistics.median(rounds), low, high, len(rounds))


def find_knee(rounds: Mapping[int, Sequence[float]]) -> Knee:
    """Where the curve bends, from samples per second by worker batch and round.

    Worker batches are compared within a round, in which the machine was as busy for all of them: the median of the
    ratios to the best worker batch decides, and its interval gives the bounds.

    >>> find_knee({1: [10, 11, 10], 2: [19, 21, 20], 4: [20, 22, 21]}).worker_batch
    2
    """
    best = max(rounds, key=lambda batch: statistics.median(rounds[batch]))
    ratios = {
        batch: [own / other for own, other in zip(rounds[batch], rounds[best], strict=True)] for batch in sorted(rounds)
    }
    bounds = {batch: median_interval(values) for batch, values in ratios.items()}
    return Knee(
        worker_batch=next(batch for batch, values in ratios.items() if statistics.median(values) >= KNEE),
        low=next(batch for batch, (_, high) in bounds.items() if high >= KNEE),
        high=next(batch for batch, (low, _) in bounds.items() if low >= KNEE),
    )


Numbers = NDArray[np.float64]

ITERATIONS = 20
TUNING = 1.345  # Huber's: 95 % of the efficiency of least squares where noise is normal
RESAMPLES = 300
TINY = 1e-300


@dataclass(frozen=True)
class Cost:
    """α of one message and β of one unit."""

    fixed_seconds: Interval[float]
    unit_seconds: Interval[float]
    misfit: float  # the median relative distance of a timing from the line: small where the model holds

    def seconds(self, units: float) -> float:
        """What a number of units takes, in one message."""
        return self.fixed_seconds.value + units * self.unit_seconds.value


def fit(messages: Sequence[float], units: Sequence[float], timings: Sequence[Sequence[float]], seed: int = 0) -> Cost:
    """The cost that explains some timings; a timing counts by its relative distance, and outliers count little.

    Arguments:
        messages, units: of each case; there must be two different ratios of them.
        timings: of each case, seconds in every round; their median is fitted.
        seed: of the resampling that gives the intervals.

    >>> cost = fit([1, 1, 1], [10, 100, 1000], [[1.1], [2.0], [11.0]])
    >>> round(cost.fixed_seconds.value, 6), round(cost.unit_seconds.value, 6)
    (1.0, 0.01)
    """
    design = np.stack([np.asarray(messages, float), np.asarray(units, float)], axis=1)  # (case, coefficient)
    rounds = np.asarray(timings, float)  # (case, round)
    if len({tuple(row / row[0]) for row in design}) < 2:
        raise ValueError("at least two sizes are needed to separate a fixed cost from one per unit")
    generator = np.random.default_rng(seed)
    chosen = generator.integers(rounds.shape[1], size=(RESAMPLES, *rounds.shape))
    drawn = np.take_along_axis(np.broadcast_to(rounds, chosen.shape), chosen, axis=2)  # (resample, case, round)
    medians = np.median(rounds, axis=1)
    lines = _robust_lines(design, np.vstack([medians, np.median(drawn, axis=2)]))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(lines[1:], [tail, 100 - tail], axis=0)
    fixed, unit = (
        Interval(float(value), float(min(least, value)), float(max(most, value)))
        for value, least, most in zip(lines[0], low, high, strict=True)
    )
    return Cost(fixed, unit, float(np.median(np.abs(medians / (design @ lines[0]) - 1))))


def _robust_lines(design: Numbers, seconds: Numbers) -> Numbers:
    """Coefficients (resample, coefficient) for seconds (resample, case), none of them below 0.

    Iteratively reweighted least squares of the distances relative to the line, with Huber's weights.
    """
    expected = seconds
    lines = np.zeros((len(seconds), 2))
    trust = np.ones_like(seconds)
    for _ in range(ITERATIONS):
        lines = _non_negative(design, seconds, trust / expected**2)
        expected = np.maximum(lines @ design.T, TINY)
        distance = np.abs(seconds / expected - 1)
        scale = np.maximum(1.4826 * np.median(distance, axis=1, keepdims=True), 1e-9)
        trust = np.minimum(1.0, TUNING * scale / np.maximum(distance, TINY))
    return lines


def _non_negative(design: Numbers, seconds: Numbers, weights: Numbers) -> Numbers:
    """Weighted least squares by the normal equations; where a coefficient would be below 0, the other one alone."""
    first, second = design.T
    squares = weights @ np.stack([first * first, first * second, second * second], axis=1)  # (resample, 3)
    targets = (weights * seconds) @ design  # (resample, coefficient)
    determinant = np.maximum(squares[:, 0] * squares[:, 2] - squares[:, 1] ** 2, TINY)
    fixed = (squares[:, 2] * targets[:, 0] - squares[:, 1] * targets[:, 1]) / determinant
    unit = (squares[:, 0] * targets[:, 1] - squares[:, 1] * targets[:, 0]) / determinant
    return np.stack(
        [
            np.where(unit < 0, targets[:, 0] / squares[:, 0], np.maximum(fixed, 0.0)),
            np.where(fixed < 0, targets[:, 1] / squares[:, 2], np.maximum(unit, 0.0)),
        ],
        axis=1,
    )


LEAST = 3


def rounds(most: int, seconds: float, least: int = LEAST, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Round numbers: `most` of them, or fewer on a busy machine where `seconds` are spent sooner; `least` at least.

    >>> ticks = iter([0.0, 8.0, 12.0])
    >>> [*rounds(9, 10.0, clock=lambda: next(ticks))]
    [0, 1, 2, 3]
    """
    until = clock() + seconds
    for number in range(most):
        if number >= least and clock() >= until:
            return
        yield number


@dataclass(frozen=True)
class Parts:
    """Seconds of a mean step, averaged over processes; they add up to `step_seconds`."""

    step_seconds: float
    communication_seconds: float
    imbalance_seconds: float
    input_seconds: float

    @property
    def compute_seconds(self) -> float:
        """What is left: computing."""
        return self.step_seconds - self.communication_seconds - self.imbalance_seconds - self.input_seconds


@dataclass(frozen=True)
class Lost:
    """Shares of a step's time that an ideal scaling would not have spent; with the efficiency they add up to 1."""

    communication_share: float
    imbalance_share: float
    input_share: float
    rest_share: float  # slower computing, by processes that share cores and memory, or by work that is not shared out


def parts_of_step(
    seconds: Sequence[float], waits: Sequence[Sequence[float]], input_seconds: Sequence[float], steps: int
) -> Parts:
    """What a round's steps consisted of.

    Arguments:
        seconds: of the whole round, by process.
        waits: seconds waited for other processes, by process and step.
        input_seconds: waited for samples in the whole round, by process.
        steps: in the round.

    >>> parts_of_step([4.0, 4.0], [[1.5, 1.0], [0.5, 1.0]], [0.0, 0.0], 2)
    Parts(step_seconds=2.0, communication_seconds=0.75, imbalance_seconds=0.25, input_seconds=0.0)
    """
    least = sum(min(of_step) for of_step in zip(*waits, strict=True)) / steps
    waited = statistics.fmean(sum(own) for own in waits) / steps
    return Parts(max(seconds) / steps, least, waited - least, statistics.fmean(input_seconds) / steps)


def medians(rounds: Sequence[Parts]) -> Parts:
    """Each part's median over rounds; the parts need not add up to the step's to the last digit."""
    return Parts(*(statistics.median(getattr(one, field.name) for one in rounds) for field in fields(Parts)))


def lost(own: Parts, base: Parts, ideal_seconds: float) -> Lost:
    """How much more than ideal each part takes, as a share of a step.

    Arguments:
        own: a step on more processes.
        base: a step on the fewest.
        ideal_seconds: of a step on more processes, had they taken nothing from each other.
    """
    scale = ideal_seconds / base.step_seconds

    def share(name: str) -> float:
        mine: float = getattr(own, name)
        its: float = getattr(base, name)
        return (mine - scale * its) / own.step_seconds

    return Lost(*(share(f"{name}_seconds") for name in ("communication", "imbalance", "input", "compute")))


def efficiency_rounds(rates: Mapping[int, Sequence[float]], processes: int, base: int) -> list[float]:
    """Efficiency round by round: samples per second and process, against the fewest processes in the same round.

    >>> efficiency_rounds({1: [100.0, 50.0], 2: [180.0, 90.0]}, 2, 1)
    [0.9, 0.9]
    """
    pairs = zip(rates[processes], rates[base], strict=True)
    return [mine / processes / (its / base) for mine, its in pairs]
