"""FSDP2's reduce-scatter with the fixed tree over workers: the same bytes on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from scalewise.engine.flat import sum_rows
from scalewise.engine.tree import FoldPlan, fold_plan, share, whole_nodes


class OrderedScatter(ReduceScatter):
    """An all-to-all of shards for each round of workers, one of every process; the sum is there after the last round.

    Of each process's workers the shards are added up in their order as they come, so that only whole nodes of the tree
    are kept, and at last those nodes in theirs.
    """

    def __init__(self, processes: int, workers: int) -> None:
        shares = [share(process, processes, workers) for process in range(processes)]
        self._rounds = workers // processes
        self._plans = [fold_plan([(worker, worker + 1) for worker in range(*mine)], workers) for mine in shares]
        nodes = [node for mine in shares for node in whole_nodes(mine, workers)]
        self._last = fold_plan(nodes, workers)
        self._round = 0
        self._rows: list[list[Tensor]] = [[] for _ in range(processes)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Take one round of workers; `output_tensor` is the sum after the last one, and means nothing before."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for process, shard in enumerate(received.chunk(len(self._plans))):
            _fold(self._rows[process], shard, self._plans[process], self._round)
        self._round += 1
        if self._round == self._rounds:
            rows = [row for mine in self._rows for row in mine]
            output_tensor.copy_(sum_rows(rows, self._last))
            self._round, self._rows = 0, [[] for _ in self._plans]


def _fold(buffers: list[Tensor], leaf: Tensor, plan: FoldPlan, number: int) -> None:
    """Add leaf `number` to the buffers of one process; what is left in them are whole nodes."""
    step = plan.steps[number]
    if step.add:
        buffers[step.buffer].add_(leaf)
    else:
        buffers.append(leaf.clone() if len(plan.steps) > 1 else leaf)
    for target, source in step.merges:
        buffers[target].add_(buffers[source])
        del buffers[source]
