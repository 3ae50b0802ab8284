"""A process that tries worker batches under a limit on its memory, and notes how far it comes.

Run as `python -m scalewise.runs.measure.memory.trial FOLDER`, alone or by torchrun. FOLDER holds the job; notes go
there, one file per process, written whenever something is known: they tell what happened even of a process killed.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.memory import (
    be_killed_first,
    held,
    is_out_of_memory,
    limit_memory,
    release_freed,
    reset_peak,
)
from scalewise.engine.processes.team import joined
from scalewise.errors import LostContact, ScalewiseError, TaskError
from scalewise.records import write_atomically
from scalewise.runs.measure.memory import steps
from scalewise.runs.measure.memory.jobs import JOB, Job, Note
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin, Task

PARALLEL_ELEMENTS = 1 << 20


class _Notebook:
    """The notes of this process, in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self.note = path, Note()

    def write(self, **changes: Any) -> None:  # noqa: ANN401  (fields of the note)
        """Change the note and store it."""
        self.note = replace(self.note, **changes)
        write_atomically(self._path, json.dumps(asdict(self.note)))


def main(folder: Path) -> int:
    """Do the job; the exit code is 0 when all of it was done."""
    be_killed_first()
    book = _Notebook(folder / f"note-{os.environ.get('RANK', '0')}.json")
    try:
        _perform(pickle.loads((folder / JOB).read_bytes()), book)
    except BaseException as error:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # so that there is room to say so
        book.write(**_ending(error))
        return 1
    book.write(ended="done")
    return 0


def _ending(error: BaseException) -> dict[str, Any]:
    """What to note of an error: memory that was not there, or a failure in words."""
    if is_out_of_memory(error):
        return {"ended": "out of memory", "message": str(error)}
    if not isinstance(error, Exception):
        return {"ended": "failed", "message": f"stopped by {type(error).__name__}", "exit_code": 1}
    told = error if isinstance(error, ScalewiseError) else translated(error)
    lost = isinstance(told, LostContact)
    return {"ended": "failed", "message": str(told), "exit_code": told.exit_code, "lost_contact": lost}


def _perform(job: Job, book: _Notebook) -> None:
    book.write(baseline=held().own)
    limit_memory(job.allowed)  # loading the data counts too
    task = _load(job.task)
    with ExitStack() as stack:
        if job.processes > 1:
            stack.enter_context(joined("cpu"))
        _start_threads(job.recipe.threads or 1)
        release_freed()
        baseline = held().own
        book.write(baseline=baseline)
        if baseline >= job.allowed:
            raise MemoryError(f"{baseline} of {job.allowed} bytes are held before training")
        limit_memory(job.allowed)

        def peak(batch: int) -> int:
            release_freed()
            reset_peak()
            with steps.settled(job, task, batch) as training:
                return steps.settled_peak(training, lambda: _largest(held().highest - baseline, job.processes))

        if job.batch is None:
            smallest = steps.smallest_batch(task, job.recipe)
            book.write(smallest=smallest, parts=steps.count_parts(job, task, smallest))
            for points in steps.doubling(peak, smallest, job.most, job.allowed - baseline):
                book.write(points=points)
        else:
            book.write(points=[[job.batch, peak(job.batch)]])


def _load(source: Origin | bytes) -> Task:
    if isinstance(source, Origin):
        return load_task(source.spec, source.settings, source.data)
    try:
        task = pickle.loads(source)
    except (AttributeError, ImportError) as error:
        raise TaskError(
            f"a task must be loadable in another process to find what fits, got: {error}; put it into a file with a "
            f"function task() and load it with scalewise.load_task('file.py')"
        ) from None
    assert isinstance(task, Task)
    return task


def _start_threads(threads: int) -> None:
    """Have the computing threads there already: their stacks are asked for and hardly touched."""
    torch.set_num_threads(threads)
    torch.ones(PARALLEL_ELEMENTS).mul_(2.0)


def _largest(amount: int, processes: int) -> int:
    """The largest of all processes' amounts: they must go on alike."""
    if processes == 1:
        return amount
    found = torch.tensor([amount])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
