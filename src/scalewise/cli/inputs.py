"""What commands that train have in common: the recipe as flags, and what must be there before they start."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from scalewise.cli import views
from scalewise.engine.placement import DeviceName
from scalewise.errors import RunFolderError
from scalewise.recipe import Recipe

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
            Annotated[field.annotation | None, Parameter(help=field.description, group=RECIPE)],  # type: ignore[operator]
            dataclasses.field(default=None),
        )
        for name, field in Recipe.model_fields.items()
        if name not in without
    ]
    return dataclasses.make_dataclass("RecipeFlags", columns, frozen=True, namespace={"__module__": module})


def download(task_spec: str, data: Path | None, quiet: bool) -> None:
    """Fetch a built-in task's data, where they are nowhere to be found, before anybody waits for them in silence."""
    from scalewise.tasks import BUILT_IN, sources

    source = BUILT_IN[task_spec].published() if task_spec in BUILT_IN else None
    if source is not None and sources.find(source, data) is None:
        view = views.DownloadView(quiet)
        with view.live():
            sources.read(source, data, view.show)


def resumed_folder(resume: str | None, out: Path | None, name: str, file: str) -> Path | None:
    """The folder that --resume names, if it names one: a folder, or `auto` for --out or the newest one of that name.

    Arguments:
        resume, out: as given.
        name: what folders under runs/ begin with.
        file: what a folder to go on from holds.
    """
    from scalewise.engine.run import newest

    if resume is None:
        return None
    if resume != "auto":
        if out is not None:
            raise RunFolderError(f"--resume {resume} goes on in that folder; drop --out {out}")
        return Path(resume)
    if out is None:
        return newest(name, Path("runs"), file)
    return out if (out / file).is_file() else None


def compiles(device: DeviceName) -> bool:
    """Whether torch.compile finds what it needs."""
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return device == "cuda" or any(shutil.which(name) for name in names)
