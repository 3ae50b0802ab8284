"""Minima: how sharp they are, and the loss on the line between two."""

from __future__ import annotations

from scalewise.report.charts import Mark, Series, line_chart
from scalewise.report.pieces import Section, Table
from scalewise.report.scales import Axis
from scalewise.report.stored import Stored
from scalewise.report.wording import count, number


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
