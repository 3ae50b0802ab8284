"""What questions of a task have in common: the recipe they start from, the folder they resume, what they report.

Imports no torch, so that commands can show their help at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalewise.engine.placement import DeviceName, available_cores
from scalewise.errors import RunFolderError
from scalewise.recipe import Derived, Recipe, resolve

Notify = Callable[[str], None]


class Notice(str):
    """A line to keep on the screen; a plain line only says what is being done now."""


def single_recipe(base: Recipe, given: dict[str, Any], device: DeviceName) -> tuple[Recipe, list[Derived]]:
    """One worker's recipe, trained to the end of its budget, and what was derived for it."""
    recipe, derived = resolve(base, given, "auto", available_cores())
    if recipe.compile and not compiles(device):
        recipe = recipe.replace(compile=False)
    return recipe.replace(workers=1, patience=None, target=None), derived


def compiles(device: DeviceName) -> bool:
    """Whether torch.compile finds what it needs."""
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return device == "cuda" or any(shutil.which(name) for name in names)


def resumed_folder(resume: str | None, out: Path | None, name: str, file: str) -> Path | None:
    """The folder that --resume names, if it names one: a folder, or `auto` for --out or the newest one of that name.

    Arguments:
        resume, out: as given.
        name: what folders under runs/ begin with.
        file: what a folder to resume holds.
    """
    from scalewise.engine.store.folder import newest

    if resume is None:
        return None
    if resume != "auto":
        if out is not None:
            raise RunFolderError(f"--resume {resume} goes on in that folder; drop --out {out}")
        return Path(resume)
    if out is None:
        return newest(name, Path("runs"), file)
    return out if (out / file).is_file() else None
