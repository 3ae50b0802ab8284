"""A measurement: how far a task can scale, what fits, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalewise.present.bars import Bar, bars
from scalewise.present.charts import Mark, Series, line_chart
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Fact, Figure, Key, Section, Story, Table
from scalewise.present.words import count, interval, number, percent, seconds, size

CURVE_POINTS = 60


def measurement_story(document: Stored) -> Story:
    """The story of one measurement."""
    sections = [
        noise_section(document),
        critical_section(document),
        efficiency_section(document),
        branch_section(document),
        throughput_section(document),
        memory_section(document),
        sharpness_section(document),
        between_section(document),
        how_section(document),
    ]
    return Story(
        question=f"How far can {document.text('task')} scale?",
        answer=answer(document),
        facts=_facts(document),
        sections=tuple(section for section in sections if section is not None),
    )


def answer(document: Stored) -> str:
    """Up to how many workers a sample keeps at least half its worth, and what stands in the way of more."""
    said = _workers_said(document)
    largest = document.number("largest_worker_batch")
    if largest is not None:
        said.append(f"The largest worker batch that fits is {number(largest)}.")
    missed = document.text("missed")
    return " ".join([*said, *([missed] if missed else [])]) or "Nothing was measured."


def _workers_said(document: Stored) -> list[str]:
    """How many workers the critical batch stands for; a lower bound of it stands for at least so many."""
    critical, batch = document.part("critical_batch"), document.number("worker_batch")
    value, low = critical.number("value"), critical.number("low")
    known = low if value is None else value
    if not known or not batch:
        return []
    bound = "at least " if value is None else ""
    most = int(known // batch)
    found = f"the critical batch by {critical.text('method')} is {bound}{number(known)}"
    half = f"Up to {bound}{most:,} workers of {number(batch)} each sample is worth at least half: {found}."
    hardly = f"Hardly beyond one worker of {number(batch)}: {found}."
    said = [half if most >= 2 or bound else hardly]
    own = next(
        (row for row in document.parts("efficiency") if row.number("workers") == document.number("workers")), None
    )
    worth = None if own is None else own.number("low" if bound else "worth")
    if worth is not None:
        said.append(f"At {count(document.number('workers'), 'worker')} it is worth {bound}{percent(worth)}.")
    return said


def _facts(document: Stored) -> tuple[Fact, ...]:
    found = []
    for name, key in (("noise scale", "noise_scale"), ("critical batch", "critical_batch")):
        part = document.part(key)
        if part.number("value") is not None:
            ends = f"95 %: {number(part.number('low'))} to {number(part.number('high'))}"
            found.append(Fact(name, f"{number(part.number('value'))} samples", ends))
        elif part.number("low"):
            found.append(Fact(name, f"at least {number(part.number('low'))} samples", "95 %"))
    if document.number("largest_worker_batch") is not None:
        by = document.text("memory", "limited_by")
        found.append(Fact("largest worker batch", number(document.number("largest_worker_batch")), f"limited by {by}"))
    if document.number("knee") is not None:
        found.append(Fact("best throughput from", number(document.number("knee")), "worker batch"))
    if document.number("mfu") is not None:
        found.append(Fact("of the device's best", percent(document.number("mfu"))))
    return tuple(found)


def noise_section(document: Stored) -> Section | None:
    """The noise scale at points of training, beside the critical batch."""
    points, band, rows = [], [], []
    for stage in document.parts("stages"):
        chosen = "preconditioned" if stage.part("preconditioned").is_object else "noise_scale"
        step, found = stage.number("step"), stage.part(chosen)
        value, low, high = (found.number(name) for name in ("value", "low", "high"))
        rows.append((stage.text("name"), number(step), interval(value, low, high), number(stage.number("samples"))))
        if step is not None and value is not None:
            points.append((step, value))
            if low is not None and high is not None:
                band.append((step, low, high))
    marks = [Mark("y", value, label) for label, value in _batches(document)]
    series = Series("noise scale", tuple(points), tuple(band), "both")
    axes = Axis("step of one worker"), Axis("samples", log=True)
    figure = line_chart("Noise scale over training", *axes, [series], marks)
    if figure is None:
        return None
    columns = ("point of training", "step", "noise scale (95 %)", "samples used")
    lead = "Its level says how large a global batch is worth it; bars are 95 % intervals."
    return Section("Noise scale over training", (figure, Table(columns, tuple(rows), "Noise scale")), lead)


def _batches(document: Stored) -> list[tuple[str, float]]:
    named = {
        "critical batch": document.number("critical_batch", "value"),
        "global batch": document.number("global_batch"),
    }
    return [(f"{name} {number(value)}", value) for name, value in named.items() if value is not None and value > 0]


def critical_section(document: Stored) -> Section | None:
    """Steps and samples to the same loss against the global batch: the two sides of a hyperbola."""
    critical = document.part("critical_batch")
    value, smallest = critical.number("value"), document.number("worker_batch")
    agreement = document.text("verified", "agreement")
    lines = [agreement[:1].upper() + agreement[1:] + "."] if agreement else []
    if value is None or not smallest or value <= 0 or smallest <= 0:
        return Section("The critical batch", tuple(lines)) if lines else None
    law = document.part("verified", "law")
    least = law.number("least_steps"), law.number("least_samples")
    if least[0] and least[1] and critical.text("method") == "sweep":
        blocks = _measured(document, value, least[0], least[1])
        target = number(document.number("verified", "target_loss"))
        lead = f"Steps and samples to a validation loss of {target}, and the law through them."
    else:
        blocks = _relative(critical, smallest)
        lead = (
            "By the law (S ÷ S_min − 1)(E ÷ E_min − 1) = 1 with this critical batch; areas are its 95 % interval. "
            "scalewise measure --verify sweep checks it by training."
        )
    return Section("Steps and samples against the global batch", (*blocks, *lines), lead) if blocks else None


def _places(low: float, high: float) -> list[float]:
    ratio = high / low
    return [low * ratio ** (index / (CURVE_POINTS - 1)) for index in range(CURVE_POINTS)]


def _relative(critical: Stored, smallest: float) -> list[Block]:
    """Multiples of the minima, with what the interval of the critical batch makes of them."""
    value = critical.number("value") or 1.0
    low, high = critical.number("low") or value, critical.number("high") or value
    places = _places(max(1.0, value / 32), value * 32)
    steps = Series(
        "steps ÷ least steps",
        tuple((batch, 1 + value / batch) for batch in places),
        tuple((batch, 1 + low / batch, 1 + high / batch) for batch in places),
    )
    samples = Series(
        "samples ÷ least samples",
        tuple((batch, 1 + batch / value) for batch in places),
        tuple((batch, 1 + batch / high, 1 + batch / low) for batch in places),
    )
    marks = [Mark("x", value, f"critical batch {number(value)}")]
    axes = Axis("global batch", log=True), Axis("times the least", log=True)
    first = line_chart("Steps and samples", *axes, [steps, samples], marks)
    return [one for one in (first, _hyperbola(value, smallest, places)) if one is not None]


def _hyperbola(critical: float, smallest: float, places: Sequence[float]) -> Figure | None:
    """Samples against steps to the same loss, with some numbers of workers on it."""
    counts = [one for one in (1, 2, 4, 8, 16, 32) if places[0] <= one * smallest <= places[-1]]
    line, dots = (
        tuple((1 + critical / batch, 1 + batch / critical) for batch in batches)
        for batches in (places, [one * smallest for one in counts])
    )
    named = Series(f"{', '.join(map(str, counts))} workers of {number(smallest)}, from the right", dots, kind="dots")
    axes = Axis("steps ÷ least steps", log=True), Axis("samples ÷ least samples", log=True)
    return line_chart("The hyperbola", *axes, [Series("the same loss", line), named])


def _measured(document: Stored, critical: float, least_steps: float, least_samples: float) -> list[Block]:
    """Medians over seeds at each global batch, and the fitted law."""
    rungs = [(rung.number("global_batch"), rung.number("median_steps")) for rung in document.parts("verified", "rungs")]
    seen = [(batch, steps) for batch, steps in rungs if batch and steps]
    if not seen:
        return []
    places = _places(min(batch for batch, _ in seen) / 1.5, max(batch for batch, _ in seen) * 1.5)
    law = [(b, least_steps * (1 + critical / b)) for b in places]
    marks = [Mark("x", critical, f"critical batch {number(critical)}")]
    axis = Axis("global batch", log=True, ticks=tuple(batch for batch, _ in seen))
    floor = Mark("y", least_steps, f"least steps {number(least_steps)}")
    steps = [Series("law", tuple(law)), Series("measured", tuple(seen), kind="dots")]
    first = line_chart("Steps to the loss", axis, Axis("steps", log=True), steps, [*marks, floor])
    samples = [
        Series("law", tuple((b, least_samples * (1 + b / critical)) for b in places)),
        Series("measured", tuple((b, b * s) for b, s in seen), kind="dots"),
    ]
    second = line_chart("Samples to the loss", axis, Axis("samples", log=True), samples, marks)
    pairs = [
        Series("law", tuple((s, b * s) for b, s in law)),
        Series("measured", tuple((s, b * s) for b, s in seen), kind="dots"),
    ]
    third = line_chart("The hyperbola", Axis("steps", log=True), Axis("samples", log=True), pairs)
    return [one for one in (first, second, third) if one is not None]


def efficiency_section(document: Stored) -> Section | None:
    """What more workers bring, beside ideal scaling."""
    rows = document.parts("efficiency")
    known = [(row, row.number("workers"), row.number("worth")) for row in rows]
    points = tuple((workers, worth) for _, workers, worth in known if workers and worth is not None)
    ends = [(row.number("workers"), row.number("low"), row.number("high")) for row in rows]
    band = tuple((a, low, high) for a, low, high in ends if a and low is not None and high is not None)
    steps = [(row.number("workers"), row.number("steps")) for row in rows]
    gained = tuple((a, 1 / s) for a, s in steps if a and s)
    ticks = tuple(workers for workers, _ in points)
    axis = Axis("workers", log=True, ticks=ticks)
    worth = line_chart(
        "Worth of a sample", axis, Axis("of one in a very small batch", share=True, low=0.0, high=1.0),
        [Series("worth", points, band, "both"), Series("ideal", tuple((a, 1.0) for a in ticks))],
        [Mark("y", 0.5, "half")],
    )  # fmt: skip
    fewer = line_chart(
        "Fewer steps", axis, Axis("times fewer steps", log=True),
        [Series("by the critical batch", gained, kind="both"), Series("ideal", tuple((a, a) for a in ticks))],
    )  # fmt: skip
    blocks: list[Block] = [one for one in (worth, fewer) if one is not None]
    if not blocks:
        return None
    cells = tuple(
        (
            number(row.number("workers")),
            number(row.number("global_batch")),
            interval(row.number("worth"), row.number("low"), row.number("high"), percent),
            _times(row.number("steps")),
            _times(row.number("samples")),
        )
        for row in rows
    )
    blocks.append(Table(("workers", "global batch", "worth of a sample", "steps", "samples"), cells, "More workers"))
    return Section("What more workers bring", tuple(blocks), "To the same loss, as multiples of what one worker needs.")


def _times(ratio: float | None) -> str:
    return number(None) if ratio is None else f"× {number(ratio)}"


def branch_section(document: Stored) -> Section | None:
    """The loss after branches with more and more workers."""
    series = []
    for stage in document.parts("verified", "stages"):
        pairs = [(loss.number("workers"), loss.number("loss")) for loss in stage.parts("losses")]
        points = tuple((a, b) for a, b in pairs if a and b is not None)
        series.append(Series(f"{stage.text('name')}, step {number(stage.number('step'))}", points, kind="both"))
    figure = line_chart("Loss after a branch", Axis("workers", log=True), Axis("loss"), series)
    lead = (
        "From a checkpoint, the same samples with more and more workers: where the loss rises, the batch is too large."
    )
    return None if figure is None else Section("Branches off checkpoints", (figure,), lead)


def throughput_section(document: Stored) -> Section | None:
    """Samples a second by worker batch."""
    series = []
    for name, key in (("training", "training"), ("inference", "inference")):
        rows = [
            [row.number(one) for one in ("worker_batch", "samples_per_second", "low", "high")]
            for row in document.parts(key)
        ]
        points = tuple((a, b) for a, b, _, _ in rows if a and b is not None)
        band = tuple((a, low, high) for a, _, low, high in rows if a and low is not None and high is not None)
        series.append(Series(name, points, band, "both"))
    knee = document.number("knee")
    marks = [Mark("x", knee, f"best from {number(knee)}")] if knee else []
    axes = Axis("worker batch", log=True), Axis("samples a second", log=True)
    figure = line_chart("Throughput of one worker", *axes, series, marks)
    where = f"{document.text('device')}, {count(document.number('threads'), 'thread')}; bars are the range over rounds."
    return None if figure is None else Section("How fast", (figure,), where)


def memory_section(document: Stored) -> Section | None:
    """The memory of a training step by part, beside the budget."""
    memory = document.part("memory")
    parts = [("before training", memory.number("baseline_bytes"))]
    parts += [(part.text("name"), part.number("bytes")) for part in memory.parts("parts")]
    known = [(name, amount) for name, amount in parts if amount is not None and amount >= 0]
    if len(known) < 2:
        return None
    starts = [math.fsum(amount for _, amount in known[:index]) for index in range(len(known))]
    total = starts[-1] + known[-1][1]
    pieces = tuple(
        (start / 1e6, amount / 1e6, order % 8)
        for order, (start, (_, amount)) in enumerate(zip(starts, known, strict=True))
    )
    peak, baseline = memory.number("measured_peak_bytes"), memory.number("baseline_bytes") or 0.0
    rows = [Bar("predicted", size(total), pieces)]
    if peak is not None:
        rows.append(Bar("measured", size(peak + baseline), ((0.0, (peak + baseline) / 1e6, 7),)))
    table = Table(("part", "bytes"), tuple((name, size(amount)) for name, amount in known), "Memory by part")
    keys = [Key(name, order % 8, "fill") for order, (name, _) in enumerate(known)]
    figure = bars("Memory by part", Axis("MB"), rows, table, keys)
    batch, budget = number(memory.number("largest_worker_batch")), size(memory.number("budget_bytes"))
    lead = f"At worker batch {batch}; the budget is {budget} ({memory.text('budget_source')})."
    if memory.number("loaders"):
        lead += (
            f" With --loaders 0: {count(memory.number('loaders'), 'loader process', 'loader processes')} come on top."
        )
    return None if figure is None else Section("Memory", (figure,), lead)


def how_section(document: Stored) -> Section | None:
    """How long each part of the measurement took."""
    rows = tuple((name, seconds(value.number())) for name, value in document.part("seconds").items())
    return Section("What it took", (Table(("part", "time"), rows, "Time by part"),), folded=True) if rows else None


def sharpness_section(document: Stored) -> Section | None:
    """How far the loss rises around each minimum."""
    rows = []
    for minimum in document.parts("sharpness"):
        for space in ("full", "subspace"):
            part = minimum.part(space)
            label = "all weights" if space == "full" else f"{number(part.number('subspace'))} random dimensions"
            for row in part.parts("rows"):
                values = (row.number("epsilon"), row.number("value"), row.number("largest_loss"), part.number("loss"))
                rows.append((minimum.text("run"), label, *map(number, values)))
    columns = ("run", "in", "ε", "sharpness (%)", "largest loss", "loss")
    table = Table(columns, tuple(rows), "Sharpness", frozenset({1}))
    return Section("How sharp the minimum is", (table,)) if rows else None


def between_section(document: Stored) -> Section | None:
    """The loss on the line through two runs' weights."""
    line = document.part("landscape", "line")
    series = []
    for part in ("train", "test"):
        pairs = [(row.number("alpha"), row.number(part, "loss")) for row in line.parts("rows")]
        series.append(Series(part, tuple((a, b) for a, b in pairs if a is not None and b is not None)))
    marks = [Mark("x", 0.0, "first run"), Mark("x", 1.0, "second run")]
    figure = line_chart("Loss between two runs", Axis("place on the line"), Axis("loss"), series, marks)
    lead = f"Barrier {number(line.number('barrier'))}, over {count(line.number('samples'), 'sample')}."
    return None if figure is None else Section("Between two minima", (figure,), lead)
