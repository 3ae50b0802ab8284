"""Two directives that read the program itself when the documentation is built: its commands, its recipe."""

import inspect
import types
import typing

from cyclopts import App
from cyclopts.argument import Argument
from docutils import nodes
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from scalewise.cli import app
from scalewise.recipe import Recipe

RECIPE_GROUP = "Recipe"


def commands(of: App, prefix: tuple[str, ...] = ()) -> list[tuple[str, App]]:
    """Every command with its whole name, in the order of the program's own list."""
    found = []
    for name in of:
        if not name.startswith("-"):
            inner = commands(of[name], (*prefix, name))
            found += inner or [(" ".join((*prefix, name)), of[name])]
    return found


def cell(text: object) -> str:
    """Text that ends no column of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def kind_of(annotation: object) -> str:
    """A type as people write it on a command line."""
    choices = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return " or ".join(kind_of(part) for part in choices)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in choices)
    if choices:
        return kind_of(choices[0]) + " …"
    words = {int: "whole number", float: "number", str: "text", bool: "yes or no"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def shown_default(argument: Argument) -> str:
    """What holds when a flag is not given."""
    default = argument.field_info.default
    if default in (None, inspect.Parameter.empty, False, ()) or default == []:
        return ""
    return f" Default: `{default}`."


def flag_row(argument: Argument) -> str:
    """One line of a command's table."""
    names = ", ".join(f"`{name}`" for name in argument.names)
    help_text = (argument.parameter.help or "").rstrip(".")
    kind = "" if argument.hint is bool else kind_of(argument.hint)
    return f"| {names} | {cell(kind)} | {cell(help_text)}.{cell(shown_default(argument))} |"


def command_text(name: str, command: App) -> str:
    """A command's section, in Markdown."""
    arguments = [one for one in command.assemble_argument_collection(parse_docstring=True) if one.show]
    groups: dict[str, list[Argument]] = {}
    for argument in arguments:
        groups.setdefault(argument.parameter.group[0].name, []).append(argument)
    positional = " ".join(one.names[0] for one in groups.get("Arguments", []))
    parts = [f"## scalewise {name}", command.help, f"```text\nscalewise {name} {positional} [options]\n```"]
    for group, members in sorted(groups.items(), key=lambda pair: _place(pair[0])):
        if group.startswith(RECIPE_GROUP):
            parts.append(recipe_sentence(members))
            continue
        rows = "\n".join(flag_row(one) for one in members)
        parts.append(f"**{group}**\n\n| | value | meaning |\n|---|---|---|\n{rows}")
    return "\n\n".join(parts) + "\n"


def _place(group: str) -> int:
    """Where a group of flags stands on the page: as in --help."""
    last = (RECIPE_GROUP, "Placement", "Output")
    return next((number for number, name in enumerate(last, 1) if group.startswith(name)), 0)


def recipe_sentence(members: list[Argument]) -> str:
    """Which recipe fields are flags of a command."""
    given = {one.names[0].removeprefix("--").replace("-", "_") for one in members}
    missing = [f"`--{name.replace('_', '-')}`" for name in Recipe.model_fields if name not in given]
    rest = f", except {', '.join(missing)}" if missing else ""
    return f"**Recipe**: every [field of the recipe](recipe.md) is a flag{rest}."


def field_row(name: str, field: FieldInfo) -> str:
    """One line of the recipe's table."""
    default = "–" if field.default in (None, PydanticUndefined) else f"`{field.default}`"
    return f"| `{name}` | {cell(kind_of(field.annotation))} | {default} | {cell(field.description)}. |"


class Commands(SphinxDirective):
    """Every command of the program, from the program."""

    def run(self) -> list[nodes.Node]:
        text = "\n".join(command_text(name, command) for name, command in commands(app))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class RecipeFields(SphinxDirective):
    """Every field of the recipe, from the recipe."""

    def run(self) -> list[nodes.Node]:
        rows = "\n".join(field_row(name, field) for name, field in Recipe.model_fields.items())
        return self.parse_text_to_nodes(f"| field | value | default | meaning |\n|---|---|---|---|\n{rows}\n")


def readable(signature: str | None) -> str | None:
    """A signature that Sphinx can read: made defaults are not Python."""
    return signature and signature.replace("<factory>", "...")


def setup(sphinx: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    sphinx.connect(
        "autodoc-process-signature", lambda app, what, name, of, options, given, back: (readable(given), back)
    )
    sphinx.add_directive("commands", Commands)
    sphinx.add_directive("recipe-fields", RecipeFields)
    return {"parallel_read_safe": True}
