"""A search: the recipe with the fewest steps that is as good as one worker, its proof, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalewise.present.charts import Axis, Mark, Series, Spread, intervals, line_chart
from scalewise.present.stored import Stored, number_of, text_of
from scalewise.present.story import Cell, Columns, Command, Fact, Section, Story, Table, Tone, kept, table_of
from scalewise.present.words import count, difference, metric, number, rough, seconds, span, spelled, spread, times
from scalewise.records import SHARES

TONES: dict[str, Tone] = {
    "proved": "good",
    "as good": "good",
    "not confirmed": "dim",
    "worse": "plain",
    "not proved": "bad",
    "diverged": "bad",
}
GOOD = ("proved", "as good")
SPARE = ("decay", "β₂", "warm-up", "schedule", "seeds", "momentum, β₁")
LEGEND = "one worker with that optimizer: two runs, on validation data; against one worker: mean and 95 % interval"
SHOWN_MARGINS = 20  # behind one worker: what is farther behind would flatten the chart of rates
BETAS = ("adam", "adamw", "lamb")  # without momentum
ADAMS = (*BETAS, "muon")


def tuning_story(document: Stored) -> Story:
    """The story of one search."""
    rows, name = document.parts("rows"), document.text("metric", "name") or "metric"
    commands = tuple(Command(row.text("command")) for row in rows if row.text("command"))
    counts = ", ".join(number(row.number("workers")) for row in rows)
    return Story(
        question=f"In how few steps do {counts} workers learn {document.text('task')} as well as one?",
        answer=" ".join(answer(row, name, len(rows) > 1) for row in rows) or "The search has not begun.",
        facts=_facts(document, rows, name),
        sections=kept(
            result_section(rows, name),
            Section("Run it", commands) if commands else None,
            front_section(rows),
            rates_section(document, rows, name),
            *(trials_section(row, name, len(rows) > 1) for row in rows),
        ),
        notes=_notes(document, rows),
        tone="strong" if rows and all(row.flag("passed") for row in rows) else "warning",
    )


def answer(row: Stored, name: str, several: bool) -> str:
    """The steps, what of them is the optimizer's own, and how the test metric compares."""
    workers = f"{count(row.number('workers'), 'worker')}: " if several else ""
    steps, single = row.number("steps"), row.number("single", "steps")
    if steps is None:
        return f"{workers}No recipe is proved yet."
    if not row.flag("passed"):
        what = f"the nearest took {number(steps)} steps and differed by {_against(row.part('not_inferior'), name)}"
        return f"{workers}No recipe was proved as good as one worker; {what}."
    fewer = f"{number(steps)} steps instead of {number(single)}, {rough(row.number('speedup_steps'))} times fewer"
    quality = f"test {spelled(name)} differs by {_against(row.part('not_inferior'), name)}"
    alone, own = row.number("same_optimizer", "steps"), ""
    if alone is not None and single:
        own = f" The optimizer alone takes one worker to {number(alone)} steps, {rough(single / alone)} times fewer."
    return f"{workers}{fewer}; {quality}: not inferior.{own}"


def _against(part: Stored, name: str) -> str:
    """The difference to one worker with its interval and unit."""
    return f"{_interval(part, name)}{' points' if name in SHARES else ''}"


def _interval(part: Stored, name: str) -> str:
    ends = span(part.number("low"), part.number("high"), lambda end: difference(name, end))
    return f"{difference(name, part.number('difference'))} ({ends})"


def _facts(document: Stored, rows: Sequence[Stored], name: str) -> tuple[Fact, ...]:
    single = rows[0].part("single") if rows else Stored()
    margin = document.number("margin")
    allowed = "half a point" if name in SHARES else f"1 %, {number(margin)}"
    where = "a tenth of the training data, held out" if document.flag("hold_out") else "the task's validation data"
    spent = {part: amount.number() or 0 for part, amount in document.part("spent").items()}
    extra = sum(amount for part, amount in spent.items() if part != "search")
    unit = single.number("samples") or 1
    return (
        Fact("task", document.text("task")),
        Fact("quality to reach", metric(name, single.number("validation", "mean")), f"one worker, {where}"),
        Fact("proof", count(document.number("seeds"), "fresh seed"), f"test data; may lose at most {allowed}"),
        Fact("search", times(spent.get("search", 0) / unit), f"one training; budget {document.text('budget')}"),
        Fact("beside it", times(extra / unit), "one worker on the tuning seeds, the proof, the optimizer alone"),
        Fact("time", seconds(document.number("seconds")), f"{count(document.number('jobs'), 'run')} at a time"),
    )


def result_section(rows: Sequence[Stored], name: str) -> Section | None:
    """One worker, one worker with the same optimizer, and the recipes that were found."""
    known = [row for row in rows if row.number("steps") is not None]
    if not known:
        return None
    single = known[0].part("single")
    steps = single.number("steps") or 1
    cells: list[tuple[str | Cell, ...]] = [
        (Cell("one worker", "strong"), number(steps), number(single.number("samples")), "", _test(single, name), "")
    ]
    for row in known:
        same = row.part("same_optimizer")
        if same.is_object:
            cells.append(_same_cells(same, single, steps))
        passed = row.flag("passed")
        title = f"{count(row.number('workers'), 'worker')}, {row.text('recipe', 'optimizer')}"
        against = Cell(_interval(row.part("not_inferior"), name), "good" if passed else "bad")
        numbers = number(row.number("steps")), number(row.number("samples")), times(row.number("speedup_steps"))
        cells.append((Cell(title, "strong"), *numbers, _test(row, name), against))
    points = ", in points" if name in SHARES else ""
    columns = ("", "steps", "samples", "fewer steps", f"test {spelled(name)}", f"against one worker{points}")
    legend = LEGEND if any(row.part("same_optimizer").is_object for row in known) else ""
    table = Table(columns, tuple(cells), "The result", spare=("samples", "fewer steps"), legend=legend)
    figure = intervals(f"Test {spelled(name)}", Axis(spelled(name), share=name in SHARES), _spreads(known, name), None)
    return Section("The result", kept(table, figure), "Bars are one standard deviation over fresh seeds.")


def _same_cells(same: Stored, single: Stored, steps: float) -> tuple[str | Cell, ...]:
    took, samples = same.number("steps"), single.number("samples")
    head = f"one worker, {same.text('optimizer')}"
    if took is None or samples is None:
        return head, f"more than {number(steps)}", "", "", "", ""
    return head, f"at most {number(took)}", number(samples * took / steps), times(steps / took), "", ""


def _test(row: Stored, name: str) -> str:
    return spread(name, row.number("test", "mean"), row.number("test", "std"))


def _spreads(rows: Sequence[Stored], name: str) -> list[Spread]:
    named = [("one worker", rows[0].part("single")), *((count(row.number("workers"), "worker"), row) for row in rows)]
    found = []
    for order, (title, row) in enumerate(named):
        mean, std = row.number("test", "mean"), row.number("test", "std") or 0.0
        values = tuple(value for value in row.numbers("test", "values") if value is not None)
        low, high = (None, None) if mean is None else (mean - std, mean + std)
        found.append(Spread(title, metric(name, mean), mean, low, high, values, order))
    return found


def front_section(rows: Sequence[Stored]) -> Section | None:
    """Steps against samples of everything that is as good as one worker."""
    if not rows:
        return None
    single = rows[0].part("single")
    start = [(single.number("samples"), single.number("steps"))]
    series = [Series("one worker", _known(start), kind="dots")]
    for row in rows:
        same = row.part("same_optimizer")
        steps, unit = same.number("steps"), single.number("steps")
        if steps and unit:
            at = _known([(steps / unit * (single.number("samples") or 0), steps)])
            series.append(Series(f"one worker, {same.text('optimizer')}", at, kind="dots"))
        good = [trial for trial in row.parts("trials") if trial.text("outcome") in GOOD]
        at = _known([(trial.number("samples"), trial.number("steps")) for trial in good])
        series.append(Series(f"{count(row.number('workers'), 'worker')}, as good", at, kind="dots"))
    front = _front([point for one in series for point in one.points])
    series.append(Series("front", front, kind="line"))
    axes = Axis("samples", log=True), Axis("steps", log=True)
    note = "Down is fewer steps, left is fewer samples; the front holds what nothing beats in both."
    figure = line_chart("Steps against samples at one worker's quality", *axes, series, note=note)
    return None if figure is None else Section("What equal quality costs", (figure,))


def _known(points: Sequence[tuple[float | None, float | None]]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((a, b) for a, b in points if a is not None and b is not None))


def _front(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points that no other one beats in samples and steps.

    >>> _front([(1.0, 9.0), (2.0, 3.0), (3.0, 4.0)])
    ((1.0, 9.0), (2.0, 3.0))
    """
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return tuple(found)


def rates_section(document: Stored, rows: Sequence[Stored], name: str) -> Section | None:
    """The validation metric against the learning rate, by optimizer."""
    figures = []
    for row in rows:
        by_name: dict[str, list[tuple[float | None, float | None]]] = {}
        least = -SHOWN_MARGINS * (document.number("margin") or math.inf)
        near = [trial for trial in row.parts("trials") if (trial.number("gain") or 0.0) >= least]
        for trial in near:
            by_name.setdefault(trial.text("optimizer"), []).append((trial.number("lr"), trial.number("validation")))
        left_out = len(row.parts("trials")) - len(near)
        note = f"{count(left_out, 'trial')} far behind {'is' if left_out == 1 else 'are'} left out." if left_out else ""
        series = [Series(one, _known(points), kind="both") for one, points in by_name.items() if _known(points)]
        target = row.number("single", "validation", "mean")
        marks = [] if target is None else [Mark("y", target, "one worker")]
        axes = Axis("peak learning rate", log=True), Axis(f"validation {spelled(name)}", share=name in SHARES)
        title = f"Validation {spelled(name)} by rate, {count(row.number('workers'), 'worker')}"
        figures.append(line_chart(title, *axes, series, marks, note))
    lead = "Trials differ in more than their rate: in steps, warm-up, momentum and decay."
    return Section("Rates", kept(*figures), lead) if kept(*figures) else None


def trials_section(row: Stored, name: str, several: bool) -> Section | None:
    """All trials of one number of workers."""
    trials = row.parts("trials")
    head = f"Trials, {count(row.number('workers'), 'worker')}" if several else "Trials"
    return Section(head, (trials_table(trials, name),)) if trials else None


def trials_table(trials: Sequence[Stored], name: str) -> Table:
    """What was tried, in order."""
    columns: Columns[Stored] = {
        "trial": number_of("number"),
        "optimizer": text_of("optimizer"),
        "peak LR": number_of("lr"),
        "warm-up": number_of("warmup_epochs", shown=rough),
        "schedule": text_of("schedule"),
        "momentum, β₁": lambda one: number(one.number("beta1" if one.text("optimizer") in BETAS else "momentum")),
        "β₂": lambda one: number(one.number("beta2")) if one.text("optimizer") in ADAMS else "",
        "decay": number_of("weight_decay", shown=rough),
        "steps": number_of("steps"),
        f"validation {spelled(name)}": lambda one: metric(name, one.number("validation")),
        "seeds": number_of("seeds"),
        "outcome": lambda one: Cell(one.text("outcome"), TONES.get(one.text("outcome"), "plain")),
    }
    words = ("optimizer", "schedule", "outcome")
    return table_of(
        trials, columns, "Trials", words, SPARE, legend="warm-up in epochs; validation: mean over the seeds"
    )


def _notes(document: Stored, rows: Sequence[Stored]) -> tuple[str, ...]:
    found = ["The search looks at validation data only; test data are those of the proof."]
    if document.text("budget").endswith("min"):
        found.append("The budget is a time: another machine, or another run, may try more or fewer recipes.")
    for row in rows:
        failed = [proof for proof in row.parts("proofs") if not proof.flag("passed")]
        if failed and row.flag("passed"):
            tried = f"{count(len(failed), 'recipe')} failed the proof before this one"
            found.append(f"{count(row.number('workers'), 'worker')}: {tried}; its interval does not allow for that.")
    return tuple(found)
