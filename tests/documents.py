"""The blocks of Markdown pages, and how their tests are declared: see CONTRIBUTING.md.

A comment right before a block says what its test needs, one statement a line, each for all commands of the block or for
those that begin with the words before the colon:

    <!-- test
    given runs/one                              made beforehand: a key of `GIVEN` in test_docs.py
    scalewise compare: with --seeds 1           flags to add, or to put in place of the same ones
    exit 3                                      the exit code that is right
    serve: stopped because it runs until Ctrl-C
    sbatch: only parsed because there is no cluster here
    -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERBS = ("given", "with", "exit", "stopped because", "only parsed because")
STATEMENT = re.compile(rf"(?:(?P<prefix>[^:]+): )?(?P<verb>{'|'.join(VERBS)}) (?P<rest>.+)")
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>[^`]*)$")


@dataclass(frozen=True)
class Statement:
    prefix: str
    verb: str
    rest: str


@dataclass(frozen=True)
class Command:
    """One command of a block, as the reader sees it, and how it is tested."""

    text: str
    added: tuple[str, ...]
    code: int
    stopped: str | None
    only_parsed: str | None

    @property
    def words(self) -> list[str]:
        """What is run: with the flags that the test adds."""
        words = shlex.split(self.text, comments=True)
        while re.match(r"[A-Z_]+=", words[0]):  # a variable for the command alone
            words = words[1:]
        return with_flags(words, self.added)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    statements: tuple[Statement, ...]

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def given(self) -> list[str]:
        return [name for one in self.statements if one.verb == "given" for name in one.rest.split()]

    def commands(self) -> Iterator[Command]:
        """The commands in order; a line that ends with a backslash goes on."""
        for line in self.text.replace("\\\n", " ").splitlines():
            text = line.removeprefix("$ ").strip()
            if shlex.split(text, comments=True):
                yield self._command(text)

    def _command(self, text: str) -> Command:
        def said(verb: str) -> str | None:
            fitting = [one for one in self.statements if one.verb == verb and text.startswith(one.prefix)]
            return max(fitting, key=lambda one: len(one.prefix)).rest if fitting else None

        return Command(
            text=text,
            added=tuple(shlex.split(said("with") or "")),
            code=int(said("exit") or 0),
            stopped=said("stopped because"),
            only_parsed=said("only parsed because"),
        )


def with_flags(words: list[str], added: tuple[str, ...]) -> list[str]:
    """Add flags; one that is there already gets the new value.

    >>> with_flags(["train", "--steps", "90", "--json"], ("--steps", "2", "--seed", "1"))
    ['train', '--json', '--steps', '2', '--seed', '1']
    """
    names = {word for word in added if word.startswith("--")}
    kept, dropping = [], False
    for word in words:
        dropping = word in names if word.startswith("--") else dropping
        if not dropping:
            kept.append(word)
    return [*kept, *added]


def pages() -> list[Path]:
    """Everything that people read."""
    written = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    return written + sorted(path for path in (ROOT / "docs").rglob("*.md") if "build" not in path.parts)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, each with the statements of the comment right before it."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    statements: tuple[Statement, ...] = ()
    number = 0
    while number < len(lines):
        start, line = number + 1, lines[number]
        number += 1
        if line.startswith("<!-- test"):
            comment, number = _until(lines, number - 1, "-->")
            statements = _statements(comment, f"{page}:{start}")
        elif fence := FENCE.match(line):
            body, number = _until(lines, number, fence["ticks"])
            found.append(Block(page, start, fence["language"].strip(), "\n".join(body[:-1]), statements))
            statements = ()
        elif line.strip():
            assert not statements, f"{page}:{start}: a test comment must be followed by a block, found {line!r}"
    return found


def _until(lines: list[str], start: int, end: str) -> tuple[list[str], int]:
    """The lines from `start` to the one that ends with `end`, and the number of the next one."""
    stop = next(number for number in range(start, len(lines)) if lines[number].endswith(end))
    return lines[start : stop + 1], stop + 1


def _statements(comment: list[str], where: str) -> tuple[Statement, ...]:
    text = "\n".join(comment).removeprefix("<!-- test").removesuffix("-->").removeprefix(":")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        read = STATEMENT.fullmatch(line)
        assert read, f"{where}: a test statement is [WORDS: ]{' | '.join(VERBS)} …, got {line!r}"
        found.append(Statement(read["prefix"] or "", read["verb"], read["rest"]))
    return tuple(found)
