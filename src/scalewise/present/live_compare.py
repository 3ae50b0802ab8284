"""A comparison while its runs are trained: a live table on a terminal, a line per run elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from scalewise.present.stored import Stored
from scalewise.present.stories.compare import has_several_counts, rows_table
from scalewise.present.story import Table
from scalewise.present.terminal import console, table_view
from scalewise.present.words import count, metric, number, percent, seconds, spelled
from scalewise.runs.compare.comparison import Remaining, Tuned
from scalewise.runs.compare.jobs import Job, Message, Outcome, Progress
from scalewise.runs.compare.rows import Line, Skipped
from scalewise.runs.compare.table import Metric, RemedyRow


class CompareView:
    """A live table on a terminal, a line per run elsewhere."""

    def __init__(self, quiet: bool, metric: Metric, seeds: int, processes: int) -> None:
        self.console = console(quiet)
        self._metric, self._seeds, self._processes = metric, seeds, processes
        self._live = self.console.is_terminal and not quiet
        self._lock = threading.Lock()  # the live table is drawn by a thread of its own
        self._running: dict[str, Progress] = {}
        self._rows: Sequence[RemedyRow] = ()
        self._remaining = Remaining((), processes)
        self._jobs, self._ended, self._title = 0, 0, ""

    def introduce(self, lines: Sequence[Line], skipped: Sequence[Skipped], threads: int) -> None:
        """What every row does, what is left out and why, and how the runs share the machine."""
        for name, what in {line.name: line.plan.what for line in lines}.items():
            self.console.print(Text.assemble((f"{name:<10}  ", "bold"), (what, "dim")))
        for row in skipped:
            self.console.print(
                Text.assemble((f"{row.name:<10}  ", "bold"), ("left out ", "yellow"), (row.reason, "dim"))
            )
        at_once = f"{count(self._processes, 'run')} at a time"
        of = f"one process with {count(threads, 'thread')}"
        self.console.print(f"each run, also of single, is {of}, its workers in turn; {at_once}", style="dim")

    def tuned(self, found: Sequence[Tuned]) -> None:
        """The learning rate that every row continues with, and what was tried."""
        for row in found:
            tried = ", ".join(
                f"{'diverged' if trial.lr is None else number(trial.lr)}"
                + ("" if trial.validation is None else f" → {metric(self._metric.name, trial.validation)}")
                for trial in row.trials
            )
            head = f"{row.line.name} at {count(row.line.workers, 'worker')}: LR "
            chosen = "its own" if row.lr is None else number(row.lr)
            self.console.print(Text.assemble(("tuned  ", "dim"), head, (chosen, "bold"), (f"  {tried}", "dim")))

    def begin(self, title: str, jobs: Sequence[Job], rows: Sequence[RemedyRow]) -> None:
        """Start with some jobs."""
        with self._lock:
            self._title, self._jobs, self._ended = title, len(jobs), 0
            self._rows, self._remaining = rows, Remaining(jobs, self._processes)
            self._running.clear()

    def live(self) -> AbstractContextManager[object]:
        """The context in which the table is on the screen."""
        if not self._live:
            return nullcontext()
        return Live(get_renderable=self._screen, console=self.console, refresh_per_second=4, transient=True)

    def show(self, message: Message, rows: Sequence[RemedyRow] | None) -> None:
        """Take in what a process said, and the table if it is a new one."""
        with self._lock:
            self._rows = self._rows if rows is None else rows
            self._remaining.observe(message)
            self._running.pop(message.job.name, None)
            if isinstance(message, Progress):
                self._running[message.job.name] = message
            self._ended += isinstance(message, Outcome)
        if isinstance(message, Outcome) and not self._live:
            self.console.print(self._line(message), markup=False)

    def _line(self, outcome: Outcome) -> str:
        """One line on a run that has ended."""
        head = f"{self._ended}/{self._jobs}  {outcome.job.title}: "
        if outcome.result is None:
            assert outcome.failure is not None
            return head + outcome.failure.reason
        name, result = self._metric.name, outcome.result
        part = "validation" if outcome.job.trial else "test"
        amount = (result[part] or {}).get(name)
        shown = "no finite" if amount is None else metric(name, amount)
        taken = "already done" if outcome.stored else seconds(result["seconds"])
        return f"{head}{part} {spelled(name)} {shown}, {count(result['steps'], 'step')}, {taken}"

    def _screen(self) -> RenderableType:
        with self._lock:
            running = [*self._running.values()]
            left, rows = self._remaining.seconds(), self._rows
            state = f"{self._title}: {self._ended} of {self._jobs} runs"
        titles = [f"  {item.job.title} ({percent(item.step / max(item.steps, 1))})" for item in running]
        eta = "" if left is None else f", about {seconds(left)} left"
        table = table_view(self._table(rows), self.console.width)
        return Group(table, Text(""), Text(state + eta, style="bold"), *(Text(title, style="dim") for title in titles))

    def _table(self, rows: Sequence[RemedyRow]) -> Table:
        """The rows as far as they are, as the story of the comparison will have them."""
        stored = [Stored(row.to_json()) for row in rows]
        several = has_several_counts(stored)
        return rows_table(stored, self._metric.name, several, self._metric.higher_is_better, self._seeds)
