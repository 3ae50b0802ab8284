"""How a comparison is drawn: the table, live and at the end, what it means, and error against global batch."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scalewise.present import live
from scalewise.present.terminal import console
from scalewise.present.words import number, seconds
from scalewise.recipe import Derived
from scalewise.runs.compare.comparison import Remaining, Tuned
from scalewise.runs.compare.jobs import Job, Message, Outcome, Progress
from scalewise.runs.compare.rows import Line, Skipped
from scalewise.runs.compare.table import Metric, Point, RemedyRow, has_several_counts
from scalewise.stats.seeds import Difference, Spread

MARKERS = "●○◆◇▲△■□"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white", "white")
LEGEND = "± standard deviation over seeds; against single: 95 % interval of the differences, paired by seed"
CHART_WIDTH, CHART_HEIGHT = 56, 9


def value(metric: Metric, amount: float) -> str:
    """A metric's value, without its unit."""
    if metric.is_share:
        return f"{100 * amount:.2f}"
    return number(amount) if abs(amount) < 1e6 else f"{amount:.2e}"


def signed(metric: Metric, amount: float) -> str:
    """A difference, with its sign.

    >>> signed(Metric("accuracy", True), -0.0439), signed(Metric("accuracy", True), -1e-9)
    ('−4.39', '0.00')
    """
    text = f"{100 * abs(amount):.2f}" if metric.is_share else f"{abs(amount):.3g}"
    return text if float(text) == 0 else f"{'−' if amount < 0 else '+'}{text}"


def spread_text(metric: Metric, found: Spread) -> str:
    """mean ± standard deviation over seeds.

    >>> spread_text(Metric("accuracy", True), Spread(0.975, 0.00314, []))
    '97.50 ± 0.31 %'
    """
    if found.mean is None:
        return "–"
    unit = " %" if metric.is_share else ""
    if found.std is None:
        return f"{value(metric, found.mean)}{unit}"
    deviation = f"{100 * found.std:.2f}" if metric.is_share else f"{found.std:.2g}"
    return f"{value(metric, found.mean)} ± {deviation}{unit}"


def verdict(metric: Metric, difference: Difference) -> str:
    """Better or worse than the reference where that exceeds seed noise, else nothing."""
    if not difference.beats_noise:
        return ""
    return "better" if (difference.mean > 0) == metric.higher_is_better else "worse"


def rows_table(rows: Sequence[RemedyRow], metric: Metric, width: int, seeds: int | None = None) -> Table:
    """The table of remedies.

    Arguments:
        rows, metric: what is shown.
        width: of the terminal; columns for which there is no room are left out.
        seeds: on the way there: how many seeds have ended of how many, instead of the differences from single.
    """
    columns = {
        "row": [f"[bold]{row.name}[/bold]" for row in rows],
        "workers": [str(row.workers) for row in rows],
        "global\nbatch": [f"{row.global_batch:,}" for row in rows],
        "peak\nLR": [_shown(row.lr) for row in rows],
        "steps": [_shown(row.steps) for row in rows],
        "samples": [_shown(row.samples) for row in rows],
        f"test\n{metric.name.replace('_', ' ')}": [_test(row, metric) for row in rows],
        "train": [spread_text(metric, Spread(row.train.mean, None, [])) for row in rows],
        "samples\na second": [_shown(row.samples_per_second) for row in rows],
        "against\nsingle": [_against(row, metric) for row in rows],
        "seeds\ndone": [f"{len(row.seeds) + len(row.failed)}/{seeds}" for row in rows],
    }
    del columns["seeds\ndone" if seeds is None else "against\nsingle"]
    if not has_several_counts(rows):
        del columns["workers"]
    for spare in ("samples", "train", "peak\nLR", "global\nbatch"):
        if _width(columns) > width:
            del columns[spare]
    return _table(columns)


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    """The columns that a table takes, two between its own."""
    cells = [
        [*heading.split("\n"), *(Text.from_markup(cell).plain for cell in body)] for heading, body in columns.items()
    ]
    return sum(max(cell_len(cell) for cell in column) + 2 for column in cells) - 2


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "row" else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _shown(amount: float | int | None) -> str:
    if amount is None:
        return "–"
    return f"{amount:,}" if isinstance(amount, int) else number(amount)


def _test(row: RemedyRow, metric: Metric) -> str:
    return "[red]diverged[/red]" if row.diverged else f"[bold]{spread_text(metric, row.test)}[/bold]"


def _against(row: RemedyRow, metric: Metric) -> str:
    if row.difference is None:
        return ""
    half = row.difference.high - row.difference.mean
    half_text = f"{100 * half:.2f}" if metric.is_share else f"{half:.2g}"
    text = f"{signed(metric, row.difference.mean)} ± {half_text}"
    word = verdict(metric, row.difference)
    colour = {"better": "green", "worse": "red", "": "dim"}[word]
    return f"[{colour}]{text}{f' {word}' if word else ''}[/{colour}]"


def sentences(rows: Sequence[RemedyRow], metric: Metric, seeds: int) -> Iterator[str]:
    """What the table says: which differences from single exceed seed noise, and what failed."""
    unit = "points of accuracy" if metric.is_share else metric.name.replace("_", " ")
    several = has_several_counts(rows)
    alike = []
    for row in rows:
        name = f"{row.name} with {row.workers} worker{'' if row.workers == 1 else 's'}" if several else row.name
        if row.difference is not None and several and not row.difference.beats_noise:
            alike.append(name)
        elif row.difference is not None:
            yield _sentence(name, metric, row.difference, unit)
        for seed, reason in row.failed:
            yield f"[bold]{name}[/bold] has no result with seed {seed}: {escape(reason)}"
    if alike:
        yield f"cannot be told from single: {', '.join(alike)}"
    if seeds < 2:
        yield "one seed says nothing about noise: give --seeds 2 or more"
    elif not any(row.name == "single" or (row.name == "naive" and row.workers == 1) for row in rows):
        yield "nothing to compare with: add single to --rows"


def derived_lines(rows: Sequence[RemedyRow]) -> Iterator[str]:
    """What auto chose and why, once for each number of workers."""
    for row in rows:
        if row.name == "auto":
            where = f"[dim]{row.workers} workers:[/dim] " if has_several_counts(rows) else ""
            for line in live.derived_lines(Derived(**value) for value in row.derived):
                yield f"{where}{line}"


def _sentence(name: str, metric: Metric, difference: Difference, unit: str) -> str:
    interval = f"95 %: {signed(metric, difference.low)} to {signed(metric, difference.high)}"
    amount = f"{signed(metric, difference.mean)} {unit}"
    word = verdict(metric, difference)
    if not word:
        return f"[bold]{name}[/bold] cannot be told from single ({amount}; {interval})"
    colour = "green" if word == "better" else "red"
    return f"[bold]{name}[/bold] is [{colour}]{word}[/{colour}] than single, beyond seed noise ({amount}; {interval})"


def introduction(lines: Sequence[Line], skipped: Sequence[Skipped], jobs: int, threads: int) -> Iterator[str]:
    """What every row does, what is left out and why, and how the runs share the machine."""
    said: set[str] = set()
    for line in lines:
        if line.name not in said:
            yield f"[bold]{line.name:<10}[/bold]  [dim]{escape(line.plan.what)}[/dim]"
        said.add(line.name)
    for row in skipped:
        yield f"[bold]{row.name:<10}[/bold]  [yellow]left out[/yellow] [dim]{escape(row.reason)}[/dim]"
    of = f"{threads} thread{'' if threads == 1 else 's'}"
    at_once = f"{jobs} run{'' if jobs == 1 else 's'} at a time"
    yield f"[dim]each run, also of single, is one process with {of}, its workers in turn; {at_once}[/dim]"


def tuning_lines(found: Sequence[Tuned], metric: Metric) -> Iterator[str]:
    """The learning rate that every row goes on with, and what was tried."""
    for row in found:
        tried = ", ".join(
            f"{'diverged' if trial.lr is None else number(trial.lr)}"
            + ("" if trial.validation is None else f" → {value(metric, trial.validation)}")
            for trial in row.trials
        )
        chosen = "its own" if row.lr is None else number(row.lr)
        yield f"[dim]tuned[/dim]  {row.line.name}, {row.line.workers} w: LR [bold]{chosen}[/bold]  [dim]{tried}[/dim]"


def chart(curve: Mapping[str, Sequence[Point]], metric: Metric) -> Text:
    """Error against global batch, one marker a row; the global batch on a logarithmic axis."""
    points = [point for found in curve.values() for point in found]
    batches = sorted({point.global_batch for point in points})
    low, high = min(point.error for point in points), max(point.error for point in points)
    cells = [[(" ", "")] * CHART_WIDTH for _ in range(CHART_HEIGHT)]
    for order, found in enumerate(curve.values()):
        for point in found:
            share = 0.5 if high == low else (point.error - low) / (high - low)
            mark = MARKERS[order % len(MARKERS)], COLOURS[order % len(COLOURS)]
            cells[round((1 - share) * (CHART_HEIGHT - 1))][_column(point.global_batch, batches)] = mark
    text = Text(f"test {'error' if metric.is_share else metric.name.replace('_', ' ')} against global batch\n")
    for height, line in enumerate(cells):
        at = high - (high - low) * height / (CHART_HEIGHT - 1)
        label = value(metric, at) if height in (0, CHART_HEIGHT // 2, CHART_HEIGHT - 1) else ""
        text.append(f"{label:>8} │ ")
        for character, colour in line:
            text.append(character, style=colour)
        text.append("\n")
    text.append(f"{' %' if metric.is_share else '':>8} └{'─' * (CHART_WIDTH + 2)}\n")
    text.append(" " * 11 + _axis(batches) + "\n")
    for order, name in enumerate(curve):
        space = " " * (11 if order == 0 else 3)
        text.append(f"{space}{MARKERS[order % len(MARKERS)]} {name}", style=COLOURS[order % len(COLOURS)])
    return text


def _column(global_batch: int, batches: Sequence[int]) -> int:
    first, last = math.log2(batches[0]), math.log2(batches[-1])
    share = 0.5 if first == last else (math.log2(global_batch) - first) / (last - first)
    return round(share * (CHART_WIDTH - 6)) + 2


def _axis(batches: Sequence[int]) -> str:
    """The global batches under their columns; those without room are left out."""
    line = ""
    for batch in batches:
        start = _column(batch, batches) - len(f"{batch:,}") // 2
        if start > len(line) or not line:
            line = line.ljust(max(start, 0)) + f"{batch:,}"
    return line


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
        name = self._metric.name
        part = "validation" if outcome.job.trial else "test"
        amount = (outcome.result[part] or {}).get(name)
        shown = (
            "no finite" if amount is None else f"{value(self._metric, amount)}{' %' if self._metric.is_share else ''}"
        )
        taken = "was there already" if outcome.stored else seconds(outcome.result["seconds"])
        return f"{head}{part} {name.replace('_', ' ')} {shown}, {outcome.result['steps']:,} steps, {taken}"

    def _screen(self) -> RenderableType:
        with self._lock:
            running = [*self._running.values()]
            left, rows = self._remaining.seconds(), self._rows
            state = f"{self._title}: {self._ended} of {self._jobs} runs"
        titles = [f"  {item.job.title} ({100 * item.step // max(item.steps, 1)} %)" for item in running]
        eta = "" if left is None else f", about {seconds(left)} left"
        table = rows_table(rows, self._metric, self.console.width, self._seeds)
        return Group(table, Text(""), Text(state + eta, style="bold"), *(Text(title, style="dim") for title in titles))
