"""Charts as SVG: drawn here, so that a page needs no script to show them and prints as it looks.

Lines; and horizontal bars, intervals and lanes with the row's name above it, so that they stay readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

from scalewise.present.stored import Stored
from scalewise.present.story import Figure, Key, Table
from scalewise.present.words import number, percent, short

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 26, 42
ROW_LEFT, ROW_HEIGHT, ROW_NAME, ROW_BOTTOM = 12, 38, 16, 40  # of charts of rows
TABLE_ROWS = 24
LABEL_LETTER, LABEL_LINE = 7.0, 15  # width of a letter of a label, and height of a line of them
LOOKS = 10  # colours, dashes and shapes of the style sheet
TICKS = 5
SMALLEST = 1e-200  # on a logarithmic axis: its margin below must not become 0
CURVE_POINTS = 60


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    title: str  # with the unit
    log: bool = False
    share: bool = False  # numbers between 0 and 1, shown as percentages
    ticks: tuple[float, ...] = ()  # where to put them, instead of round numbers
    low: float | None = None  # that it covers at least
    high: float | None = None

    def shown(self, value: float) -> str:
        """A number at a tick."""
        return percent(value, 0 if abs(value * 100 - round(value * 100)) < 1e-6 else 1) if self.share else short(value)


@dataclass(frozen=True)
class Scale:
    """Numbers from low to high at places from start to end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a number."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log10(one) if one > 0 else -100.0 for one in (low, high, at))
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        """Round numbers within.

        >>> Scale(0.0, 0.97, 0, 1).ticks(), Scale(30, 600, 0, 1, log=True).ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8], [50, 100, 200, 500])
        """
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


@dataclass(frozen=True)
class Series:
    """Points (x, y) that belong together, and ranges (x, low, high): an area behind a line, or bars through dots."""

    name: str  # in the legend
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()
    kind: Literal["line", "dots", "both"] = "line"
    look: int | None = None  # by default the series' own number


@dataclass(frozen=True)
class Mark:
    """A line across the chart at a number of the x or the y axis."""

    axis: Literal["x", "y"]
    value: float
    label: str


def line_chart(
    title: str, x: Axis, y: Axis, series: Sequence[Series], marks: Sequence[Mark] = (), note: str = ""
) -> Figure | None:
    """A chart of several series, or nothing where there are no points."""
    drawn = [_on(one, x, y) for one in series]
    if not any(one.points for one in drawn):
        return None
    marks = [mark for mark in marks if mark.value > 0 or not (x if mark.axis == "x" else y).log]
    places = [place for one in drawn for place, _ in one.points] + [m.value for m in marks if m.axis == "x"]
    values = [value for one in drawn for _, value in one.points] + [m.value for m in marks if m.axis == "y"]
    values += [end for one in drawn for _, low, high in one.band for end in (low, high)]
    across, up = fitted(places, x, LEFT, WIDTH - RIGHT), fitted(values, y, HEIGHT - BOTTOM, TOP, room=0.04)
    parts = [_grid(x, y, across, up)]
    looks = [one.look if one.look is not None else order for order, one in enumerate(drawn)]
    parts += [_series(one, look % LOOKS, across, up) for one, look in zip(drawn, looks, strict=True)]
    parts += [_mark(mark, across, up, line) for mark, line in zip(marks, _label_lines(marks, across), strict=True)]
    legend = [(one, look) for one, look in zip(drawn, looks, strict=True) if one.points]
    keys = tuple(Key(one.name, look % LOOKS, "dots" if one.kind == "dots" else "line") for one, look in legend)
    described = describe(title, x, y, drawn, marks)
    scales = (f"{s.low:.12g} {s.high:.12g} {s.start} {s.end} {int(s.log)}" for s in (across, up))
    body = frame(parts, described, scales=" ".join(scales))  # for the page's script
    return Figure(title, body, described, _table(title, x, y, drawn), keys, note)


def series_of(
    name: str,
    records: Iterable[Stored],
    x: str,
    y: Sequence[str],
    band: tuple[Sequence[str], Sequence[str]] | None = None,
    kind: Literal["line", "dots", "both"] = "line",
) -> Series:
    """One number of some records against another, as far as both are known; `y` and the ends of its band by keys."""
    known = [(place, one.number(*y), one) for one in records if (place := one.number(x)) is not None]
    points = tuple((place, value) for place, value, _ in known if value is not None)
    ends = [(place, one.number(*band[0]), one.number(*band[1])) for place, _, one in known] if band else []
    found = tuple((place, low, high) for place, low, high in ends if low is not None and high is not None)
    return Series(name, points, found, kind)


def frame(parts: Iterable[Markup], description: str, height: int = HEIGHT, scales: str = "") -> Markup:
    """An SVG with its text alternative."""
    focus = Markup(' tabindex="0" data-scales="{}"').format(scales) if scales else Markup("")
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"{}>{}</svg>').format(
        WIDTH, height, description, focus, Markup("").join(parts)
    )


def describe(title: str, x: Axis, y: Axis, series: Iterable[Series], marks: Iterable[Mark] = ()) -> str:
    """What a chart shows, in words."""
    lines = [
        f"{one.name}: from {y.shown(one.points[0][1])} at {x.shown(one.points[0][0])} to "
        f"{y.shown(one.points[-1][1])} at {x.shown(one.points[-1][0])}, lowest "
        f"{y.shown(min(value for _, value in one.points))}, highest {y.shown(max(value for _, value in one.points))}"
        for one in series
        if one.points
    ]
    lines += [f"line at {number(mark.value)}: {mark.label}" for mark in marks]
    return f"{title}, {y.title} against {x.title}. {'. '.join(lines)}."


def thinned(points: Sequence[tuple[float, float]], most: int) -> Series:
    """At most `most` points: means of equal shares of them, with their range as the band."""
    if len(points) <= most:
        return Series("", tuple(points))
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    groups = [points[first:last] for first, last in pairwise(edges)]
    means = tuple((group[-1][0], sum(value for _, value in group) / len(group)) for group in groups)
    band = tuple((group[-1][0], min(v for _, v in group), max(v for _, v in group)) for group in groups)
    return Series("", means, band)


def _on(series: Series, x: Axis, y: Axis) -> Series:
    """Without what a logarithmic axis cannot show."""
    points = tuple((a, b) for a, b in series.points if (a > 0 or not x.log) and (b > 0 or not y.log))
    band = tuple((a, low, high) for a, low, high in series.band if (a > 0 or not x.log) and (low > 0 or not y.log))
    return Series(series.name, points, band, series.kind, series.look)


def _grid(x: Axis, y: Axis, across: Scale, up: Scale) -> Markup:
    """Lines, numbers and titles."""
    bottom = HEIGHT - BOTTOM
    ticks = [tick for tick in y.ticks or up.ticks() if up.low <= tick <= up.high]
    parts = [
        Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="tick" x="{}" y="{:.1f}">{}</text>').format(
            LEFT, up(tick), WIDTH - RIGHT, LEFT - 6, up(tick) + 4, y.shown(tick)
        )
        for tick in ticks
    ]
    parts += x_ticks(x, across, bottom)
    parts.append(Markup('<path class="axis" d="M{0} {1}V{2}H{3}"/>').format(LEFT, TOP, bottom, WIDTH - RIGHT))
    parts.append(Markup('<text class="title" x="{}" y="{}">{}</text>').format(WIDTH - RIGHT, HEIGHT - 6, x.title))
    parts.append(Markup('<text class="unit" x="2" y="13">{}</text>').format(y.title))
    return Markup("").join(parts)


def x_ticks(axis: Axis, scale: Scale, bottom: float) -> list[Markup]:
    """The numbers under an axis; those without room are left out."""
    parts: list[Markup] = []
    free = -1e9
    for tick in axis.ticks or scale.ticks():
        place, label = scale(tick), axis.shown(tick)
        half = 3.6 * len(label)
        if not scale.start - 1 <= place <= scale.end + 1 or place - half < free:
            continue
        free = place + half + 8
        beside = min(place, WIDTH - 2 - half)
        shape = '<path class="stroke" d="M{0:.1f} {1}v4"/><text class="under" x="{4:.1f}" y="{2}">{3}</text>'
        parts.append(Markup(shape).format(place, bottom, bottom + 17, label, beside))
    return parts


def _side(place: float) -> Literal["left", "right"]:
    """Of a line across the x axis on which there is more room for its label."""
    return "left" if place > (LEFT + WIDTH) / 2 else "right"


def _label_lines(marks: Sequence[Mark], across: Scale) -> list[int]:
    """In which line each label stands, so that none is written over another one."""
    taken: list[tuple[int, float, float]] = []
    found = []
    for mark in marks:
        place, width = across(mark.value), LABEL_LETTER * len(mark.label) + 10
        start = place if _side(place) == "right" else place - width
        others = {line for line, left, right in taken if start < right and left < start + width}
        line = 0 if mark.axis == "y" else next(line for line in range(len(marks)) if line not in others)
        if mark.axis == "x":
            taken.append((line, start, start + width))
        found.append(line)
    return found


def _mark(mark: Mark, across: Scale, up: Scale, line: int) -> Markup:
    if mark.axis == "x":
        place = across(mark.value)
        side = _side(place)
        shape = '<path class="mark" d="M{0:.1f} {1}V{2}"/><text class="label {3}" x="{4:.1f}" y="{5}">{6}</text>'
        beside = place + (5 if side == "right" else -5)
        return Markup(shape).format(place, TOP, HEIGHT - BOTTOM, side, beside, TOP + 16 + LABEL_LINE * line, mark.label)
    place = up(mark.value)
    shape = '<path class="mark" d="M{0} {1:.1f}H{2}"/><text class="label right" x="{3}" y="{4:.1f}">{5}</text>'
    above = place - 4 if place > 30 else place + 13
    return Markup(shape).format(LEFT, place, WIDTH - RIGHT, LEFT + 5, above, mark.label)  # errors fall: left is free


def _series(series: Series, look: int, across: Scale, up: Scale) -> Markup:
    places = [(across(a), up(b)) for a, b in series.points]
    parts = [_band(series, across, up)] if series.band else []
    if series.kind != "dots" and len(places) > 1:
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(Markup('<polyline class="line" points="{}"/>').format(line))
    if series.kind != "line" or len(places) == 1:
        parts += [dot(a, b, look) for a, b in places]
    return Markup('<g class="look{}" data-name="{}">{}</g>').format(look, series.name, Markup("").join(parts))


def _band(series: Series, across: Scale, up: Scale) -> Markup:
    """The range of a line as an area, of dots as bars."""
    ends = [(across(a), up(low), up(high)) for a, low, high in series.band]
    if series.kind != "line":
        bars = (Markup('<path class="bar" d="M{0:.1f} {1:.1f}V{2:.1f}"/>').format(*end) for end in ends)
        return Markup("").join(bars)
    outline = [*((a, high) for a, _, high in ends), *((a, low) for a, low, _ in reversed(ends))]
    return Markup('<polygon class="band" points="{}"/>').format(" ".join(f"{a:.1f},{b:.1f}" for a, b in outline))


def dot(a: float, b: float, look: int) -> Markup:
    """A dot in the shape of its look: people who see no colours tell them apart by it."""
    shapes = (
        "M{x} {y}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
        "M{x} {y}m-4 -4h8v8h-8z",
        "M{x} {y}m0 -5l5 9h-10z",
        "M{x} {y}m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    )
    return Markup('<path class="dot" d="{}"/>').format(
        shapes[(look + look // 8) % len(shapes)].format(x=f"{a:.1f}", y=f"{b:.1f}")
    )


def _table(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Table:
    """The numbers behind a chart, at no more places than a person reads."""
    shown = [one for one in series if one.points]
    places = sorted({place for one in shown for place, _ in one.points})
    if len(places) > TABLE_ROWS:
        places = [places[round(index * (len(places) - 1) / (TABLE_ROWS - 1))] for index in range(TABLE_ROWS)]
    columns = [dict(one.points) for one in shown]
    shown_value = (lambda value: percent(value, 2)) if y.share else number
    rows = tuple((number(place), *(shown_value(column.get(place)) for column in columns)) for place in places)
    return Table((x.title, *(one.name for one in shown)), rows, f"{title}: {y.title} by {x.title}")


def fitted(values: Iterable[float], axis: Axis, start: float, end: float, room: float = 0.0) -> Scale:
    """A scale that holds all values, with so much room beyond them, but not beyond a bound of the axis itself."""
    wanted = [*values, *(one for one in (axis.low, axis.high) if one is not None)]
    known = [value for value in wanted if not axis.log or value > SMALLEST] or [1.0]
    low, high = min(known), max(known)
    if low == high:
        low, high = (low / 2, high * 2) if axis.log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    below, above = room * (low != axis.low), room * (high != axis.high)
    if axis.log:
        ratio = high / low
        return Scale(low / ratio**below, high * ratio**above, start, end, log=True)
    return Scale(low - (high - low) * below, high + (high - low) * above, start, end)


def _linear_ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / TICKS
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = min(20, math.floor(high / step + 1e-9) - first + 1)
    return [float(f"{(first + index) * step:.12g}") for index in range(count)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = last - first
    stride = max(1, decades // TICKS)
    factors = (1, 2, 5) if decades <= 3 else (1,)
    powers = [10.0**power if power < 0 else 10**power for power in range(first, last + 1, stride)]
    found = [power * factor for power in powers for factor in factors]
    within = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    return within if len(within) > 2 else _linear_ticks(low, high)


def log_spaced(low: float, high: float) -> list[float]:
    """Places for a curve over a logarithmic axis."""
    ratio = high / low
    return [low * ratio ** (index / (CURVE_POINTS - 1)) for index in range(CURVE_POINTS)]


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
    scale = fitted(ends, axis, ROW_LEFT + 8, WIDTH - RIGHT - 8)
    line = Markup('<path class="mark" d="M{:.1f} 2V{}"/>')
    behind = [] if reference is None else [line.format(scale(reference), len(rows) * ROW_HEIGHT + 4)]
    drawn = [_interval(row, scale, order * ROW_HEIGHT + ROW_NAME + 11) for order, row in enumerate(rows)]
    return _row_chart(title, axis, scale, rows, behind, drawn, None)


def bars(title: str, axis: Axis, rows: Sequence[Bar], table: Table, keys: Sequence[Key] = ()) -> Figure | None:
    """Bars of one or several parts, one row below the other."""
    ends = [start + length for row in rows for start, length, _ in row.parts]
    if not ends or max(ends) <= 0:
        return None
    scale = fitted([0.0, max(ends)], axis, ROW_LEFT, WIDTH - RIGHT - 8)
    drawn = [_bar(row, scale, order * ROW_HEIGHT + ROW_NAME + 4) for order, row in enumerate(rows)]
    return _row_chart(title, axis, scale, rows, [], drawn, table, keys)


def _row_chart(
    title: str,
    axis: Axis,
    scale: Scale,
    rows: Sequence[Spread | Bar],
    behind: Sequence[Markup],
    drawn: Sequence[Markup],
    table: Table | None,
    keys: Sequence[Key] = (),
) -> Figure:
    """What was drawn of each row under its name and note, above the axis."""
    bottom, right = len(rows) * ROW_HEIGHT + 4, WIDTH - RIGHT
    parts = [Markup('<path class="axis" d="M{} {}H{}"/>').format(ROW_LEFT, bottom, right)]
    parts += x_ticks(axis, scale, bottom)
    parts.append(Markup('<text class="title" x="{}" y="{}">{}</text>').format(right, bottom + 33, axis.title))
    parts += behind
    name = Markup('<text class="row" x="{}" y="{}">{}</text><text class="title" x="{}" y="{}">{}</text>')
    for order, (row, shape) in enumerate(zip(rows, drawn, strict=True)):
        height = order * ROW_HEIGHT + ROW_NAME - 2
        parts += [name.format(ROW_LEFT, height, row.name, right, height, row.note), shape]
    described = f"{title}. " + ". ".join(f"{row.name}: {row.note or 'no result'}" for row in rows) + "."
    drawing = frame(parts, described, len(rows) * ROW_HEIGHT + ROW_BOTTOM)
    return Figure(title, drawing, described, table, tuple(keys))


def _bar(row: Bar, scale: Scale, top: float) -> Markup:
    """The parts of a bar; the name of each is shown under the pointer."""
    shape = Markup('<g class="look{}"><rect class="fill" x="{:.2f}" y="{}" width="{:.2f}" height="15">{}</rect></g>')
    names = [Markup("<title>{}</title>").format(name) for name in row.names] or [Markup("")] * len(row.parts)
    return Markup("").join(
        shape.format(look, scale(start), top, max(scale(start + length) - scale(start), 0.4), name)
        for (start, length, look), name in zip(row.parts, names, strict=True)
    )


def _interval(row: Spread, scale: Scale, height: float) -> Markup:
    parts = [Markup('<circle class="value" cx="{:.1f}" cy="{}" r="2.2"/>').format(scale(v), height) for v in row.values]
    if row.low is not None and row.high is not None:
        shape = '<path class="bar" d="M{:.1f} {}H{:.1f}"/>'
        parts.append(Markup(shape).format(scale(row.low), height, scale(row.high)))
    if row.mean is not None:
        parts.append(dot(scale(row.mean), height, row.look))
    return Markup('<g class="look{}">{}</g>').format(row.look, Markup("").join(parts))
