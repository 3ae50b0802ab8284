"""A comparison: what many workers cost, and which remedy brings it back."""

from __future__ import annotations

from collections.abc import Sequence

from scalewise.present.bars import Spread, intervals
from scalewise.present.charts import LOOKS, Series, line_chart
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Cell, Fact, Section, Story, Table
from scalewise.present.words import SHARES, count, listed, metric, number, seconds, signed


def comparison_story(document: Stored) -> Story:
    """The story of one comparison."""
    rows = document.parts("rows")
    name = document.text("metric", "name") or "metric"
    workers = [value for value in document.numbers("workers") if value is not None]
    cost = f"How much do {listed([number(value) for value in workers])} workers cost on {document.text('task')}"
    several = len({row.number("workers") for row in rows if row.text("name") != "single"}) > 1
    sections = [
        rows_section(rows, name, several),
        curve_section(document, name) if several else None,
        learning_section(document, name),
        speed_section(rows) if several else None,
        reasons_section(rows),
    ]
    return Story(
        question=f"{cost}, and which remedy brings it back?",
        answer=verdict(rows, name, several, bool(document.flag("metric", "higher_is_better"))),
        facts=_facts(document, rows),
        sections=tuple(section for section in sections if section is not None),
    )


def _facts(document: Stored, rows: Sequence[Stored]) -> tuple[Fact, ...]:
    return (
        Fact("task", document.text("task")),
        Fact("rows", number(len(rows)), count(len(document.parts("seeds")), "seed") + " each"),
        Fact("time", seconds(document.number("seconds")), f"{count(document.number('jobs'), 'run')} at a time"),
    )


def verdict(rows: Sequence[Stored], name: str, several: bool, higher: bool) -> str:
    """Which rows are worse than one worker beyond seed noise, which better, and which cannot be told from it."""
    groups: dict[str, list[str]] = {"worse": [], "level": [], "better": []}
    for row in rows:
        mean = row.number("difference", "mean")
        if mean is None:
            continue
        side = "level" if not row.flag("beats_noise") else "better" if (mean > 0) == higher else "worse"
        label = title(row, several)
        groups[side].append(f"{label} ({difference(row, name)})" if side != "level" else label)
    said = []
    if groups["worse"]:
        said.append(f"Worse than one worker, beyond seed noise: {listed(groups['worse'])}.")
    if groups["better"]:
        said.append(f"Better: {listed(groups['better'])}.")
    if groups["level"]:
        said.append(f"Cannot be told from one worker: {listed(groups['level'])}.")
    return " ".join(said) or "There are not enough seeds yet to tell the rows apart."


def title(row: Stored, several: bool) -> str:
    """A row's name; with its workers where they are what the rows differ in."""
    return f"{row.text('name')} at {count(row.number('workers'), 'worker')}" if several else row.text("name")


def difference(row: Stored, name: str) -> str:
    """The mean difference to one worker, in points where it is a share."""
    mean = row.number("difference", "mean") or 0.0
    return signed(f"{100 * mean:+.2f} points" if name in SHARES else f"{mean:+.4g}")


def _ends(row: Stored, name: str) -> str:
    low, high = row.number("difference", "low"), row.number("difference", "high")
    if low is None or high is None:
        return "–"
    factor, digits = (100, ".2f") if name in SHARES else (1, ".4g")
    ends = signed(f"{factor * low:+{digits}} to {factor * high:+{digits}}")
    return f"{difference(row, name).removesuffix(' points')} ({ends})"


def rows_section(rows: Sequence[Stored], name: str, several: bool) -> Section | None:
    """The table, and the test metric of every row with its interval over seeds."""
    table = _table(rows, name)
    spreads = [_spread(order, row, name, several) for order, row in enumerate(rows)]
    reference = next((row.number("test", "mean") for row in rows if row.text("name") == "single"), None)
    label = name.replace("_", " ")
    axis = Axis(f"test {label}", share=name in SHARES)
    figure = intervals(f"Test {label} by row", axis, spreads, reference)
    if figure is None:
        return None
    lead = (
        "Large marks are means over seeds, bars one standard deviation each way, small dots the single runs; the "
        "dashed line is one worker. Against single: mean difference paired by seed, with its 95 % interval."
    )
    return Section("The remedies", (figure, table), lead)


def _spread(order: int, row: Stored, name: str, several: bool) -> Spread:
    mean, std = row.number("test", "mean"), row.number("test", "std")
    values = tuple(value for value in row.numbers("test", "values") if value is not None)
    low, high = (mean - std, mean + std) if mean is not None and std is not None else (None, None)
    note = "diverged" if row.flag("diverged") else metric(name, mean)
    return Spread(title(row, several), note, mean, low, high, values, order % LOOKS)


def _table(rows: Sequence[Stored], name: str) -> Table:
    label = name.replace("_", " ")
    columns = ("row", "workers", "global batch", "peak LR", "steps", "samples", f"test {label}", "±", "train")
    cells = tuple(_cells(row, name) for row in rows)
    against = "against single, in points" if name in SHARES else "against single"
    return Table((*columns, "samples/s", against), cells, "All rows")


def _cells(row: Stored, name: str) -> tuple[str | Cell, ...]:
    std = row.number("test", "std")
    spread = "–" if std is None else f"{100 * std:.2f}" if name in SHARES else f"{std:.3g}"
    failed = len(row.parts("failed"))
    against = Cell(f"{count(failed, 'run')} failed", "bad") if failed else _against(row, name)
    return (
        row.text("name"),
        number(row.number("workers")),
        number(row.number("global_batch")),
        number(row.number("lr")),
        number(row.number("steps")),
        number(row.number("samples")),
        metric(name, row.number("test", "mean")),
        spread,
        metric(name, row.number("train", "mean")),
        number(row.number("samples_per_second")),
        against,
    )


def _against(row: Stored, name: str) -> Cell:
    mean, noticed = row.number("difference", "mean"), row.flag("beats_noise")
    if mean is None:
        return Cell("–", "dim")
    good = (mean > 0) == (name in SHARES)
    return Cell(_ends(row, name), "plain" if not noticed else "good" if good else "bad")


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
    axis = Axis("test error" if share else name, share=share)
    figure = line_chart(
        "Error by global batch", Axis("global batch", log=True, ticks=tuple(sorted(batches))), axis, series
    )
    lead = "What the same samples give in ever larger global batches; bars are one standard deviation over seeds."
    return None if figure is None else Section("Error against global batch", (figure,), lead)


def learning_section(document: Stored, name: str) -> Section | None:
    """Every row's metric by epoch, averaged over seeds."""
    label, share = name.replace("_", " "), name in SHARES
    blocks: list[Block] = []
    for part, word in (("train", "Training"), ("validation", "Validation")):
        series = [_curve(one, part) for one in document.parts("curves")]
        figure = line_chart(f"{word} {label} by epoch", Axis("epoch"), Axis(label, share=share), series)
        if figure is not None:
            blocks.append(figure)
    return Section("Curves", tuple(blocks), "Means over seeds.") if blocks else None


def _curve(one: Stored, part: str) -> Series:
    pairs = zip(one.numbers("epoch"), one.numbers(part), strict=False)
    points = tuple((a, b) for a, b in pairs if a is not None and b is not None)
    return Series(f"{one.text('name')}, {count(one.number('workers'), 'worker')}", points)


def speed_section(rows: Sequence[Stored]) -> Section | None:
    """Samples a second by number of workers, all on the same machine."""
    names = dict.fromkeys(row.text("name") for row in rows)
    series = []
    for name in names:
        own = [(row.number("workers"), row.number("samples_per_second")) for row in rows if row.text("name") == name]
        series.append(Series(name, tuple((a, b) for a, b in own if a is not None and b is not None), kind="both"))
    counts = sorted({place for one in series for place, _ in one.points})
    axes = Axis("workers", log=True, ticks=tuple(counts)), Axis("samples a second", low=0.0)
    figure = line_chart("Speed by workers", *axes, series)
    return None if figure is None else Section("What the remedies cost in speed", (figure,))


def reasons_section(rows: Sequence[Stored]) -> Section | None:
    """What each row changes, and what was derived for it."""
    found = []
    for row in rows:
        derived = "; ".join(
            f"{d.text('field')} = {d.part('value').shown()}: {d.text('reason')}" for d in row.parts("derived")
        )
        found.append((title(row, several=True), row.text("what"), row.text("optimizer"), derived or "–"))
    table = Table(("row", "what it changes", "optimizer", "derived"), tuple(found), "The rows", frozenset({1, 2, 3}))
    return Section("What each row changes", (table,), folded=True) if found else None
