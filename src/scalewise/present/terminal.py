"""Any story in a terminal, with rich: the answer, the facts, tables side by side where there is room, the notes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from scalewise.present.story import (
    Cell,
    Command,
    Fact,
    Figure,
    Finding,
    Lanes,
    Meter,
    Plot,
    Section,
    Shown,
    Sparkline,
    Story,
    Table,
    Tone,
)
from scalewise.present.words import percent, rough

STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "good": "green",
    "bad": "red",
    "warning": "yellow",
    "dim": "dim",
}
SEVERITIES = {"high": "bold white on red", "medium": "black on yellow", "low": "black on cyan"}
MARKERS = "●○◆◇▲△■□"
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white", "bright_black")
HEIGHTS, EIGHTHS, SHADE, RULE = "▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉", "░", "━"
GAP, COLUMN_GAP = 4, 2  # between tables side by side, and between the columns of one
LEAST_WORDS = 24  # columns of text are not squeezed below this
PLOT_WIDTH, PLOT_HEIGHT = 56, 9


def console(quiet: bool = False) -> Console:
    """Where people read: stderr."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def show(where: Console, story: Story) -> None:
    """Draw a story, without the parts that a page folds away."""
    where.print()
    where.print(drawn(story, where.width))


def text(story: Story, width: int = 80) -> str:
    """A story as plain text."""
    return plain(drawn(story, width), width)


def plain(thing: RenderableType, width: int = 80) -> str:
    """Anything that rich draws, as plain text."""
    where = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    where.print(thing)
    assert isinstance(where.file, io.StringIO)
    return "\n".join(line.rstrip() for line in where.file.getvalue().splitlines())


def drawn(story: Story, width: int) -> Group:
    """A story for a terminal of this width."""
    parts: list[RenderableType] = [
        *([Text(story.question, style="dim")] if story.question else []),
        *([Text(story.answer, style=f"bold {STYLES[story.tone]}")] if story.answer else []),
        *(Text(problem, style="yellow") for problem in story.problems),
    ]
    facts = [fact for fact in story.facts if fact.place != "page"]
    parts += [""] if parts and facts else []
    parts += [fact_list(facts)] if facts else []
    sections = [section for section in story.sections if not section.folded]
    parts += _laid_out([(_is_compact(section), section_view(section, width)) for section in sections], width)
    if story.notes:
        parts += ["", _notes(story.notes)]
    return Group(*parts)


def fact_list(facts: Sequence[Fact]) -> Grid:
    """Names, values and notes."""
    grid = Grid.grid(padding=(0, COLUMN_GAP, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in facts:
        note = (f"{'  ' if fact.value else ''}{fact.note}", "dim") if fact.note else ""
        grid.add_row(fact.name, Text.assemble((fact.value, STYLES[fact.tone]), note))
    return grid


def _notes(notes: Sequence[str]) -> RenderableType:
    if len(notes) == 1:
        return Text(notes[0], style="dim", overflow="fold")
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(style="dim", overflow="fold")
    for note in notes:
        grid.add_row("·", Text(note))
    return grid


def section_view(section: Section, width: int) -> RenderableType | None:
    """A section's title, lead and blocks; None if it has nothing for a terminal."""
    blocks = section.shown("terminal")
    views = [(isinstance(block, str | Cell), block_view(block, width)) for block in blocks]
    shown = [(is_line, view) for is_line, view in views if view is not None]
    if not shown:
        return None
    explains_figure = any(isinstance(block, Figure) and block.plot is None for block in section.shown("page"))
    parts: list[RenderableType] = [Text(section.title, style="bold")] if section.title else []
    if section.lead and not explains_figure:
        parts.append(Text(section.lead, style="dim"))
    for place, (is_line, view) in enumerate(shown):
        parts += ["", view] if place and not is_line and not shown[place - 1][0] else [view]
    return Group(*parts)


def block_view(block: Shown, width: int) -> RenderableType | None:
    """One block; None for what only a page has."""
    if isinstance(block, str):
        return Text(block)
    if isinstance(block, Cell):
        return Text(block.text, style=STYLES[block.tone])
    if isinstance(block, Table):
        grid = table_view(block, width)
        return Group(grid, Text(block.legend, style="dim")) if block.legend else grid
    if isinstance(block, Figure):
        if isinstance(block.plot, Lanes):
            return lanes_view(block.plot, width)
        return None if block.plot is None else plot_view(block.plot)
    if isinstance(block, Command):
        return Text(block.text, style="cyan", overflow="fold")
    return finding_view(block) if isinstance(block, Finding) else None


def _is_compact(section: Section) -> bool:
    """Whether a section may stand beside another: it is a table and nothing else."""
    blocks = section.shown("terminal")
    tables = [block for block in blocks if isinstance(block, Table) and not block.legend]
    drawn_otherwise = [block for block in blocks if not isinstance(block, Figure | Table)]
    leads = section.lead and not any(isinstance(block, Figure) for block in section.blocks)
    return len(tables) == 1 and not drawn_otherwise and not leads


def _laid_out(views: Sequence[tuple[bool, RenderableType | None]], width: int) -> list[RenderableType]:
    """Sections one below the other, each after an empty line; compact ones side by side where there is room."""
    wide = Console(width=1000)
    parts: list[RenderableType] = []
    row: list[RenderableType] = []
    known = [(compact, view) for compact, view in views if view is not None]
    for place, (compact, view) in enumerate(known):
        row.append(view)
        following = known[place + 1 : place + 2]
        if compact and following and following[0][0]:
            needed = sum(wide.measure(one).maximum for one in (*row, following[0][1])) + GAP * len(row)
            if needed <= width:
                continue
        beside = Grid.grid(padding=(0, GAP, 0, 0))
        beside.add_row(*row)
        parts += ["", row[0] if len(row) == 1 else beside]
        row = []
    return parts


def table_view(table: Table, width: int) -> Grid:
    """A table without lines; columns for which there is no room are left out, as far as the table can spare them."""
    places = [*range(len(table.columns))]
    heads = {place: _heading(table, place) for place in places}
    for name in table.spare:
        if sum(_width(table, place, heads[place]) + COLUMN_GAP for place in places) - COLUMN_GAP > width:
            places = [place for place in places if table.columns[place] != name]
    grid = Grid(
        box=None,
        padding=(0, COLUMN_GAP, 0, 0),
        pad_edge=False,
        header_style="dim",
        show_header=any(table.columns),
    )
    for place in places:
        is_words = place in table.words
        grid.add_column(
            heads[place],
            justify="right" if table.is_number(place) and not table.is_drawn(place) else "left",
            no_wrap=not is_words,
            overflow="fold" if is_words else "ellipsis",
        )
    for order, row in enumerate(table.rows):
        grid.add_row(*(_cell(row[place]) for place in places), style="bold" if order == table.own else None)
    return grid


def _heading(table: Table, place: int) -> str:
    """A heading on as many lines as it takes not to be wider than the cells under it; soft hyphens may be used."""
    body = max((cell_len(_cell(row[place]).plain) for row in table.rows), default=0)
    name = table.columns[place].replace("\u00ad", "- ")
    lines = textwrap.wrap(name, max([body, *map(len, name.split()), 1]), break_on_hyphens=False)
    return "\n".join(lines).replace("- ", "")


def _width(table: Table, place: int, head: str) -> int:
    cells = [cell_len(_cell(row[place]).plain) for row in table.rows]
    longest = max([*cells, *(cell_len(line) for line in head.split("\n"))])
    return min(longest, LEAST_WORDS) if place in table.words else longest


def _cell(value: str | Cell | Meter | Sparkline) -> Text:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Cell):
        return Text(value.text, style=STYLES[value.tone])
    if isinstance(value, Sparkline):
        return Text(heights(value.values, value.log, value.top), style=COLOURS[value.look % len(COLOURS)])
    return meter(value)


def meter(value: Meter) -> Text:
    """Parts of a bar, the last one exact to an eighth of a character.

    >>> meter(Meter(((0.5, 0),), width=5)).plain, meter(Meter(((0.4, 0), (0.4, 1)), 5, frozenset({1}))).plain
    ('██▌  ', '██░░ ')
    """
    found, start = Text(), 0.0
    for place, (share, look) in enumerate(value.parts):
        cells = max(0.0, start + share * value.width - len(found))
        start += share * value.width
        last = place == len(value.parts) - 1 and place not in value.waited
        full, eighths = divmod(round(8 * cells), 8) if last else (round(cells), 0)
        fill = (SHADE if place in value.waited else "█") * full + EIGHTHS[eighths].strip()
        found.append(fill, style=COLOURS[look % len(COLOURS)])
    return found.append(" " * max(0, value.width - len(found)))


def heights(values: Sequence[float | None], log: bool = False, top: float | None = None) -> str:
    """Values as heights: from 0 to the largest, or from the least on a logarithmic axis.

    >>> heights([0.0, 0.5, 1.0]), heights([0.01, 1.0, None], log=True)
    ('▁▅█', '▁██')
    """
    if log:  # what is not finite is highest
        places = [math.inf if value is None else math.log(max(value, 1e-12)) for value in values]
        finite = [place for place in places if math.isfinite(place)] or [0.0]
        low, high = min(finite), max(finite)
    else:
        places = [value or 0.0 for value in values]
        low, high = 0.0, top if top is not None else max(places, default=0.0)
    shares = [min(1.0, max(0.0, (place - low) / (high - low or 1.0))) for place in places]
    return "".join(HEIGHTS[round(share * (len(HEIGHTS) - 1))] for share in shares)


def finding_view(finding: Finding) -> Group:
    """A finding of the doctor: how bad, what was seen, what to do."""
    title = Text.assemble(
        (f" {finding.severity} ", SEVERITIES.get(finding.severity, "bold")),
        (f"  {finding.title}", "bold"),
        (f"  {finding.cause}" if finding.cause else "", "dim"),
    )
    facts = fact_list([Fact("seen", finding.evidence), Fact("fix", finding.fix, tone="good")])
    return Group(title, Padding(facts, (0, 0, 0, 3)))


def plot_view(plot: Plot) -> Text:
    """Points on a grid of characters, the x axis logarithmic, one marker a name."""
    points = [point for _, found in plot.points for point in found]
    places = sorted({x for x, _ in points})
    low, high = min(y for _, y in points), max(y for _, y in points)
    cells = [[(" ", "")] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for order, (_, found) in enumerate(plot.points):
        for x, y in found:
            share = 0.5 if high == low else (y - low) / (high - low)
            mark = MARKERS[order % len(MARKERS)], COLOURS[order % len(COLOURS)]
            cells[round((1 - share) * (PLOT_HEIGHT - 1))][_column(x, places)] = mark
    drawing = Text()
    for height, line in enumerate(cells):
        at = high - (high - low) * height / (PLOT_HEIGHT - 1)
        named = height in (0, PLOT_HEIGHT // 2, PLOT_HEIGHT - 1)
        drawing.append(f"{(percent(at, 2) if plot.shares else rough(at)) if named else '':>8} │ ")
        for character, colour in line:
            drawing.append(character, style=colour)
        drawing.append("\n")
    drawing.append(f"{'':>8} └{'─' * (PLOT_WIDTH + 2)}\n{' ' * 11}{_axis(places)}\n")
    for order, (name, _) in enumerate(plot.points):
        space = " " * (11 if order == 0 else 3)
        drawing.append(f"{space}{MARKERS[order % len(MARKERS)]} {name}", style=COLOURS[order % len(COLOURS)])
    return drawing


def _column(x: float, places: Sequence[float]) -> int:
    first, last = math.log2(places[0]), math.log2(places[-1])
    share = 0.5 if first == last else (math.log2(x) - first) / (last - first)
    return round(share * (PLOT_WIDTH - 6)) + 2


def _axis(places: Sequence[float]) -> str:
    """Numbers under their columns; those without room are left out."""
    line = ""
    for place in places:
        shown = f"{place:,.0f}"
        start = _column(place, places) - len(shown) // 2
        if start > len(line) or not line:
            line = line.ljust(max(start, 0)) + shown
    return line


def lanes_view(lanes: Lanes, width: int) -> Text:
    """Stretches of time, a line a lane, and what the letters stand for."""
    stop = max(start + length for _, stretches in lanes.rows for start, length, _, _ in stretches)
    label = COLUMN_GAP + max(cell_len(name) for name, _ in lanes.rows)
    drawing = Text.assemble((f"{lanes.title}\n", "dim"))
    for name, stretches in lanes.rows:
        drawing.append(f"{name:<{label}}", style="dim")
        for letter, look in _filled(stretches, stop / (width - label), width - label):
            drawing.append(letter, style=_letter_style(letter, look))
        drawing.append("\n")
    line = 0
    for letter, name, look in lanes.keys:
        shown = letter * 3 if letter == SHADE else f" {letter} "
        if line + len(shown) + len(name) + 1 > width:
            drawing.append("\n")
            line = 0
        drawing.append(shown, style=_letter_style(letter, look)).append(f" {name}  ", style="dim")
        line += len(shown) + len(name) + 3
    return drawing


def _filled(stretches: Sequence[tuple[float, float, str, int]], cell: float, count: int) -> list[tuple[str, int]]:
    """The letter and look that fill most of each cell; a space where nothing fills half of it."""
    filled: list[dict[tuple[str, int], float]] = [{} for _ in range(count)]
    for start, length, letter, look in stretches:
        for place in range(int(start / cell), min(count, int((start + length) / cell) + 1)):
            share = min(start + length, (place + 1) * cell) - max(start, place * cell)
            filled[place][letter, look] = filled[place].get((letter, look), 0.0) + max(0.0, share)
    return [
        max(parts, key=lambda part: parts[part]) if sum(parts.values()) >= cell / 2 else (" ", -1) for parts in filled
    ]


def _letter_style(letter: str, look: int) -> str:
    colour = COLOURS[look % len(COLOURS)]
    return "" if letter == " " else colour if letter in (SHADE, RULE) else f"black on {colour}"
