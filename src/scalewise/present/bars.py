"""Horizontal bars, intervals and lanes as SVG, with the row's name above it, so that they stay readable on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from scalewise.present.charts import RIGHT, WIDTH, Axis, Scale, dot, fitted, frame, x_ticks
from scalewise.present.story import Figure, Key, Table

LEFT = 12
ROW, NAME, BOTTOM = 38, 16, 40


@dataclass(frozen=True)
class Spread:
    """A row of intervals: its mean, its ends, and the single values."""

    name: str
    note: str
    mean: float | None
    low: float | None
    high: float | None
    values: tuple[float, ...]
    look: int


@dataclass(frozen=True)
class Bar:
    """A row of parts (start, length, look), and their names where the legend cannot tell them apart."""

    name: str
    note: str
    parts: tuple[tuple[float, float, int], ...]
    names: tuple[str, ...] = ()


def intervals(title: str, axis: Axis, rows: Sequence[Spread], reference: float | None) -> Figure | None:
    """Means with intervals and single values, one row below the other, and a line through the reference."""
    ends = [end for row in rows for end in (row.mean, row.low, row.high, *row.values) if end is not None]
    if not ends:
        return None
    scale = fitted(ends, axis, LEFT + 8, WIDTH - RIGHT - 8)
    parts = [_axis(axis, scale, len(rows))]
    if reference is not None:
        bottom = len(rows) * ROW + 4
        parts.append(Markup('<path class="mark" d="M{:.1f} 2V{}"/>').format(scale(reference), bottom))
    for order, row in enumerate(rows):
        parts.append(_name(row.name, row.note, order))
        parts.append(_interval(row, scale, order * ROW + NAME + 11))
    described = f"{title}. " + ". ".join(f"{row.name}: {row.note or 'no result'}" for row in rows) + "."
    return Figure(title, frame(Markup("").join(parts), described, len(rows) * ROW + BOTTOM), described, None)


def bars(title: str, axis: Axis, rows: Sequence[Bar], table: Table, keys: Sequence[Key] = ()) -> Figure | None:
    """Bars of one or several parts, one row below the other."""
    ends = [start + length for row in rows for start, length, _ in row.parts]
    if not ends or max(ends) <= 0:
        return None
    scale = fitted([0.0, max(ends)], axis, LEFT, WIDTH - RIGHT - 8)
    parts = [_axis(axis, scale, len(rows))]
    for order, row in enumerate(rows):
        parts.append(_name(row.name, row.note, order))
        parts += [_piece(row, place, scale, order * ROW + NAME + 4) for place in range(len(row.parts))]
    described = f"{title}. " + ". ".join(f"{row.name}: {row.note}" for row in rows) + "."
    drawing = frame(Markup("").join(parts), described, len(rows) * ROW + BOTTOM)
    return Figure(title, drawing, described, table, tuple(keys))


def _piece(row: Bar, place: int, scale: Scale, top: float) -> Markup:
    """One part of a bar; its name is shown under the pointer."""
    start, length, look = row.parts[place]
    name = Markup("<title>{}</title>").format(row.names[place]) if row.names else Markup("")
    shape = '<g class="look{}"><rect class="fill" x="{:.2f}" y="{}" width="{:.2f}" height="15">{}</rect></g>'
    return Markup(shape).format(look, scale(start), top, max(scale(start + length) - scale(start), 0.4), name)


def _axis(axis: Axis, scale: Scale, rows: int) -> Markup:
    bottom = rows * ROW + 4
    parts = [Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, bottom, WIDTH - RIGHT)]
    parts += x_ticks(axis, scale, bottom)
    parts.append(Markup('<text class="title" x="{}" y="{}">{}</text>').format(WIDTH - RIGHT, bottom + 33, axis.title))
    return Markup("").join(parts)


def _name(name: str, note: str, order: int) -> Markup:
    shape = '<text class="row" x="{}" y="{}">{}</text><text class="title" x="{}" y="{}">{}</text>'
    return Markup(shape).format(LEFT, order * ROW + NAME - 2, name, WIDTH - RIGHT, order * ROW + NAME - 2, note)


def _interval(row: Spread, scale: Scale, height: float) -> Markup:
    parts = [Markup('<circle class="value" cx="{:.1f}" cy="{}" r="2.2"/>').format(scale(v), height) for v in row.values]
    if row.low is not None and row.high is not None:
        shape = '<path class="bar" d="M{:.1f} {}H{:.1f}"/>'
        parts.append(Markup(shape).format(scale(row.low), height, scale(row.high)))
    if row.mean is not None:
        parts.append(dot(scale(row.mean), height, row.look))
    return Markup('<g class="look{}">{}</g>').format(row.look, Markup("").join(parts))
