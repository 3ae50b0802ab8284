"""The classic synchronous parameter server: process 0 keeps the parameters, sums and updates; the rest compute."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.processes.team import Team
from scalewise.engine.sums.flat import Bucket, FlatLayout, Fold, chunk_norms, sum_of_squares, sum_rows
from scalewise.engine.sums.reductions.protocol import Scale, wait_for
from scalewise.engine.sums.tree import fold_plan, share, whole_nodes

SERVER = 0


class Server:
    """Gradients in, parameters out, tree order in between: exact."""

    def __init__(self, layout: FlatLayout, fold: Fold, team: Team, workers: int) -> None:
        self.buckets = layout.buckets()
        self.sum = layout.new()
        self._serves = team.rank == SERVER
        self.spreads = True
        self.owned = [(0, layout.size)] if self._serves else []
        self.waited_seconds = 0.0
        self._fold = fold
        self._parameters = self.sum[: layout.parameters_stop]
        held = [whole_nodes(share(process, team.size, workers), workers) for process in range(team.size)]
        self._plan = fold_plan([node for nodes in held for node in nodes], workers)
        self._senders = [process for process, nodes in enumerate(held) for _ in nodes]
        sent = [process for process in self._senders if process != SERVER]
        self._received = [layout.new() for _ in sent] if self._serves else []
        self._works: list[dist.Work] = []

    def launch(self, bucket: Bucket) -> None:
        """Send this process's nodes to the server; there, wait for everybody's."""
        stretch = slice(bucket.start, bucket.stop)
        if self._serves:
            senders = [process for process in self._senders if process != SERVER]
            works = [dist.irecv(row[stretch], src) for row, src in zip(self._received, senders, strict=True)]
        else:
            nodes = self._fold.buffers[: len(self._fold.plan.nodes)]
            works = [dist.isend(node[stretch], SERVER) for node in nodes]
        self._works += [work for work in works if work is not None]

    def finish(self, scale: Scale) -> None:
        """On the server: the sum of all nodes in tree order."""
        self.waited_seconds += sum(map(wait_for, self._works))
        self._works.clear()
        if self._serves:
            own = self._fold.buffers[: len(self._fold.plan.nodes)]
            self.sum.copy_(sum_rows([*own, *self._received], self._plan))
            scale(self.sum, 0)

    def squared_norm(self) -> Tensor:
        """The server's, told to everybody."""
        norm = sum_of_squares(chunk_norms(self._parameters))
        work = dist.broadcast(norm, SERVER, async_op=True)
        assert work is not None
        self.waited_seconds += wait_for(work)
        return norm

    def complete(self, numbers: Tensor) -> None:
        """The server has them all, and nobody else needs them."""

    def publish(self, state: Tensor) -> None:
        """Send the parameters to each of the others: all of it leaves the server, as in the classic scheme."""
        others = range(1, dist.get_world_size())
        works = [dist.isend(state, other) for other in others] if self._serves else [dist.irecv(state, SERVER)]
        self.waited_seconds += sum(wait_for(work) for work in works if work is not None)
