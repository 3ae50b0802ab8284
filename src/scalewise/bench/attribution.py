"""Where time goes when processes are added: from what each process waited for to shares of a step.

All processes end a step together. One that has computed its gradients waits until the slowest has (imbalance), and then
all wait for the exchange itself (communication). So what the process that waits least in a step waits is communication,
and what the others wait beyond that is imbalance. Communication hidden behind computing costs nothing and is not seen
here; the processor time that it takes from computing is, in the rest. On CUDA a process waits on its device, where this
clock does not see it: there all of it is in the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
    """Shares of a step's time that an ideal scaling would not have spent; with the efficiency they add up to 1.

    rest: slower computing, by processes that share cores, caches and memory, or by work that is not shared out.
    """

    communication_share: float
    imbalance_share: float
    input_share: float
    rest_share: float


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
    return Parts(
        *(
            statistics.median(getattr(one, name) for one in rounds)
            for name in ("step_seconds", "communication_seconds", "imbalance_seconds", "input_seconds")
        )
    )


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

    communication, imbalance, waiting, computing = (
        share(f"{name}_seconds") for name in ("communication", "imbalance", "input", "compute")
    )
    return Lost(communication, imbalance, waiting, computing)


def efficiency_rounds(rates: Mapping[int, Sequence[float]], processes: int, base: int) -> list[float]:
    """Efficiency round by round: samples per second and process, against the fewest processes in the same round.

    >>> efficiency_rounds({1: [100.0, 50.0], 2: [180.0, 90.0]}, 2, 1)
    [0.9, 0.9]
    """
    pairs = zip(rates[processes], rates[base], strict=True)
    return [mine / processes / (its / base) for mine, its in pairs]
