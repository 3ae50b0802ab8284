"""Trials of worker batches: in new processes under a memory limit, or on a CUDA device in this process.

On a CPU a process that runs out of memory dies, and nobody else with it. On CUDA the allocator says when there is no
room, and training can continue.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalewise.engine.placement import Placement
from scalewise.engine.processes.failures import translated
from scalewise.engine.processes.job import Start, run, temporary_folder
from scalewise.engine.processes.last_words import how_it_ended, last_lines
from scalewise.engine.processes.memory import (
    LARGE_BLOCK,
    be_killed_first,
    held,
    is_out_of_memory,
    limit_memory,
    release_freed,
    reset_peak,
    says_out_of_memory,
)
from scalewise.engine.processes.team import joined
from scalewise.errors import Failed, LostContact, ProcessFailed, ScalewiseError, TaskError
from scalewise.recipe import Recipe
from scalewise.records import write_atomically
from scalewise.runs.measure.memory import steps
from scalewise.runs.measure.memory.steps import Job, Note, Parts
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin, Task

PARALLEL_ELEMENTS = 1 << 20
OUT_OF_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
NEAR = 0.5  # a process that dies by one of these while it needs at least this part of its room died of memory

# Large blocks go back to the system when they are freed, as in training that has no room to keep them. Otherwise the
# engine has malloc keep what a step frees, which is faster and takes up to twice the memory, now more, now less: there
# would be no largest worker batch to find.
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BLOCK)}
JOB = "job.pickle"
ENTRY = "scalewise.runs.measure.memory.trials:try_batches"


class Children:
    """Tries worker batches, each in new processes: as many at the same time as are to train."""

    def __init__(
        self, task: Task, recipe: Recipe, placement: Placement, processes: int, allowed: int, most: int
    ) -> None:
        """Each process may hold `allowed` bytes of its own; `most` samples are of interest."""
        here = replace(placement, device="cpu", loaders=0)
        self._job = Job(_source(task), recipe, here, processes, allowed, None, most)
        self._start = Start(None, processes, recipe.threads or 1, entry=ENTRY, forks=False, variables=RETURNS_FREED)

    def run(self, batch: int | None, expected: float = 0.0) -> Note:
        """Try `batch` samples at once, or trace the growth; the worst of what the processes noted.

        It ended "done" or "out of memory"; anything else is raised.

        Arguments:
            batch: how many; None for a trace.
            expected: the peak above the baseline that is expected, to tell of what a process may have died.
        """
        with temporary_folder() as folder:
            (folder / JOB).write_bytes(pickle.dumps(replace(self._job, batch=batch)))
            code, said = run(self._start, folder)
            return worst(notes_in(folder), code, said, expected, self._job)


def worst(notes: Mapping[int, Note], code: int, said: str, expected: float, job: Job) -> Note:
    """The note that speaks for all processes; a failure that was not for lack of memory is raised.

    Arguments:
        notes: by process; one that died early has none.
        code: the exit code of the process, or of its launcher.
        said: what the processes wrote to the terminal.
        expected: the peak above the baseline that was expected.
    """
    if len(notes) == job.processes and all(note.ended == "done" for note in notes.values()):
        return replace(notes[0], baseline=max(note.baseline for note in notes.values()))
    short = [note for note in notes.values() if note.ended == "out of memory"]
    if short:
        return short[0]
    for note in notes.values():
        if note.ended == "failed" and not note.lost_contact:
            raise Failed(note.message, note.exit_code)
    last = next((note for note in notes.values() if note.ended == "running"), Note())
    last_peak = last.points[-1][1] if last.points else 0
    if _died_of_memory(-code, said, max(expected, 2.0 * last_peak), job.allowed - last.baseline):
        return replace(last, ended="out of memory")
    raise ProcessFailed(f"the process that tries worker batches {how_it_ended(code)}{last_lines(said)}")


def can_be_passed_on(task: Task) -> bool:
    """Whether another process can have the task: loaded by its name, or pickled, and nothing of it from a script."""
    try:
        source = _source(task)
    except TaskError:
        return False
    return isinstance(source, Origin) or b"__main__" not in source


def _source(task: Task) -> Origin | bytes:
    if task.origin is not None:
        return task.origin
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_loadable(f"one that cannot be pickled: {error}") from None


def _not_loadable(found: str) -> TaskError:
    return TaskError(
        f"a task must be loadable in another process to find what fits, got {found}; put it into a file with a "
        f"function task() and load it with scalewise.load_task('file.py')"
    )


def _died_of_memory(number: int, said: str, needed: float, room: int) -> bool:
    """Whether a process without a last word was short of memory.

    The kernel's killer sends SIGKILL, to it first of all. Libraries that do not check an allocation crash, which counts
    when they say so or were near the limit.
    """
    if number == signal.SIGKILL or says_out_of_memory(said):
        return True
    return number in OUT_OF_MEMORY_SIGNALS and needed >= NEAR * room


def notes_in(folder: Path) -> dict[int, Note]:
    """The notes by process."""
    found = {}
    for path in folder.glob("note-*.json"):
        fields = json.loads(path.read_text())
        parts = fields.pop("parts")
        found[int(path.stem.split("-")[1])] = Note(**fields, parts=Parts(**parts) if parts else None)
    return found


def try_batches(name: str) -> int:
    """Do the job of a folder, in a process of its own; the exit code is 0 when all of it was done.

    Notes go into that folder, one file per process, written whenever something is known: they say what happened even
    if this process is killed.
    """
    be_killed_first()
    folder = Path(name)
    note, file = Note(), folder / f"note-{os.environ.get('RANK', '0')}.json"

    def write(**changes: Any) -> None:  # noqa: ANN401  (fields of the note)
        nonlocal note
        note = replace(note, **changes)
        write_atomically(file, json.dumps(asdict(note)))

    try:
        _perform(pickle.loads((folder / JOB).read_bytes()), write)
    except BaseException as error:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # so that there is room to say so
        write(**_ending(error))
        return 1
    write(ended="done")
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


def _perform(job: Job, write: Callable[..., None]) -> None:
    """Do the job; `write` stores fields of the note."""
    write(baseline=held().own)
    limit_memory(job.allowed)  # loading the data counts too
    task = _load(job.task)
    with ExitStack() as stack:
        if job.processes > 1:
            stack.enter_context(joined("cpu"))
        torch.set_num_threads(job.recipe.threads or 1)
        torch.ones(PARALLEL_ELEMENTS).mul_(2.0)  # starts the threads, whose stacks are asked for and hardly touched
        release_freed()
        baseline = held().own
        write(baseline=baseline)
        if baseline >= job.allowed:
            raise MemoryError(f"{baseline} of {job.allowed} bytes are held before training")
        limit_memory(job.allowed)

        def peak(batch: int) -> int:
            release_freed()
            reset_peak()
            with steps.settled(job, task, batch) as training:
                return steps.settled_peak(training, lambda: _largest(held().highest - baseline, job.processes))

        steps.explore(job, task, peak, job.allowed - baseline, write)


def _load(source: Origin | bytes) -> Task:
    if isinstance(source, Origin):
        return load_task(source.spec, source.settings, source.data)
    try:
        task = pickle.loads(source)
    except (AttributeError, ImportError) as error:
        raise _not_loadable(str(error)) from None
    assert isinstance(task, Task)
    return task


def _largest(amount: int, processes: int) -> int:
    """The largest of all processes' amounts: all must continue alike."""
    if processes == 1:
        return amount
    found = torch.tensor([amount])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


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
        """Try `batch` samples at once, or trace the growth of the peak; it ended "done" or "out of memory"."""
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._job.allowed / total))
        _release()
        baseline = torch.cuda.memory_allocated()
        job, note = replace(self._job, batch=batch), Note("done", baseline)

        def write(**changes: Any) -> None:  # noqa: ANN401  (fields of the note)
            nonlocal note
            note = replace(note, **changes)

        def peak(samples: int) -> int:
            _release()
            torch.cuda.reset_peak_memory_stats()
            with steps.settled(job, self._task, samples) as training:
                return steps.settled_peak(training, lambda: torch.cuda.max_memory_allocated() - baseline)

        try:
            steps.explore(job, self._task, peak, job.allowed - baseline, write)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            write(ended="out of memory")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return note


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
