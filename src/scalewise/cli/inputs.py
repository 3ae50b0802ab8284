"""What commands that train have in common: the recipe as flags, and what must be there before they start."""

from __future__ import annotations

import contextlib
import dataclasses
import json as to_json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import Group, Parameter
from rich.console import Console

from scalewise.errors import UsageError
from scalewise.present import terminal
from scalewise.present.live import StatusView, downloading
from scalewise.present.stored import Stored
from scalewise.present.story import Story
from scalewise.recipe import Recipe
from scalewise.records import finite

if TYPE_CHECKING:
    from cyclopts import Token
    from pydantic.fields import FieldInfo


RECIPE = Group("Recipe (how it is learned; part of the result)", sort_key=1)
PLACEMENT = Group("Placement (where it runs; never changes an exact result)", sort_key=2)
OUTPUT = Group("Output", sort_key=3)


def recipe_flags(module: str, without: Collection[str] = ()) -> type:
    """A dataclass with every recipe field as an optional flag: the recipe is the one list of them.

    Arguments:
        module: the module of the command, in which the flags' types are looked up.
        without: fields that the command gives a meaning of its own.
    """
    columns = [
        (
            name,
            Annotated[field.annotation | None, _flag(field)],  # type: ignore[operator]
            dataclasses.field(default=None),
        )
        for name, field in Recipe.model_fields.items()
        if name not in without
    ]
    return dataclasses.make_dataclass("RecipeFlags", columns, frozen=True, namespace={"__module__": module})


def _flag(field: FieldInfo) -> Parameter:
    whole = field.annotation is int or int in get_args(field.annotation)
    return Parameter(help=field.description, group=RECIPE, converter=_whole_number if whole else None)


def _whole_number(kind: object, tokens: Sequence[Token]) -> int | None:
    """Not 2 for 2.5, as the converter to int would have it."""
    text = tokens[0].value
    if text.lower() in ("none", "null"):
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text}") from None


def given_fields(flags: object) -> dict[str, Any]:
    """The recipe fields that were given as flags."""
    return {name: value for name, value in vars(flags).items() if value is not None}


def whole_numbers(text: str, flag: str) -> list[int]:
    """Several numbers of one flag, as in 1,2,4."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{flag} must be whole numbers with commas, got {text!r}; write for example {flag} 2,4"
        ) from None


def download(task_spec: str, data: Path | None, quiet: bool) -> None:
    """Fetch a built-in task's data, where they are nowhere to be found, before anybody waits for them in silence."""
    from scalewise.tasks import BUILT_IN, sources

    source = BUILT_IN[task_spec].published() if task_spec in BUILT_IN else None
    if source is not None and sources.find(source, data) is None:
        with downloading(quiet) as show:
            sources.read(source, data, show)


def options(arguments: Mapping[str, Any], subject: str = "task") -> dict[str, Any]:
    """The flags of a command that were given, as keywords of its question: the recipe's fields beside the others.

    Arguments:
        arguments: `locals()` at the start of the command.
        subject: what the question is about, which is no keyword.
    """
    own = {name: value for name, value in arguments.items() if name not in (subject, "flags", "json", "quiet")}
    given = given_fields(arguments["flags"]) if "flags" in arguments else {}
    return {name: value for name, value in own.items() if value is not None} | given


@contextlib.contextmanager
def asking(quiet: bool, task: str = "", data: Path | None = None) -> Iterator[StatusView]:
    """Show what is being done, once a task's data are here; what a task prints goes to stderr: stdout is for JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        download(task, data, quiet)
        view = StatusView(quiet)
        with view.live():
            yield view


def show(
    story_of: Callable[[Stored], Story],
    document: dict[str, Any],
    folder: Path | None,
    console: Console,
    json: bool,
    notes: Iterable[str] = (),
) -> Stored:
    """Draw an answer, leave its page in the folder, and print the JSON document where asked for; returns it."""
    if folder is not None:
        leave_page(folder, console)
    terminal.show(console, story_of(Stored(document)))
    for line in [*notes, *([] if folder is None else [f"folder {folder}"])]:
        console.print(line, style="dim", markup=False)
    if json:
        print(to_json.dumps(finite(document), indent=2), file=sys.__stdout__, flush=True)  # not redirected
    return Stored(document)


def leave_page(folder: Path, console: Console) -> None:
    """Write report.html into the folder of a run that has ended; that this failed is said, and nothing more."""
    from scalewise.present.page import leave

    problem = leave(folder)
    if problem:
        console.print(problem, style="yellow", markup=False)
