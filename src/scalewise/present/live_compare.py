"""A comparison while its runs are trained: a live table on a terminal, a line per run elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from scalewise.present.stored import Stored
from scalewise.present.stories.compare import has_several_counts, rows_table
from scalewise.present.stories.tune import trials_table
from scalewise.present.story import Table
from scalewise.present.terminal import console, table_view
from scalewise.present.words import count, listed, metric, number, percent, seconds, spelled
from scalewise.runs.compare.comparison import Metric, Remaining, RemedyRow, Tuned
from scalewise.runs.compare.jobs import Job, Message, Outcome, Progress
from scalewise.runs.compare.rows import Line, Skipped

SHOWN = 12  # trials in the live table: the newest


class _RunsView:
    """A live table on a terminal, a line per run elsewhere."""

    def __init__(self, quiet: bool, metric: Metric) -> None:
        self.console = console(quiet)
        self._metric, self._title = metric, ""
        self._live = self.console.is_terminal and not quiet
        self._lock = threading.Lock()  # the live table is drawn by a thread of its own
        self._running: dict[str, Progress] = {}

    def live(self) -> AbstractContextManager[object]:
        """The context in which the table is on the screen."""
        if not self._live:
            return nullcontext()
        return Live(get_renderable=self._screen, console=self.console, refresh_per_second=4, transient=True)

    def _screen(self) -> RenderableType:
        raise NotImplementedError

    def _drawn(self, table: Table | None, state: str, running: Sequence[Progress]) -> RenderableType:
        """The table, if there is one, and under it how far everything and every run is."""
        titles = [f"  {item.job.title} ({percent(item.step / max(item.steps, 1))})" for item in running]
        above: list[RenderableType] = [] if table is None else [table_view(table, self.console.width), Text("")]
        return Group(*above, Text(state, style="bold"), *(Text(title, style="dim") for title in titles))

    def _take(self, message: Message) -> None:
        self._running.pop(message.job.name, None)
        if isinstance(message, Progress):
            self._running[message.job.name] = message

    def _line(self, outcome: Outcome, part: str) -> str:
        """One line on a run that has ended, by its metric on a part of the data."""
        if outcome.result is None:
            assert outcome.failure is not None
            return f"{outcome.job.title}: {outcome.failure.reason}"
        name, result = self._metric.name, outcome.result
        amount = (result[part] or {}).get(name)
        shown = "no finite" if amount is None else metric(name, amount)
        taken = "already done" if outcome.stored else seconds(result["seconds"])
        return f"{outcome.job.title}: {part} {spelled(name)} {shown}, {count(result['steps'], 'step')}, {taken}"


class CompareView(_RunsView):
    """The table of a comparison while it fills."""

    def __init__(self, quiet: bool, metric: Metric, seeds: int, processes: int) -> None:
        super().__init__(quiet, metric)
        self._seeds, self._processes = seeds, processes
        self._rows: Sequence[RemedyRow] = ()
        self._remaining = Remaining((), processes)
        self._jobs, self._ended = 0, 0

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

    def show(self, message: Message, rows: Sequence[RemedyRow] | None) -> None:
        """Take in what a process said, and the table if it is a new one."""
        with self._lock:
            self._rows = self._rows if rows is None else rows
            self._remaining.observe(message)
            self._take(message)
            self._ended += isinstance(message, Outcome)
        if isinstance(message, Outcome) and not self._live:
            line = self._line(message, "validation" if message.job.trial else "test")
            self.console.print(f"{self._ended}/{self._jobs}  {line}", markup=False)

    def _screen(self) -> RenderableType:
        with self._lock:
            running = [*self._running.values()]
            left, rows = self._remaining.seconds(), [Stored(row.to_json()) for row in self._rows]
            state = f"{self._title}: {self._ended} of {self._jobs} runs"
        eta = "" if left is None else f", about {seconds(left)} left"
        several = has_several_counts(rows)
        table = rows_table(rows, self._metric.name, several, self._metric.higher_is_better, self._seeds)
        return self._drawn(table, state + eta, running)


class TuneView(_RunsView):
    """The newest trials of a search while it goes on."""

    def __init__(self, quiet: bool, metric: Metric, planned: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(quiet, metric)
        self._planned, self._clock = planned, clock  # samples of everything, about
        self._trials: Sequence[Stored] = ()
        self._began, self._trained, self._stored = clock(), 0, 0

    def introduce(self, optimizers: Sequence[str], jobs: int, budget: str, hold_out: bool) -> None:
        """What is searched, by which data, and within which budget."""
        where = "a tenth of the training data, held out" if hold_out else "the task's validation data"
        self.console.print(f"searching over {listed(optimizers)}; choosing by {where}", style="dim")
        extra = "one worker on the tuning seeds and the proof are extra"
        self.console.print(f"trials take at most {budget}; {extra}; {count(jobs, 'run')} at a time", style="dim")

    def begin(self, title: str, trials: Sequence[Stored]) -> None:
        """Start with some runs."""
        with self._lock:
            self._title, self._trials = title, trials
            self._running.clear()

    def show(self, message: Message, trials: Sequence[Stored]) -> None:
        """Take in what a process said."""
        result = (message.result if isinstance(message, Outcome) else None) or {}
        with self._lock:
            self._trials = trials
            self._take(message)
            if isinstance(message, Outcome) and message.stored:
                self._stored += result.get("samples", 0)
            else:
                self._trained += result.get("samples", 0)
        if isinstance(message, Outcome) and not self._live:
            line = self._line(message, "validation" if result.get("validation") else "test")
            self.console.print(f"{line}{self._left() if result else ''}", markup=False)

    def _left(self) -> str:
        """The time that is left, by the samples of the plan; a proof that fails adds to it."""
        rest = self._planned - self._stored - self._trained
        if not self._trained or rest <= 0:
            return ""
        return f"; about {seconds(rest * (self._clock() - self._began) / self._trained)} left"

    def _screen(self) -> RenderableType:
        with self._lock:
            running, trials = [*self._running.values()], self._trials[-SHOWN:]
            state = self._title + self._left()
        return self._drawn(trials_table(trials, self._metric.name) if trials else None, state, running)
