"""The critical batch of a measurement: the law, and what trainings at several global batches say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scalewise.present.charts import Axis, Mark, Series, line_chart, log_spaced, series_of
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Cell, Figure, Only, Section, Table, Tone, kept
from scalewise.present.words import interval, number, percent, rough
from scalewise.stats.critical_batch import CriticalBatch


def bounded(critical: Stored) -> bool:
    """Whether a critical batch rules anything out."""
    return CriticalBatch(*critical.estimate(), "sweep").bounded


def shown(critical: Stored) -> str:
    """A critical batch with its interval, or the bound that is known of it."""
    value, low, high = critical.estimate()
    if value is not None and not bounded(critical):
        return f"not bounded (best fit {rough(value)})"
    if not value and not low and high:
        return f"at most {number(high)}"
    if value is None and low:
        return f"at least {number(low)}"
    return interval(value, low, high, rough)


def critical_section(document: Stored) -> Section | None:
    """Steps and samples to the same loss against the global batch, and whether trainings agree."""
    critical = document.part("critical_batch")
    value, smallest = critical.number("value"), document.number("worker_batch")
    blocks: list[Block] = []
    title, lead = "The critical batch", ""
    if value is not None and smallest and value > 0 and smallest > 0:
        title = "Steps and samples against the global batch"
        law = document.part("verified", "law")
        least = law.number("least_steps")
        if least and law.number("least_samples") and critical.text("method") == "sweep":
            blocks += _measured(document, value, least)
            target = number(document.number("verified", "target_loss"))
            lead = f"Steps and samples to a validation loss of {target}, and the law through them."
        else:
            blocks += _relative(critical, smallest)
            lead = (
                "By the law (S ÷ S_min − 1)(E ÷ E_min − 1) = 1 with this critical batch; areas are its 95 % interval. "
                "scalewise measure --verify sweep checks it by training."
            )
    verified = document.part("verified")
    blocks += [*sweep_blocks(verified), *branch_blocks(verified), *agreement_lines(verified)]
    return Section(title, tuple(blocks), lead) if blocks else None


def agreement_lines(verified: Stored) -> list[Block]:
    """Whether the cheap and the direct critical batch say the same, with both as they are shown elsewhere."""
    cheap, direct = verified.part("cheap"), verified.part("critical_batch")
    agreement, _, rest = verified.text("agreement").partition(f": {cheap.text('method')} ")
    advice = f"; {rest.partition('; ')[2]}" if "; " in rest else ""
    pair = f"{cheap.text('method')} {shown(cheap)}, {direct.text('method')} {shown(direct)}"
    tone: Tone = "good" if agreement.startswith("they agree") else "warning"
    return [Cell(f"Cheap and direct: {agreement}: {pair}{advice}.", tone)] if agreement else []


def sweep_blocks(verified: Stored) -> list[Block]:
    """Steps to the target by global batch, beside the law through them and what it says of each from the others."""
    least, critical = verified.number("law", "least_steps"), verified.number("law", "critical_batch", "value")
    left_out = {row.number("global_batch"): row for row in verified.parts("held_out")}
    rows = []
    for rung in verified.parts("rungs"):
        batch, steps, error = (rung.number(name) for name in ("global_batch", "median_steps", "median_error"))
        other = left_out.get(batch)
        predicted = None if other is None else other.number("predicted_steps", "value")
        off = "" if other is None or predicted is None else f"{rough(predicted)} ({percent(other.number('error'))} off)"
        law = None if least is None or critical is None or not batch else least * (1 + critical / batch)
        rows.append(
            (
                number(batch),
                number(rung.number("lr")),
                number(len(rung.parts("steps"))),
                f"{rough(steps)}{'' if error is None else f' ± {percent(error)}'}",
                "" if law is None else rough(law),
                off,
                rough(None if steps is None or batch is None else steps * batch),
            )
        )
    target = f"Steps to validation loss {number(verified.number('target_loss'))}"
    columns = ("global batch", "learning rate", "seeds", "steps", "law", "by the others", "samples")
    legend = "steps: median over seeds ± its standard error; by the others: by the law through the other rows"
    table = Table(columns, tuple(rows), target, spare=("learning rate", "samples"), legend=legend)
    notes = [Cell(note.text(), "dim") for note in verified.parts("notes")]
    return [Only("terminal", f"{target}:"), table, *notes] if rows else []


def branch_blocks(verified: Stored) -> list[Block]:
    """The loss after branches with more and more workers, and by how much it may rise; what does harm is dim."""
    stages = verified.parts("stages")
    if not stages:
        return []
    series: list[Series] = []
    rows: list[tuple[str | Cell, ...]] = []
    for stage in stages:
        losses, harmless = stage.parts("losses"), stage.number("harmless") or 0
        name = f"{stage.text('name')}, step {number(stage.number('step'))}"
        series.append(series_of(name, losses, "workers", ["loss"], kind="both"))
        cells = [_branch_loss(one.number("workers") or 0, one.number("loss"), harmless) for one in losses]
        tolerance, critical = number(stage.number("tolerance")), shown(stage.part("critical"))
        rows.append((stage.text("name"), number(stage.number("step")), *cells, tolerance, critical))
    counts = [number(loss.number("workers")) for loss in stages[0].parts("losses")]
    samples = number(verified.number("branch_samples"))
    caption = f"Validation loss after {samples} more samples with k workers"
    columns = ("from", "step", *counts, "tolerance", "critical batch")
    figure = line_chart("Loss after a branch", Axis("workers", log=True), Axis("loss"), series)
    said = "From a checkpoint, the same samples with more and more workers: too many where the loss rises."
    table = Table(columns, tuple(rows), caption)
    return [*kept(figure), Only("page", said), Only("terminal", f"{caption}:"), table]


def _branch_loss(workers: float, loss: float | None, harmless: float) -> Cell:
    """A loss with digits enough to see a tenth of what branches may differ by."""
    if loss is None:
        return Cell("diverged", "bad")
    return Cell(f"{loss:.3f}" if abs(loss) >= 1 else f"{loss:#.4g}", "good" if workers <= harmless else "dim")


def _relative(critical: Stored, smallest: float) -> list[Block]:
    """Multiples of the minima, with what the interval of the critical batch makes of them."""
    value = critical.number("value") or 1.0
    low, high = critical.number("low") or value, critical.number("high") or value
    places = log_spaced(max(1.0, value / 32), value * 32)
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
    marks = [Mark("x", value, f"critical batch {rough(value)}")]
    axes = Axis("global batch", log=True), Axis("times the least", log=True)
    first = line_chart("Steps and samples", *axes, [steps, samples], marks)
    return [*kept(first, _hyperbola(value, smallest, places))]


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


def _measured(document: Stored, critical: float, least_steps: float) -> list[Block]:
    """Medians over seeds at each global batch, and the fitted law."""
    rungs = [(rung.number("global_batch"), rung.number("median_steps")) for rung in document.parts("verified", "rungs")]
    seen = [(batch, steps) for batch, steps in rungs if batch and steps]
    if not seen:
        return []
    places = log_spaced(min(batch for batch, _ in seen) / 1.5, max(batch for batch, _ in seen) * 1.5)
    law = [(batch, least_steps * (1 + critical / batch)) for batch in places]

    def both(point: Callable[[float, float], tuple[float, float]]) -> list[Series]:
        through, dots = (tuple(point(batch, steps) for batch, steps in found) for found in (law, seen))
        return [Series("law", through), Series("measured", dots, kind="dots")]

    marks = [Mark("x", critical, f"critical batch {rough(critical)}")]
    floor = Mark("y", least_steps, f"least steps {rough(least_steps)}")
    batches = Axis("global batch", log=True, ticks=tuple(batch for batch, _ in seen))
    steps, samples = Axis("steps", log=True), Axis("samples", log=True)
    charts = [
        line_chart("Steps to the loss", batches, steps, both(lambda batch, taken: (batch, taken)), [*marks, floor]),
        line_chart("Samples to the loss", batches, samples, both(lambda batch, taken: (batch, batch * taken)), marks),
        line_chart("The hyperbola", steps, samples, both(lambda batch, taken: (taken, batch * taken))),
    ]
    return [*kept(*charts)]
