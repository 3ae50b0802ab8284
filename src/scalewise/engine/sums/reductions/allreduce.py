"""The backend's own all-reduce: close, not exact, and what other tools do."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.sums.flat import Bucket, FlatLayout, Fold, chunk_norms, sum_of_squares
from scalewise.engine.sums.reductions.protocol import Scale, wait_for


class AllReduce:
    """Local nodes are added up, the rest is left to `torch.distributed.all_reduce`."""

    def __init__(self, layout: FlatLayout, fold: Fold) -> None:
        self.buckets = layout.buckets()
        self.sum = fold.buffers[0]
        self.spreads = False
        self.owned = [(0, layout.size)]
        self.waited_seconds = 0.0
        self._others = fold.buffers[1 : len(fold.plan.nodes)]
        self._parameters = self.sum[: layout.parameters_stop]
        self._works: list[dist.Work] = []

    def launch(self, bucket: Bucket) -> None:
        """Add the local nodes and start the all-reduce."""
        mine = self.sum[bucket.start : bucket.stop]
        for other in self._others:
            mine.add_(other[bucket.start : bucket.stop])
        work = dist.all_reduce(mine, async_op=True)
        assert work is not None
        self._works.append(work)

    def finish(self, scale: Scale) -> None:
        """Wait and scale."""
        self.waited_seconds += sum(map(wait_for, self._works))
        self._works.clear()
        scale(self.sum, 0)

    def squared_norm(self) -> Tensor:
        """From the chunks of the whole sum, which every process has."""
        return sum_of_squares(chunk_norms(self._parameters))

    def complete(self, numbers: Tensor) -> None:
        """Every process has them all."""

    def publish(self, state: Tensor) -> None:
        """Every process has updated everything."""
