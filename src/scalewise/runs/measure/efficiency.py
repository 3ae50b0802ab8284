"""What more workers bring at a critical batch, beside one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scalewise.stats.critical_batch import CriticalBatch

WORKERS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Efficiency:
    """What a number of workers brings.

    Arguments:
        workers, global_batch: of which there is talk.
        worth, low, high: of a sample, as a share of one in very small global batches, with its 95 % interval; None
            where it is not known.
        steps, samples: needed to the same loss, as multiples of what one worker needs.
    """

    workers: int
    global_batch: int
    worth: float | None
    low: float | None
    high: float | None
    steps: float | None
    samples: float | None

    def to_json(self) -> dict[str, float | None]:
        """As it stands in `efficiency` of the document."""
        return asdict(self)


def efficiency(critical: CriticalBatch, worker_batch: int, workers: int) -> Efficiency:
    """What so many workers bring, each with this worker batch.

    >>> found = efficiency(CriticalBatch(900.0, 450.0, 1800.0, "sweep"), worker_batch=100, workers=9)
    >>> found.worth, round(found.steps, 3), found.samples
    (0.5, 0.2, 1.8)
    """
    global_batch = workers * worker_batch
    share, one = critical.efficiency(global_batch), critical.efficiency(worker_batch)
    samples = one.value / share.value if one.value and share.value else None
    steps = None if samples is None else samples / workers
    return Efficiency(workers, global_batch, share.value, share.low, share.high, steps, samples)


def counts(own: int, usual: Sequence[int] = WORKERS) -> list[int]:
    """The numbers of workers to look at: the usual ones, and one's own.

    >>> counts(own=6)
    [1, 2, 4, 6, 8, 16, 32]
    """
    return sorted({*usual, own})
