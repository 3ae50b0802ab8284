"""A question that several processes answer together: processes started for it, or those of a torchrun job.

Each process runs the question as a generator. It yields what it is doing now, and returns its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from scalewise.engine.placement import DeviceName
from scalewise.engine.processes.job import Job, Start
from scalewise.engine.processes.team import Team
from scalewise.errors import UsageError
from scalewise.runs.request import Notify
from scalewise.tasks.task import Origin, Task

AnswerT = TypeVar("AnswerT")
AnswerOut = TypeVar("AnswerOut", covariant=True)
Progress = Generator[str, None, AnswerT]


class Question(Protocol[AnswerOut]):
    """Pickled into every process; there it begins to answer."""

    def __call__(self, team: Team) -> Progress[AnswerOut]:
        """Begin, as one process of the team."""


def answer(progress: Progress[AnswerT], notify: Notify) -> AnswerT:
    """The answer, computed on this process."""
    while True:
        try:
            notify(next(progress))
        except StopIteration as end:
            found: AnswerT = end.value
            return found


def ask(question: Question[AnswerT], processes: int, threads: int, device: DeviceName, notify: Notify) -> AnswerT:
    """The first process's answer, computed on N new processes of this machine."""
    with Job[None, str | _Answered](Start(_Answering(question), processes, threads, device)) as job:
        while True:
            said = job.ask(None)[0]
            if isinstance(said, _Answered):
                found: AnswerT = said.value
                return found
            notify(said)


def origin_of(task: Task) -> Origin:
    """Where new processes load a task from."""
    if task.origin is None:
        raise UsageError(
            "several processes need a task that each of them can load, got one that was built in Python; "
            "pass its file or load it with scalewise.load_task"
        )
    return task.origin


@dataclass(frozen=True)
class _Answered:
    value: Any


@dataclass(frozen=True)
class _Answering(Generic[AnswerT]):
    """The work of the job: one request for every step of the generator."""

    question: Question[AnswerT]

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[None], str | _Answered]]:
        progress = self.question(team)

        def advance(request: None) -> str | _Answered:
            try:
                return next(progress)
            except StopIteration as end:
                return _Answered(end.value if team.leads else None)

        yield advance
