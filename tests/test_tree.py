from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalewise.engine.sums.flat import sum_rows
from scalewise.engine.sums.tree import fold_plan, share, split, whole_nodes


def summed(node: tuple[int, int], values: list[torch.Tensor]) -> torch.Tensor:
    """The tree's sum, straight from its definition."""
    if node[1] - node[0] == 1:
        return values[node[0]].clone()
    left, right = split(node)
    return summed(left, values) + summed(right, values)


def test_the_tree_of_eight_and_of_six():
    assert split((0, 8)) == ((0, 4), (4, 8))
    assert split((0, 6)) == ((0, 4), (4, 6))
    assert split((4, 6)) == ((4, 5), (5, 6))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.data())
def test_any_placement_gives_the_trees_bytes(workers, data):
    processes = data.draw(st.integers(1, workers))
    generator = torch.Generator().manual_seed(workers * 1000 + processes)
    values = [torch.randn(50, generator=generator) * 10.0 ** (worker % 5) for worker in range(workers)]
    nodes, sums = [], []
    for process in range(processes):
        held = share(process, processes, workers)
        plan = fold_plan([(worker, worker + 1) for worker in range(*held)], workers)
        assert list(plan.nodes) == whole_nodes(held, workers)
        buffers: dict[int, torch.Tensor] = {}
        for worker, step in zip(range(*held), plan.steps, strict=True):
            buffers[step.buffer] = buffers[step.buffer] + values[worker] if step.add else values[worker].clone()
            for target, source in step.merges:
                buffers[target] = buffers[target] + buffers[source]
        assert max(buffers) < plan.buffers
        nodes += plan.nodes
        sums += [buffers[number] for number in range(len(plan.nodes))]
    total = sum_rows([row.clone() for row in sums], fold_plan(nodes, workers))
    assert torch.equal(total, summed((0, workers), values))


def test_the_order_matters_so_the_test_above_can_fail():
    generator = torch.Generator().manual_seed(0)
    noisy = [torch.randn(200, generator=generator) for _ in range(8)]
    assert not torch.equal(sum(noisy[1:], noisy[0]), summed((0, 8), noisy))


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 8, 13])
def test_shares_are_even_and_complete(workers):
    for processes in range(1, workers + 1):
        shares = [share(process, processes, workers) for process in range(processes)]
        assert [worker for held in shares for worker in range(*held)] == list(range(workers))
        sizes = [stop - start for start, stop in shares]
        assert max(sizes) - min(sizes) <= 1


def test_few_buffers_are_needed():
    assert fold_plan([(worker, worker + 1) for worker in range(64)], 64).buffers <= 6
