"""A measurement: how far a task can scale, what fits, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from scalewise.present.charts import Axis, Bar, Mark, Series, bars, line_chart, series_of
from scalewise.present.stored import Stored, number_of
from scalewise.present.stories.critical import bounded, critical_section, shown
from scalewise.present.stories.train import ends, estimate
from scalewise.present.story import (
    Block,
    Columns,
    Fact,
    Key,
    Meter,
    Only,
    Section,
    Sparkline,
    Story,
    Table,
    kept,
    table_of,
)
from scalewise.present.words import count, interval, listed, number, percent, rough, seconds, signed, size, span, times

THROUGHPUT_LINES, LAYER_LINES = 8, 12


def measurement_story(document: Stored) -> Story:
    """The story of one measurement."""
    doubt = f"noise scale: {document.text('verdict')}" if document.flag("noise_scale", "enough") is False else ""
    return Story(
        question=f"How far can {document.text('task')} scale?",
        answer=answer(document),
        facts=_facts(document),
        sections=kept(
            noise_section(document),
            efficiency_section(document),
            throughput_section(document),
            memory_section(document),
            layers_section(document),
            critical_section(document),
            between_section(document),
            sharpness_section(document),
        ),
        notes=tuple(_notes(document)),
        problems=tuple(filter(None, [doubt, document.text("missed")])),
    )


def answer(document: Stored) -> str:
    """Up to how many workers a sample keeps at least half its worth, and what stands in the way of more."""
    said = _workers_said(document)
    if not said and document.part("noise_scale").is_object:
        said = ["The noise scale is not known."]
    largest, memory = document.number("largest_worker_batch"), document.part("memory")
    if largest is not None:
        where = " with --loaders 0" if memory.number("loaders") else ""
        fits = f"All {number(largest)} training samples fit at once" if memory.text("limited_by") == "data" else ""
        said.append(f"{fits or f'The largest worker batch that fits is {number(largest)}'}{where}.")
    barrier = document.part("landscape", "line")
    if barrier.is_object:
        known = "of unknown height" if barrier.number("barrier") is None else number(barrier.number("barrier"))
        said.append(f"The loss barrier between the runs is {known}.")
    minima = [minimum.parts("full", "rows")[:1] for minimum in document.parts("sharpness")]
    if minima:
        box = next((f" (ε {number(rows[0].number('epsilon'))})" for rows in minima if rows), "")
        said.append(f"Sharpness {listed([_rise(rows[0] if rows else Stored()) for rows in minima])}{box}.")
    return " ".join(said) or "Nothing was measured."


def _workers_said(document: Stored) -> list[str]:
    """How many workers the critical batch stands for; a bound of it stands for at least, or at most, that many."""
    critical, batch = document.part("critical_batch"), document.number("worker_batch")
    bounds = {"": critical.number("value"), "at least ": critical.number("low"), "at most ": critical.number("high")}
    bound, known = next(((word, amount) for word, amount in bounds.items() if amount), ("", None))
    if not known or not batch:
        return []
    most = int(known // batch)
    amount = number(known) if bound else rough(known)
    found = f"the critical batch by {critical.text('method')} is {bound}{amount}{_beside(document)}"
    half = f"Up to {bound}{most:,} workers of {number(batch)} each sample is worth at least half: {found}."
    hardly = f"Hardly beyond one worker of {number(batch)}: {found}."
    said = [half if most >= 2 or bound == "at least " else hardly]
    workers = document.number("workers")
    own = [row for row in document.parts("efficiency") if row.number("workers") == workers]
    return said + [f"At {count(workers, 'worker')} it is worth {worth(row)}." for row in own[:1]]


def _beside(document: Stored) -> str:
    """What the trainings found, where the critical batch does not come from them."""
    direct = document.part("verified", "critical_batch")
    method = direct.text("method")
    if not method or method == document.text("critical_batch", "method"):
        return ""
    return f" ({method}: {shown(direct)})" if bounded(direct) else f" (not bounded by the {method})"


def worth(row: Stored, with_interval: bool = False) -> str:
    """Of a sample; its bound where nothing else is known of the critical batch."""
    value, low, high = (row.number(name) for name in ("worth", "low", "high"))
    if value:
        return interval(value, low, high, percent) if with_interval else percent(value)
    return f"at least {percent(low)}" if low else f"at most {percent(high)}"


def _facts(document: Stored) -> tuple[Fact, ...]:
    found = []
    noise, critical = document.part("noise_scale"), document.part("critical_batch")
    for name, part, how in (
        ("noise scale", noise, ""),
        ("critical batch", critical, f"by {critical.text('method')}"),
    ):
        if part.number("value"):
            found.append(Fact(name, f"{rough(part.number('value'))} samples", f"{ends(part)}{how and f', {how}'}"))
        elif part.is_object:
            found.append(Fact(name, shown(part), how))
    memory = document.part("memory")
    if document.number("largest_worker_batch") is not None:
        by = f"limited by {memory.text('limited_by')}{', with --loaders 0' if memory.number('loaders') else ''}"
        found.append(Fact("largest worker batch", number(document.number("largest_worker_batch")), by))
    if document.number("knee") is not None:
        found.append(Fact("fastest from worker batch", number(document.number("knee")), _knee(document)))
    if document.number("mfu") is not None:
        found.append(Fact("of the device's best", percent(document.number("mfu")), "of its fastest matrix product"))
    return tuple(found)


def _knee(document: Stored) -> str:
    """What noise leaves open of it, where that is more than one doubling."""
    low, high = document.number("knee_interval", "low"), document.number("knee_interval", "high")
    said = [span(low, high)] if low and high and high > 2 * low else []
    rows = document.parts("training")
    if rows and document.number("knee") == rows[-1].number("worker_batch"):
        said.append("the largest tried")
    return ", ".join(said)


def noise_section(document: Stored) -> Section | None:
    """The noise scale at points of training, beside the critical batch."""
    stages = document.parts("stages")
    kinds = {"noise_scale": document.part("plain")}
    if document.part("preconditioned").is_object:
        kinds["preconditioned"] = document.part("preconditioned")
    rows = []
    for stage in stages:
        found = [estimate(stage.part(kind)) if stage.part(kind).is_object else "" for kind in kinds]
        rows.append((stage.text("name"), number(stage.number("step")), *found))
    rows.append(("average", "", *map(estimate, kinds.values())))
    chosen = [*kinds][-1]
    series = series_of("noise scale", stages, "step", (chosen, "value"), ((chosen, "low"), (chosen, "high")), "both")
    lines = {
        "critical batch": document.number("critical_batch", "value"),
        "global batch": document.number("global_batch"),
    }
    marks = [Mark("y", value, f"{name} {rough(value)}") for name, value in lines.items() if value and value > 0]
    axes = Axis("step of one worker"), Axis("samples", log=True)
    figure = line_chart("Noise scale over training", *axes, [series], marks)
    columns = ("", "step", *(f"{kind.replace('_', ' ')} (95 %)" for kind in kinds))
    table = Table(columns, tuple(rows), "Noise scale", own=len(stages))
    lead = "Its level says how large a global batch is worth it; bars are 95 % intervals."
    return Section("Noise scale over training", kept(figure, table), lead) if stages else None


def efficiency_section(document: Stored) -> Section | None:
    """What more workers bring, beside ideal scaling."""
    rows = document.parts("efficiency")
    valued = series_of("worth", rows, "workers", ["worth"], (["low"], ["high"]), "both")
    steps = series_of("by the critical batch", rows, "workers", ["steps"], kind="both")
    gained = replace(steps, points=tuple((workers, 1 / found) for workers, found in steps.points if found))
    ticks = tuple(workers for workers, _ in valued.points)
    axis = Axis("workers", log=True, ticks=ticks)
    first = line_chart(
        "Worth of a sample", axis, Axis("of one in a very small batch", share=True, low=0.0, high=1.0),
        [valued, Series("ideal", tuple((workers, 1.0) for workers in ticks))], [Mark("y", 0.5, "half")],
    )  # fmt: skip
    ideal = Series("ideal", tuple((workers, workers) for workers in ticks))
    second = line_chart("Fewer steps", axis, Axis("times fewer steps", log=True), [gained, ideal])
    columns: Columns[Stored] = {
        "workers": number_of("workers"),
        "global batch": number_of("global_batch"),
        "worth of a sample": lambda row: worth(row, with_interval=True),
        "steps": number_of("steps", shown=times),
        "samples": number_of("samples", shown=times),
    }
    own = next((place for place, row in enumerate(rows) if row.number("workers") == document.number("workers")), None)
    table = table_of(rows, columns, "More workers", own=own)
    lead = "To the same loss, as multiples of what one worker needs."
    return Section("What more workers bring", kept(first, second, table), lead) if rows else None


def throughput_section(document: Stored) -> Section | None:
    """Samples a second by worker batch; in a terminal the largest ones."""
    training, inference = (
        series_of(key, document.parts(key), "worker_batch", ["samples_per_second"], (["low"], ["high"]), "both")
        for key in ("training", "inference")
    )
    knee = document.number("knee") or 0.0
    marks = [Mark("x", knee, f"best from {number(knee)}")] if knee else []
    axes = Axis("worker batch", log=True), Axis("samples a second", log=True)
    figure = line_chart("Throughput of one worker", *axes, [training, inference], marks)
    if figure is None:
        return None
    inferred, best = dict(inference.points), max((speed for _, speed in training.points), default=0.0) or 1.0
    cells = tuple(
        (number(batch), rough(speed), Meter(((speed / best, 0 if batch >= knee else 4),)), rough(inferred.get(batch)))
        for batch, speed in training.points[-THROUGHPUT_LINES:]
    )
    table = Table(("worker batch", "samples/s", "", "inference"), cells, "Throughput")
    title = f"Throughput of one worker, {document.text('device')}, {count(document.number('threads'), 'thread')}"
    return Section(title, (figure, Only("terminal", table)), "Bars are the range over rounds.")


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
    pieces = tuple((starts[order] / 1e6, amount / 1e6, order % 8) for order, (_, amount) in enumerate(known))
    peak, baseline = memory.number("measured_peak_bytes"), memory.number("baseline_bytes") or 0.0
    rows = [Bar("predicted", size(total), pieces)]
    if peak is not None:
        rows.append(Bar("measured", size(peak + baseline), ((0.0, (peak + baseline) / 1e6, 7),)))
    table = Table(("part", "bytes"), tuple((name, size(amount)) for name, amount in known), "Memory by part")
    keys = [Key(name, order % 8, "fill") for order, (name, _) in enumerate(known)]
    figure = bars("Memory by part", Axis("MB"), rows, table, keys)
    processes = count(memory.number("processes"), "process", "processes")
    shared = f", for each of {processes}" if (memory.number("processes") or 1) > 1 else ""
    budget = f"{size(memory.number('process_bytes'))}{shared} ({memory.text('budget_source')})"
    peaks = [(memory.number("predicted_peak_bytes"), "predicted"), (peak, "measured")]
    told = [f"{size(amount + baseline)} {word}" for amount, word in peaks if amount is not None]
    named = [f"{name} {size(amount)}" for name, amount in known[1:]]
    parts_line = Only("terminal", f"{size(baseline)} before training, {', '.join(named)}")
    loaders = count(memory.number("loaders"), "loader process", "loader processes")
    more = f"With --loaders 0: the {loaders} that training has by default come on top, with what they read ahead."
    told_peak = f"Peak {', '.join(told)}, of {budget}."
    blocks: tuple[Block, ...] = kept(figure, parts_line, told_peak, more if memory.number("loaders") else None)
    return Section(f"Memory at worker batch {number(memory.number('largest_worker_batch'))}", blocks)


def layers_section(document: Stored) -> Section | None:
    """The noise scale of each parameter; the noisiest where there are many."""
    layers = [(layer.text("name"), layer.part("noise_scale")) for layer in document.parts("layers")]
    layers.sort(key=lambda layer: -(layer[1].number("value") or math.inf))
    rows = tuple((name, estimate(found)) for name, found in layers[:LAYER_LINES])
    kind = ", of plain gradients" if document.part("preconditioned").is_object else ""
    most = f", the {LAYER_LINES} largest of {len(layers)}" if len(layers) > LAYER_LINES else ""
    table = Table(("parameter", "noise scale (95 %)"), rows, "Noise scale by layer")
    return Section(f"Noise scale by layer{kind}{most}", (table,)) if rows else None


def between_section(document: Stored) -> Section | None:
    """The loss on the line through two runs' weights."""
    line, plane = document.part("landscape", "line"), document.part("landscape", "plane")
    points = line.parts("rows")
    if not points:
        return None
    losses = {part: tuple(point.number(part, "loss") for point in points) for part in ("train", "test")}
    rows = tuple((f"{part} loss", Sparkline(found, log=True), _range(found)) for part, found in losses.items())
    series = [series_of(part, points, "alpha", (part, "loss")) for part in losses]
    marks = [Mark("x", 0.0, "first run"), Mark("x", 1.0, "second run")]
    figure = line_chart("Loss between two runs", Axis("place on the line"), Axis("loss"), series, marks)
    known = "not known" if line.number("barrier") is None else number(line.number("barrier"))
    told = f"Distance {number(line.number('distance'))}, barrier {known} (0: they lie in one basin)."
    if plane.is_object:
        third = "a random direction" if plane.text("direction") == "random" else "the third run"
        found = [row.number("train", "loss") for row in plane.parts("rows")]
        told += f" Plane with {third}: {count(len(found), 'point')}, loss {_range(found)}."
    ends = signed(f"from {number(points[0].number('alpha'))} to {number(points[-1].number('alpha'))}")
    table = Only("terminal", Table(("", "", ""), rows, "Loss along the line"))
    return Section(f"Between the two runs, {ends}", kept(figure, table, told))


def _range(losses: Sequence[float | None]) -> str:
    finite = [loss for loss in losses if loss is not None]
    return span(min(finite), max(finite)) if finite else "nowhere finite"


def sharpness_section(document: Stored) -> Section | None:
    """How far the loss rises around each run's weights."""
    minima = document.parts("sharpness")
    boxes = next((found for one in minima if (found := one.parts("full", "rows"))), [])
    epsilons = [number(row.number("epsilon")) for row in boxes]
    columns = [f"{space} ε {epsilon}" for space in ("all weights", "subspace") for epsilon in epsilons]
    rows = []
    for minimum in minima:  # at every size of the box, in both spaces
        seen = [_rise(row) for space in ("full", "subspace") for row in minimum.parts(space, "rows")]
        rises = seen or [_rise(Stored()), *[""] * max(0, 2 * len(epsilons) - 1)]
        rows.append((minimum.text("run"), number(minimum.number("full", "loss")), *rises))
    title = "Sharpness: the loss rises by so many percent of 1 + loss"
    table = Table(("run", "loss", *(columns or ["sharpness"])), tuple(rows), "Sharpness")
    return Section(title, (table,)) if rows else None


def _rise(row: Stored) -> str:
    return "undefined" if row.number("value") is None else f"{row.number('value'):.3g} %"


def _notes(document: Stored) -> list[str]:
    """What was done for it, and how long that took."""
    rounds = next((row.number("rounds") for row in document.parts("training")), None)
    flops = f"{number(document.number('flops_per_sample'))} FLOPs a sample"
    how = {
        "memory": _how_memory(document.part("memory")),
        "throughput": f"median of {count(rounds, 'round')}; {flops}",
        "noise": _how_noise(document),
        "verify": _how_verified(document.part("verified")),
        "landscape": f"{count(document.number('landscape', 'line', 'samples'), 'sample')}, "
        "batch norm recomputed at each point",
        "sharpness": _how_sharpness(document.parts("sharpness")),
    }
    took = [(name, f"{name} {seconds(taken.number())}") for name, taken in document.part("seconds").items()]
    return [f"{taken}: {how[name]}" if how.get(name) else taken for name, taken in took]


def _how_memory(memory: Stored) -> str:
    tried = count(len(memory.parts("trials")), "worker batch", "worker batches")
    processes = memory.number("processes") or 1
    of = "a process of its own" if processes == 1 else f"{number(processes)} processes"
    return f"predicted from a trace, then {tried} really trained in {of}"


def _how_noise(document: Stored) -> str:
    looked = sum(stage.number("samples") or 0 for stage in document.parts("stages"))
    precise = document.part("preconditioned").is_object
    kind = "preconditioned as the optimizer does" if precise else "plain gradients"
    groups = f"gradients of {count(looked, 'sample')} in groups of {number(document.number('group_samples'))}"
    return f"{count(document.number('steps'), 'step')} of one worker; {groups}, {kind}"


def _how_verified(verified: Stored) -> str:
    counts = [len(rung.parts("steps")) for rung in verified.parts("rungs")] or [int(verified.number("seeds") or 0)]
    fewest, most = min(counts), max(counts)
    return f"trained at each global batch, {'' if fewest == most else f'{fewest} to '}{count(most, 'seed')}"


def _how_sharpness(minima: Sequence[Stored]) -> str:
    if not minima:
        return ""
    full = minima[0].part("full")
    undefined = not all(minimum.parts("full", "rows") for minimum in minima)
    return (
        f"L-BFGS-B, {count(full.number('iterations'), 'iteration')} from each of 2 starts, "
        f"{count(full.number('samples'), 'sample')}, batch-norm statistics of the weights"
        f"{'; undefined where 1 + loss is not above 0' if undefined else ''}"
    )
