"""How it was learned and where: the recipe with its reasons, and the environment."""

from __future__ import annotations

from scalewise.report.folders import Run
from scalewise.report.pieces import Block, Section, Table
from scalewise.report.stored import Stored
from scalewise.report.wording import count


def recipe_section(run: Run, named: bool) -> Section | None:
    """The recipe; first what was derived, with the reason."""
    stored = run.recipe
    fields = stored.part("recipe").items()
    if not fields:
        return None
    blocks: list[Block] = []
    reasons = derived_table(stored)
    if reasons is not None:
        blocks.append(reasons)
    own = dict(run.environment.part("task", "recipe").items())
    rows = tuple((name, value.shown(), _own(value, own.get(name))) for name, value in fields)
    blocks.append(Table(("field", "value", "task's own"), rows, "Every field of the recipe", frozenset({1, 2})))
    task = " ".join([stored.text("task"), *(setting.shown() for setting in stored.parts("settings"))])
    return Section(f"Recipe{f' of {run.name}' if named else ''}", tuple(blocks), f"Task: {task}.", folded=True)


def _own(value: Stored, own: Stored | None) -> str:
    """What the task's own recipe says, where that is something else."""
    return "" if own is None or own.value == value.value else own.shown()


def derived_table(stored: Stored) -> Table | None:
    """What nobody gave, with the reason."""
    rows = tuple((one.text("field"), one.part("value").shown(), one.text("reason")) for one in stored.parts("derived"))
    return Table(("derived", "value", "because"), rows, "What was derived", frozenset({1, 2})) if rows else None


def environment_section(run: Run, named: bool) -> Section | None:
    """Versions, processor and placement."""
    plain = [(name, value.shown()) for name, value in run.environment.items() if not value.is_object]
    model = run.environment.part("model")
    if model.number("parameters") is not None:
        plain.append(("model", count(model.number("parameters"), "parameter")))
    samples = run.environment.number("task", "samples")
    if samples is not None:
        plain.append(("training samples", f"{samples:,.0f}"))
    if not plain:
        return None
    table = Table(("what", "value"), tuple(plain), "Environment", frozenset({1}))
    return Section(f"Environment{f' of {run.name}' if named else ''}", (table,), folded=True)
