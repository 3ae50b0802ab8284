"""The planning model: from a few measured numbers to steps, time, money and efficiency at any number of workers.

Closed formulas only, so that a page can compute the same rows (report's script does). With N workers of b samples, each
on a device of its own, B the critical batch and S₁ the steps of one worker:

    steps          S = ⌈S₁ · (1 + B ÷ (N·b)) ÷ (1 + B ÷ b)⌉       the critical-batch law (McCandlish et al. 2018), and
                                                                 what AdaScale's gain S₁ ÷ S amounts to
                   S = S₁ · max(1, s·N^g) ÷ N                    where auto races: s, g of a task that memorizes (low
                                                                 end) to one that learns (high), and at least l steps
    learning rate  lr · gain^p                                   p = 1, or ½ for adaptive optimizers; Muon's usual
                                                                 one where auto races, which measures it
    compute        c = (m·α + β·b) ÷ device speed                m = ⌈b ÷ largest worker batch⌉ micro batches
    communication  n = inside(q) + between(N ÷ q)                ring sums within nodes and between them, each
                                                                 2(P−1)·latency + 2(P−1)÷P · bytes ÷ bandwidth;
                                                                 q ≤ d devices of every node, the most that divide N
    step           t = max((c^γ + n^γ)^(1/γ), b ÷ input rate)    1 ≤ γ ≤ 10: overlap (Qiao et al. 2021)
    time, cost     (S + race)·t,   N·(S + race)·t · price
    efficiency     time of one worker ÷ (N · time)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scalewise.engine.candidates import BOLD, GENTLE, Intensity, usual_muon_rate
from scalewise.plan.hardware import Link
from scalewise.stats.gain import gain

WORTH_NAMING = 1.05  # what makes the time longer by more than this factor limits a row; "compute" where nothing does


@dataclass(frozen=True)
class Inputs:
    """Everything that the rows follow from; each `low` and `high` is an end of an 80 % interval."""

    worker_batch: int  # b, of every worker
    single_steps: float  # S₁, steps of one worker: of its budget, or to the target
    single_low: float
    single_high: float
    critical_batch: float | None  # B in samples; None is unbounded
    critical_low: float | None
    critical_high: float | None
    lr: float  # one worker's
    lr_power: float  # of the gain, by which the rate grows
    step_seconds: float  # α of one worker's compute where it was measured
    sample_seconds: float  # and β
    parameter_bytes: int  # that are summed in each step
    latency_seconds: float  # of the link between nodes
    bytes_per_second: float
    compute_spread: float = 0.0  # by which share of it compute may be off
    device_speed: float = 1.0  # how many times faster the devices planned for are
    node_devices: int = 1
    node_latency_seconds: float = 0.0  # of the link among the devices of a node
    node_bytes_per_second: float = 1e12
    overlap: float = 2.0  # γ; 1 hides nothing of the communication behind compute, 10 nearly all
    overlap_low: float = 1.0
    overlap_high: float = 10.0
    input_samples_per_second: float | None = None  # that can be read for each worker; None where reading never waits
    largest_worker_batch: int | None = None  # that fits a device at once; None where that is not known
    price_per_hour: float | None = None  # of one device; None where nothing is paid
    accuracy: float | None = None  # one worker's metric at the end, or at the target
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    measured_global_batch: int = 0  # the largest at which training was really seen; rows beyond are extrapolated
    race_samples: float | None = None  # s; None where the steps follow the noise
    race_growth: float = 0.0  # g
    race_least: int = 1  # l
    race_steps: int = 0  # of the race before step 0; 0 where the recipe says how many samples there are


@dataclass(frozen=True)
class Row:
    """What N workers bring."""

    workers: int
    global_batch: int
    lr: float
    steps: int
    samples: int
    seconds: float
    cost: float | None
    accuracy: float | None
    efficiency: float
    limit: str
    extrapolated: bool
    gain: float
    step_seconds: float
    throughput_efficiency: float


def rows(inputs: Inputs, workers: Iterable[int]) -> list[Row]:
    """One row for each number of workers."""
    return [row(inputs, count) for count in workers]


def row(inputs: Inputs, workers: int) -> Row:
    """What N workers bring, by the formulas above."""
    steps, each = steps_of(inputs, workers), step_seconds(inputs, workers)
    seconds = (steps + (inputs.race_steps if workers > 1 else 0)) * each
    one = steps_of(inputs, 1) * step_seconds(inputs, 1)
    price, worth = inputs.price_per_hour, gain_of(inputs, workers)
    global_batch = workers * inputs.worker_batch
    raced = workers > 1 and inputs.race_steps > 0
    return Row(
        workers=workers,
        global_batch=global_batch,
        lr=usual_muon_rate(steps) if raced else inputs.lr * worth**inputs.lr_power,
        steps=steps,
        samples=steps * global_batch,
        seconds=seconds,
        cost=None if price is None else workers * seconds / 3600 * price,
        accuracy=inputs.accuracy,
        efficiency=one / (workers * seconds),
        limit=limit(inputs, workers),
        extrapolated=global_batch > inputs.measured_global_batch,
        gain=worth,
        step_seconds=each,
        throughput_efficiency=step_seconds(inputs, 1) / each,
    )


def gain_of(inputs: Inputs, workers: int) -> float:
    """How many of one worker's steps a step is worth: by the critical batch, or as auto's race sets it; 1 to N."""
    if workers > 1 and inputs.race_samples is not None:
        return workers / max(1.0, inputs.race_samples * workers**inputs.race_growth)
    if inputs.critical_batch is None:
        return float(workers)
    return gain(inputs.critical_batch, 1.0, workers, inputs.worker_batch)


def steps_of(inputs: Inputs, workers: int) -> int:
    """Steps to where one worker gets in S₁ (a hair below a whole number is that number), or those of auto's budget."""
    if workers > 1 and inputs.race_samples is not None:
        steps = math.floor(inputs.single_steps / gain_of(inputs, workers) + 0.5)
        return max(1, steps, min(math.floor(inputs.single_steps), inputs.race_least))
    return max(1, math.ceil(inputs.single_steps / gain_of(inputs, workers) - 1e-9))


def compute_seconds(inputs: Inputs, largest: int | None) -> float:
    """c: one worker's compute in a step, in as many micro batches as memory makes necessary."""
    parts = 1 if largest is None else math.ceil(inputs.worker_batch / largest)
    return (parts * inputs.step_seconds + inputs.sample_seconds * inputs.worker_batch) / inputs.device_speed


def communication_seconds(inputs: Inputs, workers: int) -> float:
    """n: the sum of the gradients within nodes, then between them."""
    inside = Link("", inputs.node_latency_seconds, inputs.node_bytes_per_second)
    between = Link("", inputs.latency_seconds, inputs.bytes_per_second)
    used = devices_used(workers, inputs.node_devices)
    within = inside.reduction_seconds(inputs.parameter_bytes, used)
    return within + between.reduction_seconds(inputs.parameter_bytes, workers // used)


def devices_used(workers: int, node_devices: int) -> int:
    """q: on every node equally many, a device for each worker, on as few nodes as that allows.

    >>> devices_used(16, 8), devices_used(9, 8), devices_used(4, 8), devices_used(11, 8)
    (8, 3, 4, 1)
    """
    divisors = (one for one in range(1, math.isqrt(workers) + 1) if workers % one == 0)
    return max((one for pair in divisors for one in (pair, workers // pair) if one <= node_devices), default=1)


def step_seconds(inputs: Inputs, workers: int) -> float:
    """t: how long a step takes."""
    compute = compute_seconds(inputs, inputs.largest_worker_batch)
    shorter, longer = sorted((compute, communication_seconds(inputs, workers)))
    together = longer * (1 + (shorter / longer) ** inputs.overlap) ** (1 / inputs.overlap)  # powers cannot overflow
    rate = inputs.input_samples_per_second
    return max(together, 0.0 if rate is None else inputs.worker_batch / rate)


def limit(inputs: Inputs, workers: int) -> str:
    """What would save the most time if it took none: noise, memory, link or input; compute where little would be saved.

    So a link that is slow, but not as slow as reading the samples, is not what limits.
    """
    without = {
        "memory": step_seconds(replace(inputs, largest_worker_batch=None), workers),
        "link": step_seconds(inputs, 1),
        "input": step_seconds(replace(inputs, input_samples_per_second=None), workers),
    }
    now = step_seconds(inputs, workers)
    factors = {"noise": workers / gain_of(inputs, workers)} | {name: now / seconds for name, seconds in without.items()}
    worst = max(factors, key=lambda name: factors[name])
    return worst if factors[worst] > WORTH_NAMING else "compute"


def ends(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The inputs at which time is shortest and longest, for the low and high end of every row's interval."""

    def end(critical: float | None, single: float, overlap: float, factor: float) -> Inputs:
        return replace(
            inputs,
            critical_batch=critical,
            single_steps=single,
            overlap=overlap,
            step_seconds=inputs.step_seconds * factor,
            sample_seconds=inputs.sample_seconds * factor,
        )

    spread = inputs.compute_spread
    low_critical = 0.0 if inputs.critical_low is None else inputs.critical_low
    shortest = end(inputs.critical_high, inputs.single_low, inputs.overlap_high, 1 - spread)
    longest = end(low_critical, inputs.single_high, inputs.overlap_low, 1 + spread)
    return (raced(shortest, GENTLE), raced(longest, BOLD)) if inputs.race_steps else (shortest, longest)


def raced(inputs: Inputs, intensity: Intensity) -> Inputs:
    """The inputs with as many samples of several workers as auto takes at some intensity."""
    return replace(
        inputs, race_samples=intensity.samples, race_growth=intensity.growth, race_least=intensity.least_steps
    )
