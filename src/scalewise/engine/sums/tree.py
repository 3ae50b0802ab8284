"""One fixed binary tree over worker numbers, in which every sum over workers is taken.

A node is a range [start, stop) of workers; it splits at start + the largest power of two below its size. The tree
depends on the number of workers alone, so whoever adds up a node gets the same bytes. A process adds the nodes it
holds whole; the rest of the tree is added up from those, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Node = tuple[int, int]


def split(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two workers.

    >>> split((0, 6))
    ((0, 4), (4, 6))
    """
    start, stop = node
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


def share(process: int, processes: int, workers: int) -> Node:
    """The workers of one process: contiguous, and no process has more than one worker more than another.

    >>> [share(process, 4, 6) for process in range(4)]
    [(0, 1), (1, 3), (3, 4), (4, 6)]
    """
    return process * workers // processes, (process + 1) * workers // processes


def workers_of(process: int, processes: int, workers: int) -> str:
    """The workers of one process in words.

    >>> workers_of(0, 4, 6), workers_of(1, 4, 6)
    ('worker 0', 'workers 1 to 2')
    """
    first, stop = share(process, processes, workers)
    return f"worker {first}" if stop - first == 1 else f"workers {first} to {stop - 1}"


def whole_nodes(held: Node, workers: int) -> list[Node]:
    """The largest nodes of the tree that lie within `held`, in order.

    >>> whole_nodes((3, 8), 8)
    [(3, 4), (4, 8)]
    """

    def within(node: Node) -> list[Node]:
        if held[0] <= node[0] and node[1] <= held[1]:
            return [node]
        if node[1] <= held[0] or held[1] <= node[0]:
            return []
        left, right = split(node)
        return within(left) + within(right)

    return within((0, workers))


@dataclass(frozen=True)
class FoldStep:
    """What to do with the next leaf: put it into (or add it to) a buffer, then add buffers to buffers."""

    buffer: int
    add: bool
    merges: tuple[tuple[int, int], ...]  # (target, source)


@dataclass(frozen=True)
class FoldPlan:
    """How leaves that come one after another are summed, with as few buffers as possible."""

    steps: tuple[FoldStep, ...]
    buffers: int
    nodes: tuple[Node, ...]  # what is left, in order: node i is in buffer i


def fold_plan(leaves: Sequence[Node], workers: int) -> FoldPlan:
    """The plan for leaves (nodes, in order): siblings are added as soon as both exist.

    >>> fold_plan([(0, 1), (1, 2), (2, 3), (3, 4)], 4).steps[3]
    FoldStep(buffer=1, add=True, merges=((0, 1),))
    """
    stack: list[Node] = []
    steps = []
    most = 0
    for leaf in leaves:
        stack.append(leaf)
        fresh = True  # the newest leaf is still outside the buffers
        add = False
        merges = []
        while len(stack) >= 2 and _are_siblings(stack[-2], stack[-1], workers):
            right, left = stack.pop(), stack.pop()
            stack.append((left[0], right[1]))
            if fresh:
                add, fresh = True, False
            else:
                merges.append((len(stack) - 1, len(stack)))
        steps.append(FoldStep(len(stack) - 1 + len(merges), add, tuple(merges)))
        most = max(most, len(stack) + len(merges))
    return FoldPlan(tuple(steps), most, tuple(stack))


def _are_siblings(left: Node, right: Node, workers: int) -> bool:
    parent = left[0], right[1]
    return split(parent) == (left, right) and whole_nodes(parent, workers) == [parent]


def own_plan(process: int, processes: int, workers: int) -> FoldPlan:
    """The plan for the workers of one process."""
    return fold_plan([(worker, worker + 1) for worker in range(*share(process, processes, workers))], workers)


def plan_of_all(processes: int, workers: int) -> tuple[list[int], FoldPlan]:
    """How many whole nodes each process has, and the plan that sums the nodes of all of them.

    >>> plan_of_all(3, 4)[0]
    [1, 1, 1]
    """
    held = [whole_nodes(share(process, processes, workers), workers) for process in range(processes)]
    return [*map(len, held)], fold_plan([node for nodes in held for node in nodes], workers)
