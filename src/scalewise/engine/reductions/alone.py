"""One process: the fold has already summed everything."""

from __future__ import annotations

from torch import Tensor

from scalewise.engine.flat import Bucket, FlatLayout, Fold, chunk_norms, sum_of_squares
from scalewise.engine.reductions.protocol import Scale


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
