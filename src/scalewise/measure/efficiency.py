"""What more workers bring at a critical batch (McCandlish et al. 2018): S = S_min·(1 + B_crit ÷ B) steps to a given loss.

Samples are steps × B, so each sample is worth 1 ÷ (1 + B ÷ B_crit) of one in very small global batches: half at B_crit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

WORKERS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Efficiency:
    """What a number of workers brings.

    Arguments:
        workers, global_batch: of which there is talk.
        worth, low, high: of a sample, as a share of one in very small global batches, with its interval; `low` and
            `high` None where the critical batch is not bounded.
        steps, samples: needed to the same loss, as multiples of what one worker needs.
    """

    workers: int
    global_batch: int
    worth: float
    low: float | None
    high: float | None
    steps: float
    samples: float

    def to_json(self) -> dict[str, float | None]:
        """As it stands in `efficiency` of the document."""
        return asdict(self)


def worth(global_batch: float, critical_batch: float) -> float:
    """1 ÷ (1 + B ÷ B_crit).

    >>> worth(global_batch=900, critical_batch=900)
    0.5
    """
    return critical_batch / (critical_batch + global_batch)


def efficiency(
    worker_batch: int, workers: int, critical_batch: float, low: float | None, high: float | None
) -> Efficiency:
    """What so many workers bring, each with this worker batch."""
    global_batch = workers * worker_batch
    share = worth(global_batch, critical_batch)
    samples = worth(worker_batch, critical_batch) / share
    return Efficiency(
        workers,
        global_batch,
        share,
        None if low is None else worth(global_batch, low),
        None if high is None else worth(global_batch, high),
        samples / workers,
        samples,
    )


def counts(own: int, usual: Sequence[int] = WORKERS) -> list[int]:
    """The numbers of workers to look at: the usual ones, and one's own.

    >>> counts(own=6)
    [1, 2, 4, 6, 8, 16, 32]
    """
    return sorted({*usual, own})
