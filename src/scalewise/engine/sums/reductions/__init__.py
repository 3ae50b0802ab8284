"""How the workers' gradients become one sum: interchangeable siblings behind one protocol.

| name | who sums | who updates | exact |
|---|---|---|---|
| alone | the only process | it | yes |
| ordered | each process its shards, in tree order | every process, or each its shards | yes |
| allreduce | the backend, in its own order | every process | no |
| server | process 0, in tree order | process 0 | yes |
"""

from __future__ import annotations

from scalewise.engine.placement import Placement
from scalewise.engine.processes.team import Team
from scalewise.engine.sums.flat import FlatLayout, Fold
from scalewise.engine.sums.reductions.allreduce import AllReduce
from scalewise.engine.sums.reductions.ordered import Ordered
from scalewise.engine.sums.reductions.protocol import Alone, Reduction
from scalewise.engine.sums.reductions.server import Server
from scalewise.engine.sums.tree import fold_plan, share


def build(placement: Placement, layout: FlatLayout, team: Team, workers: int) -> tuple[Fold, Reduction]:
    """The fold of this process's workers and the reduction that goes on from it."""
    first, last = share(team.rank, team.size, workers)
    fold = Fold(layout, fold_plan([(worker, worker + 1) for worker in range(first, last)], workers))
    if team.size == 1:
        return fold, Alone(layout, fold)
    if placement.reduce == "server":
        return fold, Server(layout, fold, team, workers)
    if placement.reduce == "allreduce":
        return fold, AllReduce(layout, fold)
    return fold, Ordered(layout, fold, team, workers, placement.shard_optimizer)
