"""A question that several processes answer together: those of a torchrun job, or processes started for it.

Each process runs the question as a generator. It yields what it is doing now, and returns its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from scalewise.engine.placement import DeviceName
from scalewise.engine.processes.job import Job, Start
from scalewise.engine.processes.launch import taking_part
from scalewise.engine.processes.team import Team, takes_part
from scalewise.errors import UsageError
from scalewise.runs.request import Notify, silent
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin, Task

AnswerT = TypeVar("AnswerT")
Progress = Generator[str, None, AnswerT]
Question = Callable[..., Progress[AnswerT]]  # of a task and arguments that can be pickled


def answer(progress: Progress[AnswerT], notify: Notify) -> AnswerT:
    """The answer, computed on this process."""
    while True:
        try:
            notify(next(progress))
        except StopIteration as end:
            found: AnswerT = end.value
            return found


def ask(
    question: Question[AnswerT],
    task: Task,
    arguments: tuple[Any, ...],
    processes: int,
    threads: int,
    device: DeviceName,
    notify: Notify,
) -> AnswerT | None:
    """The first process's answer; None on the processes of a torchrun job that do not lead it.

    Outside of a torchrun job `processes` are started, each with `threads`; 1 is this process.
    """
    if takes_part():
        with taking_part(device) as team:
            found = answer(question(task, *arguments), notify if team.leads else silent)
            return found if team.leads else None
    if processes == 1:
        return answer(question(task, *arguments), notify)
    if task.origin is None:
        raise UsageError(
            "several processes need a task that each of them can load, got one that was built in Python; "
            "pass its file or load it with scalewise.load_task"
        )
    work = _Answering(question, task.origin, arguments)
    with Job[None, str | _Answered](Start(work, processes, threads, device)) as job:
        while not isinstance(said := job.ask(None)[0], _Answered):
            notify(said)
    return said.value


@dataclass(frozen=True)
class _Answered:
    value: Any


@dataclass(frozen=True)
class _Answering:
    """The work of the job: one request for every step of the generator."""

    question: Question[Any]
    origin: Origin
    arguments: tuple[Any, ...]

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[None], str | _Answered]]:
        task = load_task(self.origin.spec, self.origin.settings, self.origin.data)
        progress = self.question(task, *self.arguments)

        def advance(request: None) -> str | _Answered:
            try:
                return next(progress)
            except StopIteration as end:
                return _Answered(end.value if team.leads else None)

        yield advance
