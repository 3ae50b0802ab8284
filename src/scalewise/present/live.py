"""What is drawn while something is going on, on stderr: bars, the epochs' lines, what is being measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from scalewise.present.stored import Stored
from scalewise.present.terminal import console, show
from scalewise.present.words import metric, metrics, number, spelled
from scalewise.recipe import Derived, Search, Trial
from scalewise.records import Epoch, Record, Step
from scalewise.runs.request import Notice

EPOCH_LINES = 25
LINE_SECONDS = 2.0  # between lines, where there is no terminal


class StatusView:
    """What is being done now: on a terminal in one place, elsewhere a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self.console = console(quiet)
        self._status = self.console.status("measuring") if self.console.is_terminal and not quiet else None
        self._quiet_until = 0.0

    def live(self) -> AbstractContextManager[object]:
        """The context in which it is on the screen."""
        return self._status or nullcontext()

    def notify(self, line: str) -> None:
        """Show what is being done; a notice stays on the screen."""
        if isinstance(line, Notice):
            self.console.print(line, style="dim", markup=False)
        elif self._status is not None:
            self._status.update(escape(line))
        elif time.monotonic() >= self._quiet_until:
            self.console.print(line, style="dim", markup=False)
            self._quiet_until = time.monotonic() + LINE_SECONDS


@contextmanager
def downloading(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields what draws how far a file is, by its name, bytes done and in all: a bar on a terminal, else a line."""
    where = console(quiet)
    rows: dict[str, TaskID] = {}
    with Progress(
        TextColumn("downloading {task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=where,
        disable=quiet or not where.is_terminal,
    ) as bar:

        def show(name: str, done: int, total: int) -> None:
            if name not in rows:
                rows[name] = bar.add_task(name, total=total or None)
                if not where.is_terminal:
                    where.print(f"downloading {name} ({total / 1e6:,.1f} MB)", markup=False)
            bar.update(rows[name], completed=done)

        yield show


class TrainingView:
    """A progress bar on a terminal, a line per epoch, and the final table."""

    def __init__(self, quiet: bool, steps: int | None, total: float, done: float) -> None:
        """Nothing is drawn before `live`; `total` and `done` are the progress at the end and now."""
        self.console = console(quiet)
        self._of = "" if steps is None else f"/{steps:,}"
        self._bar = Progress(
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            transient=True,
        )
        self._shows_bar = self.console.is_terminal and not quiet
        self._row = self._bar.add_task("train", total=total, completed=int(done), step=f"0{self._of}", numbers="")
        self._has_header = False
        self._started: tuple[float, int] | None = None
        self._total, self._progress, self._next_line = total, done, 0.0
        self._input_seconds, self._steps = 0.0, 0

    def live(self) -> AbstractContextManager[object]:
        """The context in which the bar is on the screen."""
        return self._bar if self._shows_bar else nullcontext()

    def show(self, record: Record) -> None:
        """Draw one record."""
        if isinstance(record, Step):
            self._input_seconds += record.input_seconds
            self._steps += 1
            self._progress = record.progress
            if self._shows_bar:
                shown = f"{record.step:,}{self._of}"
                self._bar.update(self._row, completed=record.progress, step=shown, numbers=self._numbers(record))
        elif isinstance(record, Epoch):
            if not (record.best or self._is_due()):
                return
            if not self._has_header:
                self.console.print(epoch_header(record), no_wrap=True)
                self._has_header = True
            self.console.print(epoch_line(record), no_wrap=True)
        else:
            from scalewise.present.stories.train import result_story

            step_seconds = record.samples / max(record.steps, 1) / max(record.samples_per_second, 1e-9)
            input_share = self._input_seconds / max(self._steps * step_seconds, 1e-9)
            show(self.console, result_story(Stored(record.to_json()), input_share))

    def _is_due(self) -> bool:
        """Whether an epoch gets a line: no more than about EPOCH_LINES of them, evenly over the training."""
        due = self._progress >= min(self._next_line, self._total)
        if due:
            self._next_line = self._progress + 0.999 * self._total / EPOCH_LINES
        return due

    def _numbers(self, record: Step) -> str:
        if self._started is None:
            self._started = record.seconds, record.samples
        elapsed = record.seconds - self._started[0]
        speed = f"  {number((record.samples - self._started[1]) / elapsed)} samples/s" if elapsed > 0 else ""
        shown = metrics({"loss": record.loss, **record.metrics})
        return f"{shown}  LR {number(record.lr)}{speed}"


def derived_lines(derived: Iterable[Derived], search: Search | None = None) -> Iterator[str]:
    """The trials of auto's race, then each value that nobody gave, with its reason."""
    derived = [*derived]
    if search is not None and search.trials:
        yield from _race_lines(search.trials, {str(value.value) for value in derived if value.field == "optimizer"})
    for value in derived:
        shown = str(value.value) if isinstance(value.value, str | bool) else number(value.value)
        yield f"[dim]auto[/dim]  {value.field} = [bold]{shown}[/bold]  [dim]{escape(value.reason)}[/dim]"


def _race_lines(trials: Sequence[Trial], chosen: set[str]) -> Iterator[str]:
    """What was tried, and its loss on held-out data after as many steps as all have taken."""
    ended = [trial for trial in trials if trial.loss is not None]
    taken = [trial.steps if trial.halfway is None else trial.steps // 2 for trial in ended]
    steps = min(taken, default=trials[0].steps)
    losses = [trial.halfway[0] if trial.halfway is not None else trial.loss for trial in trials]
    kept = [
        (loss, place)
        for place, (trial, loss) in enumerate(zip(trials, losses, strict=True))
        if loss is not None and trial.name in chosen
    ]
    best = min(kept)[1] if kept else None
    yield f"[dim]race[/dim]  loss on held-out data after {steps} steps"
    for place, (trial, loss) in enumerate(zip(trials, losses, strict=True)):
        verdict = "diverged" if loss is None else "[green]chosen[/green]" if place == best else "dropped"
        shown = "" if loss is None else number(loss)
        yield f"[dim]race[/dim]  {trial.name:13} LR {number(trial.lr):8} {shown:8} {verdict}"


def epoch_header(record: Epoch) -> str:
    """The titles over the epochs' lines."""
    return "[dim]" + "  ".join(f"{title:>{_width(title)}}" for title, _ in _epoch_columns(record)) + "[/dim]"


def epoch_line(record: Epoch) -> str:
    """One line at the end of an epoch; its columns stand under those of `epoch_header`."""
    line = "  ".join(f"{value:>{_width(title)}}" for title, value in _epoch_columns(record))
    return f"{line}  [green]best[/green]" if record.best else line


def _epoch_columns(record: Epoch) -> list[tuple[str, str]]:
    """Titles and values."""
    columns = [("epoch", f"{record.epoch:.2f}"), ("step", f"{record.step:,}")]
    for part, values in (("train", record.train), ("validation", record.validation or {})):
        for name, value in values.items():
            title = spelled(name)
            columns.append((f"{part} {title}" if name == "loss" else title, metric(name, value)))
    return [*columns, ("samples/s", number(record.samples_per_second))]


def _width(title: str) -> int:
    return max(len(title), 7)
