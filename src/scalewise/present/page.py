"""The page: every story in one file of HTML that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from scalewise import __version__
from scalewise.errors import UsageError
from scalewise.present.charts import dot
from scalewise.present.stored import Run, read_run
from scalewise.present.stories.bench import benching_story
from scalewise.present.stories.compare import comparison_story
from scalewise.present.stories.forecast import forecasting_story
from scalewise.present.stories.measure import measurement_story
from scalewise.present.stories.plan import planning_story
from scalewise.present.stories.profile import profiling_story
from scalewise.present.stories.train import training_story
from scalewise.present.stories.tune import tuning_story
from scalewise.present.story import Story
from scalewise.records import write_atomically

FILE = "report.html"
GENERATOR = '<meta name="generator" content="scalewise '  # as the template has it
STORIES = {
    "compare": comparison_story,
    "measure": measurement_story,
    "plan": planning_story,
    "forecast": forecasting_story,
    "bench": benching_story,
    "profile": profiling_story,
    "tune": tuning_story,
}


# Within a script element only these could end it, begin a comment, or end a line of JavaScript.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@cache
def asset(name: str) -> str:
    """The text of a template, style or script of the page."""
    return (files("scalewise.present") / "assets" / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Everything that a page runs."""
    return "\n".join(asset(name) for name in ("plan_model.js", "planner.js", "page.js"))


@cache
def _environment() -> Environment:
    found = Environment(loader=FunctionLoader(asset), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.globals |= {"kind": lambda block: type(block).__name__, "dot": dot, "embedded": embedded}
    return found


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


def policy(live: bool) -> str:
    """What a browser may do with the page: run and apply what is in it by its hash, load nothing from elsewhere."""
    rules = [
        "default-src 'none'",
        f"script-src {source(script())}",
        f"style-src {source(asset('style.css'))}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'self'" if live else "form-action 'none'",
    ]
    return "; ".join([*rules, *(["connect-src 'self'"] if live else [])])


def stories(runs: Sequence[Run], inside: Path | None = None) -> list[Story]:
    """What the runs have to say: trainings together, every other folder for itself."""
    trained = [run for run in runs if run.kind == "train"]
    found = [training_story(trained, inside)] if trained else []
    for run in runs:
        if run.kind != "train":
            story = STORIES[run.kind](run.document)
            found.append(replace(story, name=run.name, problems=(*run.problems, *story.problems)))
    return found


def render(title: str, told: Sequence[Story], sources: str, live: str | None = None, home: str | None = None) -> str:
    """The page as HTML.

    Arguments:
        sources: which folders it was made from, for the last line.
        live: where a browser learns that there is something new; None for a file.
        home: where the list of runs is, if there is one.
    """
    shown = {"title": title, "stories": told, "sources": sources, "live": live, "home": home}
    return fill("page.html", **shown, policy=policy(live is not None))


def fill(template: str, **values: Any) -> str:  # noqa: ANN401  (whatever a template shows)
    """A template with values in it, all of them escaped but for what is Markup."""
    counter = itertools.count(1)
    environment = _environment()
    shared = environment.get_template("parts.html").make_module({"next_id": lambda: f"group{next(counter)}"})
    own = {
        "show_story": shared.show_story,  # type: ignore[attr-defined]
        "version": __version__,
        "style": Markup(asset("style.css")),
        "script": Markup(script()),
    }
    return environment.get_template(template).render(own | values)


def page(folders: Sequence[Path]) -> str:
    """The page of some run folders."""
    runs = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    title = ", ".join(run.name for run in runs)
    return render(title, stories(runs), ", ".join(map(str, folders)))


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their paths where those are not distinct."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of some run folders; by default report.html in the folder, or in the working folder for several.

    Refuses a place where no page can be written, or that holds something other than a page.
    """
    path = out or (runs[0] / FILE if len(runs) == 1 else Path(FILE))
    made = page(runs)
    if path.is_dir():
        raise UsageError(f"--out must be a file, got the folder {path}; write --out {path / FILE}")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} is not writable; name another file with --out")
    if path.exists() and not _is_page(path):
        raise UsageError(
            f"--out must be a new file or a page of scalewise, got {path}, which is neither; choose another"
        )
    write_atomically(path, made)
    return path


def _is_page(path: Path) -> bool:
    """Whether a file is a page that was written here, and may be overwritten."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(4_096)


def leave(folder: Path) -> str:
    """Write the page of a run that has ended into its folder; returns what went wrong: the run itself is done."""
    try:
        write_atomically(folder / FILE, page([folder]))
    except Exception as error:  # no page is worth a run
        return f"{folder / FILE} could not be written: {error!r}"
    return ""
