"""How the workers' gradients become one sum: interchangeable siblings behind one protocol.

| name | who sums | who updates | exact |
|---|---|---|---|
| `Reduction` itself (flat.py) | the only process | it | yes |
| ordered | each process its shards, in tree order | every process, or each its shards | yes |
| allreduce | the backend, in its own order | every process | no |
| server | process 0, in tree order | process 0 | yes |
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.placement import Placement
from scalewise.engine.processes.team import Team, all_gather
from scalewise.engine.sums.flat import (
    CHUNK,
    Bucket,
    FlatLayout,
    Fold,
    Reduction,
    Scale,
    chunk_norms,
    sum_of_squares,
    sum_rows,
)
from scalewise.engine.sums.tree import own_plan, plan_of_all

SERVER = 0


def build(placement: Placement, layout: FlatLayout, team: Team, workers: int) -> tuple[Fold, Reduction]:
    """The fold of this process's workers and the reduction that continues from it."""
    fold = Fold(layout, own_plan(team.rank, team.size, workers))
    if team.size == 1:
        return fold, Reduction(layout, fold.buffers[0])
    if placement.reduce == "server":
        return fold, Server(layout, fold, team, workers)
    if placement.reduce == "allreduce":
        return fold, AllReduce(layout, fold)
    return fold, Ordered(layout, fold, team, workers, placement.shard_optimizer)


class Exchanged(Reduction):
    """A reduction that several processes take part in."""

    def __init__(self, layout: FlatLayout, total: Tensor) -> None:
        super().__init__(layout, total)
        self.buckets = layout.buckets()

    def _wait(self, works: Iterable[dist.Work | None]) -> None:
        """Wait for exchanges, and count the seconds that takes."""
        began = time.perf_counter()
        for work in works:
            if work is not None:
                work.wait()
        self.waited_seconds += time.perf_counter() - began


class Ordered(Exchanged):
    """The exact reduction: all-to-all of shards, the rest of the tree summed locally in order, all-gather.

    With the optimizer sharded, the last part is left out: each process updates the shards it has summed, and the
    parameters are gathered instead of the gradients. The bytes on the wire are those of a ring all-reduce when every
    process holds one whole node, as it does when the processes divide a power of two of workers.
    """

    def __init__(self, layout: FlatLayout, fold: Fold, team: Team, workers: int, sharded: bool) -> None:
        super().__init__(layout, layout.new())
        self.spreads = sharded
        if sharded:
            self.owned = [bucket.shard_range(team.rank) for bucket in self.buckets]
        self._layout, self._fold, self._team = layout, fold, team
        self._counts, self._plan = plan_of_all(team.size, workers)
        # Room for what the processes send in each round: their first nodes, their second nodes, …
        senders = [sum(count > number for count in self._counts) for number in range(max(self._counts))]
        self._received = {
            bucket: [self.sum.new_empty(count * bucket.shard) for count in senders] for bucket in self.buckets
        }
        self._works: dict[Bucket, list[dist.Work | None]] = {}

    def launch(self, bucket: Bucket) -> None:
        """Send each process its shard of every node held here."""
        self._works[bucket] = [self._exchange(bucket, number) for number in range(max(self._counts))]

    def _exchange(self, bucket: Bucket, number: int) -> dist.Work | None:
        has = number < self._counts[self._team.rank]
        mine = self._fold.buffers[number][bucket.start : bucket.stop] if has else self.sum[:0]
        outgoing = [bucket.shard if has else 0] * self._team.size
        incoming = [bucket.shard if count > number else 0 for count in self._counts]
        return dist.all_to_all_single(self._received[bucket][number], mine, incoming, outgoing, async_op=True)

    def finish(self, scale: Scale) -> None:
        """Sum the shards of each bucket in tree order; gather them unless each process keeps its own."""
        gathers = []
        for bucket in self.buckets:
            self._wait(self._works.pop(bucket))
            start, stop = bucket.shard_range(self._team.rank)
            rounds = [iter(space.split(bucket.shard)) for space in self._received[bucket]]
            in_worker_order = [next(rounds[number]) for count in self._counts for number in range(count)]
            shard = sum_rows(in_worker_order, self._plan)
            scale(shard, start)
            if self.spreads:
                self.sum[start:stop] = shard
            else:
                gathers.append(all_gather(self.sum[bucket.start : bucket.stop], shard))
        self._wait(gathers)

    def squared_norm(self) -> Tensor:
        """From the chunks of the sum; with a sharded optimizer each process brings the norms of its own."""
        if not self.spreads:
            return super().squared_norm()
        norms = self.sum.new_empty(self._layout.size // CHUNK)
        self._wait([self._gather_norms(bucket, norms) for bucket in self.buckets])
        return sum_of_squares(norms[: self._layout.parameters_stop // CHUNK])

    def _gather_norms(self, bucket: Bucket, norms: Tensor) -> dist.Work:
        start, stop = bucket.shard_range(self._team.rank)
        return all_gather(norms[bucket.start // CHUNK : bucket.stop // CHUNK], chunk_norms(self.sum[start:stop]))

    def complete(self, numbers: Tensor) -> None:
        """Fill in what other processes own: a sum in which all terms but one are 0 is exact in any order."""
        if self.spreads:
            dist.all_reduce(numbers)

    def publish(self, state: Tensor) -> None:
        """Gather the updated shards of the state."""
        shards = [state[slice(*bucket.shard_range(self._team.rank))].clone() for bucket in self.buckets]
        works = [
            all_gather(state[bucket.start : bucket.stop], shard)
            for bucket, shard in zip(self.buckets, shards, strict=True)
        ]
        self._wait(works)


class AllReduce(Exchanged):
    """The backend's own all-reduce of the local sums: close, not exact, and what other tools do."""

    def __init__(self, layout: FlatLayout, fold: Fold) -> None:
        super().__init__(layout, fold.buffers[0])
        self._others = fold.buffers[1 : len(fold.plan.nodes)]
        self._works: list[dist.Work | None] = []

    def launch(self, bucket: Bucket) -> None:
        """Add the local nodes and start the all-reduce."""
        mine = self.sum[bucket.start : bucket.stop]
        for other in self._others:
            mine.add_(other[bucket.start : bucket.stop])
        self._works.append(dist.all_reduce(mine, async_op=True))

    def finish(self, scale: Scale) -> None:
        """Wait and scale."""
        self._wait(self._works)
        self._works.clear()
        scale(self.sum, 0)


class Server(Exchanged):
    """The classic synchronous parameter server, exact: process 0 sums in tree order and updates the parameters."""

    spreads = True

    def __init__(self, layout: FlatLayout, fold: Fold, team: Team, workers: int) -> None:
        super().__init__(layout, layout.new())
        self._serves = team.rank == SERVER
        if not self._serves:
            self.owned = []
        self._own = fold.buffers[: len(fold.plan.nodes)]
        counts, self._plan = plan_of_all(team.size, workers)
        self._senders = [process for process, count in enumerate(counts) for _ in range(count) if process != SERVER]
        self._received = [layout.new() for _ in self._senders] if self._serves else []
        self._works: list[dist.Work | None] = []

    def launch(self, bucket: Bucket) -> None:
        """Send this process's nodes to the server; there, receive those of all."""
        stretch = slice(bucket.start, bucket.stop)
        if self._serves:
            pairs = zip(self._received, self._senders, strict=True)
            self._works += [dist.irecv(row[stretch], sender) for row, sender in pairs]
        else:
            self._works += [dist.isend(node[stretch], SERVER) for node in self._own]

    def finish(self, scale: Scale) -> None:
        """On the server: the sum of all nodes in tree order."""
        self._wait(self._works)
        self._works.clear()
        if self._serves:
            self.sum.copy_(sum_rows([*self._own, *self._received], self._plan))
            scale(self.sum, 0)

    def squared_norm(self) -> Tensor:
        """The server's, broadcast to all."""
        norm = super().squared_norm()
        self._wait([dist.broadcast(norm, SERVER, async_op=True)])
        return norm

    def publish(self, state: Tensor) -> None:
        """Send the parameters to each of the others: all of it leaves the server, as in the classic scheme."""
        others = range(1, dist.get_world_size())
        self._wait([dist.isend(state, other) for other in others] if self._serves else [dist.irecv(state, SERVER)])
