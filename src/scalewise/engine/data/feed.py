"""The batches of this process's workers, in the order in which the steps need them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from scalewise.engine.data import loaders, streams
from scalewise.engine.data.loaders import Request
from scalewise.engine.data.samples import Augmented, Samples
from scalewise.recipe import Recipe
from scalewise.schedules import Cuts
from scalewise.tasks.task import Batch, Task

Place = tuple[int, int, int]  # (step, worker, micro batch)
AHEAD = 2


class Feed:
    """Batches of the training stream, on the device and in the layout of the recipe."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        samples: Samples,
        cuts: Cuts,
        device: torch.device,
        workers: range,
        loaders: int,
    ) -> None:
        """Nothing is loaded before the first batch is requested; `workers` are those of this process."""
        self.stream = streams.SampleStream(len(samples), recipe.seed)
        self.waited_seconds = 0.0
        self._samples = Augmented(samples, task.augment, recipe.seed) if task.augment is not None else samples
        self._recipe, self._cuts, self._device = recipe, cuts, device
        self._workers, self._loaders = workers, loaders
        self._batches: Iterator[Batch] = iter(())
        self._next: Iterator[Place] = iter(())

    def position(self, step: int, worker: int, micro: int = 0) -> int:
        """Where in the stream this micro batch begins."""
        of_worker = self._cuts.parts(step) * self._recipe.worker_batch
        return self._cuts.start(step) + worker * of_worker + micro * self._cuts.micro_batch

    def samples_of(self, step: int, worker: int) -> tuple[list[int], list[int]]:
        """The training samples of one worker in one step, and their epochs."""
        start = self.position(step, worker)
        indices, epochs = self.stream.take(start, start + self._cuts.parts(step) * self._recipe.worker_batch)
        return indices.tolist(), epochs.tolist()

    def batch(self, step: int, worker: int, micro: int) -> Batch:
        """One micro batch; the time until it arrives counts as waited."""
        began = time.perf_counter()
        if next(self._next, None) != (step, worker, micro):  # the first batch, or that after a resume
            self._open((step, worker, micro))
        batch = next(self._batches)
        self.waited_seconds += time.perf_counter() - began
        return self._placed(batch)  # no-op if it was copied ahead

    def close(self) -> None:
        """End the loader processes."""
        self._batches = iter(())

    def _open(self, start: Place) -> None:
        self._next = self._places(start)
        assert next(self._next) == start
        starts = (self.position(*place) for place in self._places(start))
        requests = (self.stream.take(first, first + self._cuts.micro_batch) for first in starts)
        batches = fetched(self._samples, requests, self._loaders, self._device)
        self._batches = batches if self._device.type == "cpu" else ahead(map(self._placed, batches))

    def _placed(self, batch: Batch) -> Batch:
        return placed(batch, self._device, self._recipe.layout)

    def _places(self, start: Place) -> Iterator[Place]:
        """From one micro batch of this process to its last one."""
        everything = (
            (step, worker, micro)
            for step in range(start[0], self._cuts.total_steps)
            for worker in self._workers
            for micro in range(self._cuts.micro_batches(step))
        )
        return (place for place in everything if place >= start)


def fetched(samples: Samples, requests: Iterable[Request], loader_count: int, device: torch.device) -> Iterator[Batch]:
    """The requested batches: from memory, from loader processes, or from this process without any."""
    if samples.in_memory or loader_count == 0:
        return (samples.fetch(*request) for request in requests)
    return ahead(loaders.load(samples, requests, loader_count, pin_memory=device.type == "cuda"))


def ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, taken by a thread while the step computes.

    It hides waiting: for a loader process to hand a batch over, or for a copy to an accelerator. Copies
    of data in memory take as much time from a CPU's step as the thread saves (measured: docs/log.md).
    """
    end = object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, batches, end) for _ in range(AHEAD))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, batches, end))
            yield batch


def placed(batch: Batch, device: torch.device, layout: str) -> Batch:
    """A batch on the device, images in the recipe's memory layout."""

    def move(leaf: Tensor) -> Tensor:
        if layout == "channels_last" and leaf.ndim == 4:
            return leaf.to(device, non_blocking=True, memory_format=torch.channels_last)
        return leaf.to(device, non_blocking=True)

    if isinstance(batch, tuple) and all(isinstance(part, Tensor) for part in batch):
        return tuple(map(move, batch))  # the usual case, without walking a tree
    return tree_map(move, batch)
