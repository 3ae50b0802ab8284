"""What a page is made of. Everything here is plain text until the template escapes it, but for drawings."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

Tone = Literal["plain", "good", "bad", "dim"]


@dataclass(frozen=True)
class Cell:
    """A cell that is more than a plain value."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Table:
    """Rows under columns. The first column names the row; the others are numbers unless they are in `words`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    caption: str
    words: frozenset[int] = frozenset()

    def is_number(self, column: int) -> bool:
        """Whether a column is aligned as numbers are."""
        return column > 0 and column not in self.words

    def cells(self) -> list[list[Cell]]:
        """All cells as such."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Key:
    """A line of a legend: which look has which name."""

    name: str
    look: int
    kind: Literal["line", "dots", "fill"] = "line"


@dataclass(frozen=True)
class Figure:
    """A drawing with its words: the description says what is to be seen, the table holds the numbers."""

    title: str
    drawing: Markup
    description: str
    table: Table | None  # None where the same table is on show anyway
    keys: tuple[Key, ...] = ()
    note: str = ""


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


@dataclass(frozen=True)
class Planner:
    """The plan that follows sliders: what the page's script gets, and the row it starts from."""

    data: str  # JSON


@dataclass(frozen=True)
class Command:
    """A line to type."""

    text: str


Block = Table | Figure | Switch | Finding | Planner | Command | str


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    blocks: tuple[Block, ...]
    lead: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Fact:
    """A number that is read at a glance."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Story:
    """What one run, or several of a kind, have to say."""

    name: str
    question: str
    answer: str
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = ()
    problems: tuple[str, ...] = field(default=())


ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded(value: object) -> Markup:
    """A JSON value for a script element of type application/json.

    >>> print(embedded({"name": "</script><b>"}))
    {"name": "\\u003c/script\\u003e\\u003cb\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return Markup("".join(ESCAPES.get(character, character) for character in text))


def source(text: str) -> str:
    """The name by which a content security policy allows one style or script, and nothing else."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
