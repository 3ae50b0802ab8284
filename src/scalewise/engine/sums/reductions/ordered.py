"""The exact reduction: all-to-all of shards, the rest of the tree summed locally in order, all-gather.

With the optimizer sharded, the last part is left out: each process updates the shards it has summed, and the
parameters are gathered instead of the gradients. The bytes on the wire are those of a ring all-reduce when every
process holds one whole node, as it does when the processes divide a power of two of workers.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from scalewise.engine.processes.team import Team, all_gather
from scalewise.engine.sums.flat import CHUNK, Bucket, FlatLayout, Fold, chunk_norms, sum_of_squares, sum_rows
from scalewise.engine.sums.reductions.protocol import Scale, wait_for
from scalewise.engine.sums.tree import fold_plan, share, whole_nodes


class Ordered:
    """The same bytes on any number of processes."""

    def __init__(self, layout: FlatLayout, fold: Fold, team: Team, workers: int, sharded: bool) -> None:
        self.buckets = layout.buckets()
        self.sum = layout.new()
        self.spreads = sharded
        self.owned = [bucket.shard_range(team.rank) for bucket in self.buckets] if sharded else [(0, layout.size)]
        self.waited_seconds = 0.0
        self._layout, self._fold, self._team = layout, fold, team
        held = [whole_nodes(share(process, team.size, workers), workers) for process in range(team.size)]
        self._counts = [len(nodes) for nodes in held]
        self._plan = fold_plan([node for nodes in held for node in nodes], workers)
        self._received = {bucket: self._space(bucket) for bucket in self.buckets}
        self._works: dict[Bucket, list[dist.Work]] = {}

    def _space(self, bucket: Bucket) -> list[Tensor]:
        """Room for what the processes send in each round: their first nodes, their second nodes, …"""
        rounds = range(max(self._counts))
        senders = [sum(count > number for count in self._counts) for number in rounds]
        return [self.sum.new_empty(count * bucket.shard) for count in senders]

    def launch(self, bucket: Bucket) -> None:
        """Send each process its shard of every node held here."""
        self._works[bucket] = [self._exchange(bucket, number) for number in range(max(self._counts))]

    def _exchange(self, bucket: Bucket, number: int) -> dist.Work:
        has = number < self._counts[self._team.rank]
        mine = self._fold.buffers[number][bucket.start : bucket.stop] if has else self.sum[:0]
        outgoing = [bucket.shard if has else 0] * self._team.size
        incoming = [bucket.shard if count > number else 0 for count in self._counts]
        work = dist.all_to_all_single(self._received[bucket][number], mine, incoming, outgoing, async_op=True)
        assert work is not None
        return work

    def finish(self, scale: Scale) -> None:
        """Sum the shards of each bucket in tree order; gather them unless each process keeps its own."""
        gathers = []
        for bucket in self.buckets:
            self.waited_seconds += sum(map(wait_for, self._works.pop(bucket)))
            start, stop = bucket.shard_range(self._team.rank)
            shard = sum_rows(self._in_worker_order(bucket), self._plan)
            scale(shard, start)
            if self.spreads:
                self.sum[start:stop] = shard
            else:
                gathers.append(all_gather(self.sum[bucket.start : bucket.stop], shard))
        self.waited_seconds += sum(map(wait_for, gathers))

    def _in_worker_order(self, bucket: Bucket) -> list[Tensor]:
        rounds = [iter(space.split(bucket.shard)) for space in self._received[bucket]]
        return [next(rounds[number]) for count in self._counts for number in range(count)]

    def squared_norm(self) -> Tensor:
        """From the chunks of the sum; with a sharded optimizer each process brings the norms of its own."""
        if not self.spreads:
            norms = chunk_norms(self.sum)
        else:
            norms = self.sum.new_empty(self._layout.size // CHUNK)
            works = [self._gather_norms(bucket, norms) for bucket in self.buckets]
            self.waited_seconds += sum(map(wait_for, works))
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
        self.waited_seconds += sum(map(wait_for, works))
