"""Trials of worker batches on a CUDA device, in this process: its allocator says when there is no room, and goes on."""

from __future__ import annotations

import gc

import torch

from scalewise.engine.processes.memory import is_out_of_memory
from scalewise.runs.measure.memory import steps
from scalewise.runs.measure.memory.jobs import Job, Note
from scalewise.tasks.task import Task


def free_on_device() -> int:
    """Bytes that are free on this process's device, with what this process has reserved but does not use."""
    _release()
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


class OnDevice:
    """Tries worker batches one after another on this process's device."""

    def __init__(self, task: Task, job: Job) -> None:
        self._task, self._job = task, job

    def run(self, batch: int | None, expected: float = 0.0) -> Note:
        """Try so many samples at once, or trace the growth of the peak; it ended "done" or "out of memory"."""
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._job.allowed / total))
        try:
            return self._run(batch)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def _run(self, batch: int | None) -> Note:
        _release()
        baseline = torch.cuda.memory_allocated()
        smallest, parts = 1, None
        points: list[list[int]] = []

        def peak(samples: int) -> int:
            _release()
            torch.cuda.reset_peak_memory_stats()
            with steps.settled(self._job, self._task, samples) as training:
                return steps.settled_peak(training, lambda: torch.cuda.max_memory_allocated() - baseline)

        ended = "done"
        try:
            if batch is not None:
                points = [[batch, peak(batch)]]
            else:
                smallest = steps.smallest_batch(self._task, self._job.recipe)
                parts = steps.count_parts(self._job, self._task, smallest)
                for points in steps.doubling(peak, smallest, self._job.most, self._job.allowed - baseline):  # noqa: B007
                    pass
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            ended = "out of memory"
        return Note(ended, baseline, points, smallest, parts)


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
