"""What every reduction does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.sums.flat import Bucket, FlatLayout, Fold, chunk_norms, sum_of_squares

Scale = Callable[[Tensor, int], None]  # (a stretch of the sum, where it begins in the flat vector)


class Reduction(Protocol):
    """From the nodes that each process has summed to one sum, and from updated parameters to everybody."""

    buckets: list[Bucket]
    sum: Tensor  # valid in `owned` after `finish`
    owned: list[tuple[int, int]]  # the parts of the flat vector that this process updates
    spreads: bool  # whether updated state must be published, because not every process updates everything
    waited_seconds: float  # how long this process has waited for others so far; on a CPU, where waiting blocks

    def launch(self, bucket: Bucket) -> None:
        """Start on a bucket in which this process's nodes are complete."""

    def finish(self, scale: Scale) -> None:
        """Wait for all buckets; `scale` turns each stretch of the sum into a mean, once."""

    def squared_norm(self) -> Tensor:
        """‖gradient‖² from the norms of the chunks in order, the same on every process."""

    def complete(self, numbers: Tensor) -> None:
        """Fill in the numbers that other owners have, where each number has one owner and is 0 elsewhere."""

    def publish(self, state: Tensor) -> None:
        """Bring the owners' parts of the flat `state` to every process."""


def wait_for(work: dist.Work) -> float:
    """Wait for an exchange; says how many seconds that took."""
    began = time.perf_counter()
    work.wait()
    return time.perf_counter() - began


class Alone:
    """Nothing to exchange."""

    def __init__(self, layout: FlatLayout, fold: Fold) -> None:
        self.buckets: list[Bucket] = []
        self.sum = fold.buffers[0]
        self.spreads = False
        self.owned = [(0, layout.size)]
        self.waited_seconds = 0.0
        self._parameters = self.sum[: layout.parameters_stop]

    def launch(self, bucket: Bucket) -> None:
        """Never called: there are no buckets."""

    def finish(self, scale: Scale) -> None:
        """Scale the sum."""
        scale(self.sum, 0)

    def squared_norm(self) -> Tensor:
        """From the chunks of the whole sum."""
        return sum_of_squares(chunk_norms(self._parameters))

    def complete(self, numbers: Tensor) -> None:
        """All are here."""

    def publish(self, state: Tensor) -> None:
        """Everybody is here already."""
