"""A result as a story: what was asked, the answer in a sentence, facts, tables, figures, and the line to type.

A story is made once, by `present/stories/<kind>.py`, from the JSON document that the run stores, and drawn twice:
`present/terminal.py` draws it with rich, `present/page.py` as HTML. It is plain text: each renderer escapes it.

>>> from scalewise.present import terminal
>>> rows = (("naive", Cell("91.0 %", "bad")), ("auto", Cell("97.4 %", "good")))
>>> story = Story(
...     question="Which remedy brings the accuracy back?",
...     answer="auto, beyond seed noise.",
...     facts=(Fact("seeds", "5", "each row"),),
...     sections=(Section("Remedies", (Table(("row", "test accuracy"), rows, "All rows"),)),),
...     notes=("folder runs/compare-digits",),
... )
>>> print(terminal.text(story, width=60))
Which remedy brings the accuracy back?
auto, beyond seed noise.
<BLANKLINE>
seeds  5  each row
<BLANKLINE>
Remedies
           test
row    accuracy
naive    91.0 %
auto     97.4 %
<BLANKLINE>
folder runs/compare-digits

What goes where, without a word about it:
- a figure is drawn on the page; in a terminal only if it has a `plot`, else its section's `lead` is left out with it;
- a `Meter` or `Sparkline` fills a column that only a terminal has: the page has a figure for it;
- a folded section, a `Switch` and a `Planner` are for the page;
- columns named in `Table.spare` are left out, in this order, where a terminal is too narrow.
For anything else there is `Only("terminal", block)`: keep such exceptions few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from markupsafe import Markup

Part = TypeVar("Part")
Row = TypeVar("Row")
Tone = Literal["plain", "strong", "good", "bad", "warning", "dim"]
Place = Literal["terminal", "page"]


@dataclass(frozen=True)
class Cell:
    """Text with a tone, in a table or as a line of its own; a plain one is a `str`."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Meter:
    """A small bar in a cell: parts (share of the whole width, look) one after another; `waited` ones are shaded."""

    parts: tuple[tuple[float, int], ...]
    width: int = 24
    waited: frozenset[int] = frozenset()  # places in `parts`


@dataclass(frozen=True)
class Sparkline:
    """A small curve in a cell, from 0 to the largest value or `top`; or from the least, on a logarithmic axis."""

    values: tuple[float | None, ...]
    log: bool = False
    top: float | None = None
    look: int = 0


Value = str | Cell | Meter | Sparkline
Columns = Mapping[str, Callable[[Row], Value] | None]  # titles, and what a column makes of a row


@dataclass(frozen=True)
class Table:
    """Rows under columns. The first column names the row; the others are numbers unless they are in `words`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str
    words: frozenset[int] = frozenset()
    spare: tuple[str, ...] = ()
    own: int | None = None  # the row that the story is about
    legend: str = ""

    def is_number(self, column: int) -> bool:
        """Whether a column is aligned as numbers are."""
        return column > 0 and column not in self.words

    def is_drawn(self, column: int) -> bool:
        """Whether a column has drawings for a terminal."""
        return any(isinstance(row[column], Meter | Sparkline) for row in self.rows)

    def on_page(self) -> list[int]:
        """The columns that a page shows."""
        return [place for place in range(len(self.columns)) if not self.is_drawn(place)]

    def cells(self) -> list[list[Cell]]:
        """All cells as text; a drawing has none."""
        plain = [[value if isinstance(value, str | Cell) else "" for value in row] for row in self.rows]
        return [[value if isinstance(value, Cell) else Cell(value) for value in row] for row in plain]


def table_of(
    rows: Iterable[Row],
    columns: Columns[Row],
    caption: str,
    words: Collection[str] = (),
    spare: tuple[str, ...] = (),
    own: int | None = None,
    legend: str = "",
) -> Table:
    """A table with what each column makes of each row; a column of None is left out.

    >>> table_of([2, 3], {"n": str, "square": lambda n: str(n * n), "cube": None}, "Squares").rows
    (('2', '4'), ('3', '9'))
    """
    shown = {title: cell for title, cell in columns.items() if cell is not None}
    cells = tuple(tuple(cell(row) for cell in shown.values()) for row in rows)
    places = frozenset(place for place, title in enumerate(shown) if title in words)
    return Table(tuple(shown), cells, caption, places, spare, own, legend)


@dataclass(frozen=True)
class Key:
    """A line of a legend: which look has which name."""

    name: str
    look: int
    kind: Literal["line", "dots", "fill"] = "line"


@dataclass(frozen=True)
class Plot:
    """Points on a logarithmic x axis, for a terminal: one marker a name."""

    points: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    shares: bool = False  # the y axis in percent


@dataclass(frozen=True)
class Lanes:
    """What happens side by side, for a terminal: a line of cells a lane, each with the letter of what fills it most."""

    title: str
    # a lane's name and its stretches (start, length, letter, look); ░ is waiting, ━ a line
    rows: tuple[tuple[str, tuple[tuple[float, float, str, int], ...]], ...]
    keys: tuple[tuple[str, str, int], ...]  # what the letters stand for (letter, name, look)


@dataclass(frozen=True)
class Figure:
    """A drawing with its words: the description says what is to be seen, the table holds the numbers."""

    title: str
    drawing: Markup
    description: str
    table: Table | None  # None where the same table is on show anyway
    keys: tuple[Key, ...] = ()
    note: str = ""
    plot: Plot | Lanes | None = None


@dataclass(frozen=True)
class Switch:
    """The same figures against one thing or another, chosen on the page."""

    title: str
    choices: tuple[tuple[str, tuple[Figure, ...]], ...]


@dataclass(frozen=True)
class Finding:
    """A finding of the doctor."""

    title: str
    severity: str
    evidence: str
    fix: str
    cause: str = ""


@dataclass(frozen=True)
class Planner:
    """The plan that follows sliders: what the page's script gets, and the row it starts from."""

    data: object  # JSON


@dataclass(frozen=True)
class Command:
    """A line to type."""

    text: str


Shown = Table | Figure | Switch | Finding | Planner | Command | Cell | str


@dataclass(frozen=True)
class Only:
    """A block for a terminal, or for a page, alone."""

    place: Place
    block: Shown


Block = Shown | Only


@dataclass(frozen=True)
class Section:
    """A part of a story."""

    title: str
    blocks: tuple[Block, ...]
    lead: str = ""
    folded: bool = False

    def shown(self, place: Place) -> list[Shown]:
        """The blocks for a place."""
        unwrapped = [(block.place, block.block) if isinstance(block, Only) else (place, block) for block in self.blocks]
        return [block for own, block in unwrapped if own == place]


@dataclass(frozen=True)
class Fact:
    """A number that is read at a glance; one that only a terminal shows is said elsewhere on the page."""

    name: str
    value: str
    note: str = ""
    tone: Tone = "plain"
    place: Place | None = None


@dataclass(frozen=True)
class Story:
    """What one run, or several of a kind, have to say."""

    question: str
    answer: str
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    name: str = ""
    tone: Tone = "strong"  # of the answer


def kept(*parts: Part | None) -> tuple[Part, ...]:
    """The parts that exist: a section without anything to say is None.

    >>> kept("a", None, "b")
    ('a', 'b')
    """
    return tuple(part for part in parts if part is not None)
