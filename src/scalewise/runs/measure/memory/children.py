"""Trials of worker batches in processes of their own, so that running out of memory ends those and nobody else."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scalewise.engine.placement import Placement
from scalewise.engine.processes.memory import LARGE_BLOCK, says_out_of_memory
from scalewise.errors import Failed, ProcessFailed, TaskError
from scalewise.recipe import Recipe
from scalewise.runs.measure.memory.jobs import JOB, Job, Note, notes_in
from scalewise.tasks.task import Origin, Task

OUT_OF_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
NEAR = 0.5  # a process that dies by one of these while it needs at least this part of its room died of memory
LAST_LINES = 10
JOB_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|SCALEWISE_(OUTCOME|LAUNCHER)|RANK$|WORLD_SIZE$)"
)

# Large blocks go back to the system when they are freed, as in training that has no room to keep them.
RETURNS_FREED = {"MALLOC_MMAP_THRESHOLD_": str(LARGE_BLOCK)}


class Children:
    """Tries worker batches, each in new processes: as many at the same time as are to train."""

    def __init__(
        self, task: Task, recipe: Recipe, placement: Placement, processes: int, allowed: int, most: int
    ) -> None:
        """Nothing is started before a trial.

        Arguments:
            task, recipe, placement, processes: as they are to be trained.
            allowed: bytes that each process may hold of its own.
            most: the most samples of interest.
        """
        here = replace(placement, device="cpu", loaders=0)
        self._job = Job(_source(task), recipe, here, processes, allowed, None, most)

    def run(self, batch: int | None, expected: float = 0.0) -> Note:
        """Try so many samples at once, or trace the growth; the worst of what the processes noted.

        It ended "done" or "out of memory"; anything else is raised.

        Arguments:
            batch: how many; None for a trace.
            expected: the peak above the baseline that is expected, to tell of what a process may have died.
        """
        with tempfile.TemporaryDirectory(prefix="scalewise-") as name:
            folder = Path(name)
            (folder / JOB).write_bytes(pickle.dumps(replace(self._job, batch=batch)))
            said = folder / "said"
            with said.open("wb") as file:
                code = _wait(self._command(folder), self._environment(), file.fileno())
            notes = notes_in(folder)
            return worst(notes, code, said.read_text(errors="replace"), expected, self._job)

    def _command(self, folder: Path) -> list[str]:
        module = ["-m", "scalewise.runs.measure.memory.trial", str(folder)]
        if self._job.processes == 1:
            return [sys.executable, *module]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self._job.processes)]
        return [sys.executable, *launcher, *module]

    def _environment(self) -> dict[str, str]:
        """This process's environment, without the job that it may be part of, and without gaps in memory.

        Where there is room the engine has malloc keep what a step frees, which is faster and takes up to twice the
        memory, now more, now less: there would be no largest worker batch to find.
        """
        kept = {name: value for name, value in os.environ.items() if not JOB_VARIABLES.match(name)}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return RETURNS_FREED | kept | {"OMP_NUM_THREADS": str(self._job.recipe.threads or 1), "PYTHONPATH": path}


def worst(notes: Mapping[int, Note], code: int, said: str, expected: float, job: Job) -> Note:
    """The note that speaks for all processes; a failure that was not for lack of memory is raised.

    Arguments:
        notes: by process; one that died early has none.
        code: the exit code of the process, or of its launcher.
        said: what the processes wrote to the terminal.
        expected: the peak above the baseline that was expected.
        job: what they were to do.
    """
    if len(notes) == job.processes and all(note.ended == "done" for note in notes.values()):
        return replace(notes[0], baseline=max(note.baseline for note in notes.values()))
    short = [note for note in notes.values() if note.ended == "out of memory"]
    if short:
        return short[0]
    failed = [note for note in notes.values() if note.ended == "failed"]
    for note in failed:
        if not note.lost_contact:
            raise Failed(note.message, note.exit_code)
    last = next((note for note in notes.values() if note.ended == "running"), Note())
    number = _signal(code, said)
    if _died_of_memory(number, said, max(expected, 2.0 * _last_peak(last)), job.allowed - last.baseline):
        return replace(last, ended="out of memory")
    how = f"was killed by {signal.Signals(number).name}" if number else f"ended with exit code {code}"
    raise ProcessFailed(f"the process that tries worker batches {how}{_last_lines(said)}")


def _wait(command: list[str], environment: dict[str, str], output: int) -> int:
    """The exit code of a command, which does not outlive this call."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _source(task: Task) -> Origin | bytes:
    if task.origin is not None:
        return task.origin
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TaskError(
            f"a task must be loadable in another process to find what fits, got one that cannot be passed on: {error}; "
            f"put it into a file with a function task() and load it with scalewise.load_task('file.py')"
        ) from None


def _signal(code: int, said: str) -> int:
    """The signal that ended the process, or one of them according to the launcher; 0 when none did."""
    if code < 0:
        return -code
    told = [int(number) for number in re.findall(r"Signal (\d+) \(SIG", said)]
    return next((number for number in told if number != signal.SIGTERM), 0)


def _died_of_memory(number: int, said: str, needed: float, room: int) -> bool:
    """Whether a process without a last word was short of memory.

    The kernel's killer sends SIGKILL, to it first of all. Libraries that do not check an allocation crash, which counts
    when they say so or were near the limit.
    """
    if number == signal.SIGKILL or says_out_of_memory(said):
        return True
    return number in OUT_OF_MEMORY_SIGNALS and needed >= NEAR * room


def _last_peak(note: Note) -> int:
    return note.points[-1][1] if note.points else 0


def _last_lines(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()][-LAST_LINES:]
    return "".join([", its last lines:", *(f"\n  {line}" for line in lines)]) if lines else ""
