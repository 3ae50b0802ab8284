"""Norms of ranges of the flat vector, with the same bytes however it is spread over processes.

Every process takes the norms of the ranges that it holds whole. Of a range that is split between processes the elements
themselves are exchanged, so that every process takes the norm of all of it. A range is a chunk or less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from scalewise.engine.sums.flat import CHUNK, FlatLayout, Stretch, chunk_norms

Complete = Callable[[Tensor], None]  # fills in the numbers of other processes, which are 0 here
Range = tuple[int, int]


class RangeNorms:
    """The norm of every range, from the stretches that this process holds."""

    def __init__(
        self, layout: FlatLayout, ranges: Sequence[Range], stretches: Sequence[Stretch], complete: Complete
    ) -> None:
        """Nothing is computed yet; no range is longer than a chunk."""
        borders = sorted({*layout.cuts})
        ends = [(bisect_right(borders, low), bisect_left(borders, high)) for low, high in ranges]
        split = [number for number, (after_low, before_high) in enumerate(ends) if after_low < before_high]
        self._split = [(number, ranges[number][1] - ranges[number][0]) for number in split]
        firsts = [*accumulate((length for _, length in self._split), initial=0)]
        places = {number: len(ranges) + first for number, first in zip(split, firsts, strict=False)}
        self._parts = [_Part.of(stretch, ranges, places) for stretch in stretches]
        self._count, self._size, self._complete = len(ranges), len(ranges) + firsts[-1], complete
        self._dtype, self._device = layout.dtype, layout.device

    def __call__(self, vectors: Sequence[Sequence[Tensor]]) -> Tensor:
        """For each list of vectors, one per stretch, the norms of all ranges: (list, range)."""
        numbers = torch.zeros(len(vectors), self._size, dtype=self._dtype, device=self._device)
        for row, parts in zip(numbers, vectors, strict=True):
            for part, vector in zip(self._parts, parts, strict=True):
                part.fill(row, vector)
        self._complete(numbers)
        for row in numbers if self._split else ():
            elements = row[self._count :].split([length for _, length in self._split])
            norms = [  # as `_Part` takes them
                chunk_norms(part)[0] if len(part) == CHUNK else torch._foreach_norm([part])[0] for part in elements
            ]
            row[[number for number, _ in self._split]] = torch.stack(norms)
        return numbers[:, : self._count]


def chunk_ranges(layout: FlatLayout) -> list[Range]:
    """The chunks in which parameters lie."""
    return [(low, low + CHUNK) for low in range(0, layout.parameters_stop, CHUNK)]


@dataclass(frozen=True)
class _Part:
    """The ranges in one stretch: whole chunks, which one kernel takes together, shorter ones, and parts of split."""

    first: int  # where the first chunk begins
    rows: Tensor  # (range,) the numbers of the whole chunks, counted from there
    shorter: list[Range]
    numbers: Tensor  # (range,) the places of all of them among the norms
    split: list[tuple[int, int, int]]  # (where in the stretch, to, where among the numbers)

    @classmethod
    def of(cls, stretch: Stretch, ranges: Sequence[Range], split: dict[int, int]) -> _Part:
        start, size = stretch.start, stretch.weights.numel()
        lows, highs = [low for low, _ in ranges], [high for _, high in ranges]
        numbers = range(bisect_right(highs, start), bisect_left(lows, start + size))
        here = [(number, lows[number] - start, highs[number] - start) for number in numbers]
        first = -start % CHUNK
        mine = [one for one in here if one[0] not in split]
        whole = [(number, (low - first) // CHUNK) for number, low, high in mine if high - low == CHUNK]
        shorter = [(number, low, high) for number, low, high in mine if high - low < CHUNK]
        places = [number for number, _ in whole] + [number for number, _, _ in shorter]
        device = stretch.weights.device
        return cls(
            first,
            torch.tensor([row for _, row in whole], dtype=torch.long, device=device),
            [(low, high) for _, low, high in shorter],
            torch.tensor(places, dtype=torch.long, device=device),
            [
                (max(low, 0), min(high, size), split[number] + max(-low, 0))
                for number, low, high in here
                if number in split
            ],
        )

    def fill(self, numbers: Tensor, vector: Tensor) -> None:
        chunks = (len(vector) - self.first) // CHUNK
        found = [chunk_norms(vector[self.first :][: chunks * CHUNK])[self.rows]] if len(self.rows) else []
        if self.shorter:
            found.append(torch.stack(torch._foreach_norm([vector[low:high] for low, high in self.shorter])))
        if found:
            numbers[self.numbers] = torch.cat(found)
        for low, high, place in self.split:
            numbers[place : place + high - low] = vector[low:high]
