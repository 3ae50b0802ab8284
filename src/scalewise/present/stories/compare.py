"""A comparison: what many workers cost, and which remedy brings it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalewise.present.charts import LOOKS, Axis, Series, Spread, intervals, line_chart, series_of
from scalewise.present.stored import Stored, number_of
from scalewise.present.stories.train import DERIVED, derived_cells
from scalewise.present.story import Block, Cell, Columns, Fact, Plot, Section, Story, Table, Tone, kept, table_of
from scalewise.present.words import count, difference, listed, metric, number, seconds, span, spelled, spread
from scalewise.records import SHARES

TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "level": "dim"}
SPARE = ("global batch", "peak LR", "train", "samples")
LEGEND = "± standard deviation over seeds; against single: mean difference by seed and its 95 % interval"


def comparison_story(document: Stored) -> Story:
    """The story of one comparison."""
    rows = document.parts("rows")
    name = document.text("metric", "name") or "metric"
    workers = [value for value in document.numbers("workers") if value is not None]
    cost = f"How much do {listed([number(value) for value in workers])} workers cost on {document.text('task')}"
    several = has_several_counts(rows)
    higher = bool(document.flag("metric", "higher_is_better"))
    return Story(
        question=f"{cost}, and which remedy brings it back?",
        answer=answer(document, rows, name, several, higher),
        facts=(
            Fact("task", document.text("task")),
            Fact("rows", number(len(rows)), count(len(document.parts("seeds")), "seed") + " each"),
            Fact("time", seconds(document.number("seconds")), f"{count(document.number('jobs'), 'run')} at a time"),
        ),
        sections=kept(
            rows_section(rows, name, several, higher),
            curve_section(document, name) if several else None,
            learning_section(document, name),
            speed_section(rows) if several else None,
            derived_section(rows, several),
            changes_section(rows),
        ),
        notes=tuple(f"{row.text('name')} is left out: {row.text('reason')}" for row in document.parts("skipped")),
    )


def has_several_counts(rows: Sequence[Stored]) -> bool:
    """Whether the rows are over several numbers of workers."""
    return len({row.number("workers") for row in rows if row.text("name") != "single"}) > 1


def answer(document: Stored, rows: Sequence[Stored], name: str, several: bool, higher: bool) -> str:
    """Which rows are worse than one worker beyond seed noise, which better, and which cannot be told from it."""
    groups: dict[str, list[str]] = {"worse": [], "level": [], "better": []}
    for row in rows:
        side = verdict(row, higher)
        if side:
            points = f"{difference(name, row.number('difference', 'mean'))}{' points' if name in SHARES else ''}"
            groups[side].append(title(row, several) if side == "level" else f"{title(row, several)} ({points})")
    said = []
    if groups["worse"]:
        said.append(f"Worse than one worker, beyond seed noise: {listed(groups['worse'])}.")
    if groups["better"]:
        said.append(f"Better{'' if said else ' than one worker, beyond seed noise'}: {listed(groups['better'])}.")
    if groups["level"]:
        said.append(f"Cannot be told from one worker: {listed(groups['level'])}.")
    if said:
        return " ".join(said)
    if len(document.parts("seeds")) < 2:
        return "One seed says nothing about noise: give --seeds 2 or more."
    names = {row.text("name") for row in rows if row.text("name") != "naive" or row.number("workers") == 1}
    if not names & {"single", "naive"}:
        return "There is nothing to compare with: add single to --rows."
    return "There are not enough seeds yet to tell the rows apart."


def verdict(row: Stored, higher: bool) -> str:
    """Whether a row is better or worse than one worker beyond seed noise, or level; empty where nothing is known."""
    mean = row.number("difference", "mean")
    if mean is None:
        return ""
    return "level" if not row.flag("beats_noise") else "better" if (mean > 0) == higher else "worse"


def title(row: Stored, several: bool) -> str:
    """A row's name; with its workers where they are what the rows differ in."""
    return f"{row.text('name')} at {count(row.number('workers'), 'worker')}" if several else row.text("name")


def rows_section(rows: Sequence[Stored], name: str, several: bool, higher: bool) -> Section | None:
    """The table, the test metric of every row with its interval over seeds, and the runs without a result."""
    spreads = [_spread(order, row, name, several) for order, row in enumerate(rows)]
    reference = next((row.number("test", "mean") for row in rows if row.text("name") == "single"), None)
    axis = Axis(f"test {spelled(name)}", share=name in SHARES)
    figure = intervals(f"Test {spelled(name)} by row", axis, spreads, reference)
    failed = [
        Cell(f"{title(row, several)} has no result with seed {number(one.number('seed'))}: {one.text('reason')}", "bad")
        for row in rows
        for one in row.parts("failed")
    ]
    lead = (
        "Large marks are means over seeds, bars one standard deviation each way, small dots the single runs; the "
        "dashed line is one worker."
    )
    blocks: tuple[Block, ...] = kept(figure, rows_table(rows, name, several, higher), *failed)
    return Section("The remedies", blocks, lead) if rows else None


def _spread(order: int, row: Stored, name: str, several: bool) -> Spread:
    mean, std = row.number("test", "mean"), row.number("test", "std")
    values = tuple(value for value in row.numbers("test", "values") if value is not None)
    low, high = (mean - std, mean + std) if mean is not None and std is not None else (None, None)
    note = "diverged" if row.flag("diverged") else metric(name, mean)
    return Spread(title(row, several), note, mean, low, high, values, order % LOOKS)


def rows_table(rows: Sequence[Stored], name: str, several: bool, higher: bool, seeds: int | None = None) -> Table:
    """All rows; while they are trained, with how many of the `seeds` have ended instead of what they amount to."""
    compared = seeds is None and any(row.number("difference", "mean") is not None for row in rows)
    points = ", in points" if name in SHARES else ""
    columns: Columns[Stored] = {
        "row": lambda row: Cell(row.text("name"), "strong"),
        "workers": number_of("workers") if several else None,
        "global batch": number_of("global_batch"),
        "peak LR": number_of("lr"),
        "steps": number_of("steps"),
        "samples": number_of("samples"),
        f"test {spelled(name)}": lambda row: _test(row, name),
        "train": lambda row: metric(name, row.number("train", "mean")),
        "samples/s": number_of("samples_per_second"),
        f"against single{points}": (lambda row: _against(row, name, higher)) if compared else None,
        "seeds done": None
        if seeds is None
        else lambda row: f"{len(row.parts('seeds')) + len(row.parts('failed'))}/{seeds}",
    }
    return table_of(rows, columns, "All rows", spare=SPARE, legend=LEGEND if compared else "")


def _test(row: Stored, name: str) -> Cell:
    if row.flag("diverged"):
        return Cell("diverged", "bad")
    return Cell(spread(name, row.number("test", "mean"), row.number("test", "std")), "strong")


def _against(row: Stored, name: str, higher: bool) -> Cell:
    """The mean difference to one worker with its interval, in points where it is a share."""
    mean, low, high = (row.number("difference", end) for end in ("mean", "low", "high"))
    if mean is None:
        return Cell("")
    ends = span(low, high, lambda end: difference(name, end))
    return Cell(f"{difference(name, mean)} ({ends})", TONES[verdict(row, higher)])


def curve_section(document: Stored, name: str) -> Section | None:
    """The error against the global batch."""
    series, batches = [], set()
    for one in document.parts("curve"):
        points = [(p.number("global_batch"), p.number("error"), p.number("std")) for p in one.parts("points")]
        known = [(a, b, std) for a, b, std in points if a is not None and b is not None]
        batches |= {a for a, _, _ in known}
        band = tuple((a, b - std, b + std) for a, b, std in known if std is not None)
        series.append(Series(one.text("name"), tuple((a, b) for a, b, _ in known), band, "both"))
    share = name in SHARES
    error = "test error" if share else spelled(name)
    axes = Axis("global batch", log=True, ticks=tuple(sorted(batches))), Axis(error, share=share)
    plot = Plot(tuple((one.name, one.points) for one in series if one.points), share)
    note = "Bars are one standard deviation over seeds."
    figure = line_chart("Error by global batch", *axes, series, note=note)
    title = f"{error.capitalize()} against global batch"
    return None if figure is None else Section(title, (replace(figure, plot=plot),))


def learning_section(document: Stored, name: str) -> Section | None:
    """Every row's metric by epoch, averaged over seeds."""
    axes = Axis("epoch"), Axis(spelled(name), share=name in SHARES)
    rows = document.parts("curves")
    charts = [
        line_chart(f"{word} {spelled(name)} by epoch", *axes, [_curve(row, part) for row in rows])
        for part, word in (("train", "Training"), ("validation", "Validation"))
    ]
    figures = kept(*charts)
    return Section("Curves", figures, "Means over seeds.") if figures else None


def _curve(one: Stored, part: str) -> Series:
    pairs = zip(one.numbers("epoch"), one.numbers(part), strict=False)
    points = tuple((a, b) for a, b in pairs if a is not None and b is not None)
    return Series(f"{one.text('name')}, {count(one.number('workers'), 'worker')}", points)


def speed_section(rows: Sequence[Stored]) -> Section | None:
    """Samples a second by number of workers, all on the same machine."""
    by_name: dict[str, list[Stored]] = {}
    for row in rows:
        by_name.setdefault(row.text("name"), []).append(row)
    series = [series_of(name, own, "workers", ["samples_per_second"], kind="both") for name, own in by_name.items()]
    counts = sorted({place for one in series for place, _ in one.points})
    axes = Axis("workers", log=True, ticks=tuple(counts)), Axis("samples a second", low=0.0)
    figure = line_chart("Speed by workers", *axes, series)
    return None if figure is None else Section("What the remedies cost in speed", (figure,))


def derived_section(rows: Sequence[Stored], several: bool) -> Section | None:
    """What was chosen for a row that nobody gave, and why."""
    found = tuple((title(row, several), *cells) for row in rows for cells in derived_cells(row))
    table = Table(("row", *DERIVED), found, "Derived values", frozenset({1, 2, 3}))
    return Section("What was derived", (table,)) if found else None


def changes_section(rows: Sequence[Stored]) -> Section | None:
    """What each row changes."""
    found = tuple((title(row, several=True), row.text("what"), row.text("optimizer")) for row in rows)
    table = Table(("row", "what it changes", "optimizer"), found, "The rows", frozenset({1, 2}))
    return Section("What each row changes", (table,), folded=True) if found else None
