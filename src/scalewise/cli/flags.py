"""Flags that mean the same in every command that has them: type, group and help; and the recipe as flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import Group, Parameter

from scalewise.engine.placement import DeviceName, ReduceName
from scalewise.recipe import Recipe

if TYPE_CHECKING:
    from cyclopts import Token
    from pydantic.fields import FieldInfo

RECIPE = Group("Recipe (how it is learned; part of the result)", sort_key=1)
PLACEMENT = Group("Placement (where it runs; never changes an exact result)", sort_key=2)
OUTPUT = Group("Output", sort_key=3)

TaskName = Annotated[
    str, Parameter(help="A built-in name, path/to/file.py (its task() function), or package.module:function.")
]
Settings = Annotated[
    list[str] | None, Parameter(negative=(), help="name=value for the task's function; may be repeated.")
]
DataFolder = Annotated[
    Path | None,
    Parameter(
        group=PLACEMENT,
        help="Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go "
        "there.",
    ),
]
Device = Annotated[DeviceName, Parameter(group=PLACEMENT, help="Kind of device.")]
Reduce = Annotated[
    ReduceName,
    Parameter(
        group=PLACEMENT,
        help="How gradients are summed: ordered and server are exact, allreduce is the backend's own.",
    ),
]
ShardOptimizer = Annotated[
    bool,
    Parameter(
        group=PLACEMENT,
        negative=(),
        help="Each process updates, and keeps optimizer state for, its part of the parameters.",
    ),
]
Loaders = Annotated[
    int | None,
    Parameter(
        group=PLACEMENT,
        help="Loader processes of each process, for data that are not in memory; by default the cores shared out, at "
        "most 8.",
    ),
]
Json = Annotated[bool, Parameter(group=OUTPUT, negative=(), help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, Parameter(group=OUTPUT, negative=(), help="Draw nothing.")]


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
