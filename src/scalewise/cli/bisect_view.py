"""Where two runs part, drawn for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from scalewise.runs.bisect import Comparison, Parting
    from scalewise.runs.replay import Replay

STAGES = {
    "start": "the weights before it",
    "samples": "the training samples",
    "loss": "the loss",
    "gradient": "the gradient",
    "update": "the weights after its update",
}
WHY = {
    "seed": "other start weights, another order of the samples, other random numbers",
    "threads": "sums are taken in another order",
    "cpu_capability": "another instruction set: other kernels",
    "torch": "another version: other kernels",
    "machine": "another processor architecture: other kernels",
    "device": "another device: other kernels",
    "training data": "the data are not the same",
    "exact": "one of them gave exactness up (--reduce allreduce)",
}
NOT_RECORDED = (
    "nothing that was recorded differs: look for a silent fault, for a task whose code or data changed between the "
    "two, or for one that is not deterministic"
)


def bisect_view(
    found: Comparison, again: tuple[Parting, tuple[Replay, Replay]] | None, runs: tuple[str, str]
) -> RenderableType:
    """What was compared, where the runs part, and why that may be."""
    parts: list[RenderableType] = [
        Text.assemble(("left   ", "dim"), runs[0]),
        Text.assemble(("right  ", "dim"), runs[1]),
        "",
    ]
    parts += [Text(problem, style="yellow") for problem in found.problems]
    if not found.differ:
        return Group(*parts, _same(found), *_reasons(found, differ=False))
    parts += [_where(found, again), ""]
    if found.record_fields:
        parts += [_fields(f"recorded in step {found.record_step:,}", found.record_fields), ""]
    if again is not None:
        parts += [_recomputed(*again, found), ""]
    return Group(*parts, *_reasons(found, differ=True))


def _same(found: Comparison) -> Text:
    if not found.compared_steps and not found.same_steps:
        return Text("they have no step in common: there is nothing to compare", style="yellow")
    weights = f", and the stored weights of {len(found.same_steps)}" if found.same_steps else ""
    return Text(
        f"✓ they do not differ: the records of {found.compared_steps:,} steps{weights} are the same", style="bold green"
    )


def _where(found: Comparison, again: tuple[Parting, Any] | None) -> Text:
    parting = again[0] if again is not None else None
    if parting is not None and parting.stage is not None:
        worker = f", worker {parting.worker}" if parting.worker is not None else ""
        tensor = f" of {parting.tensor}" if parting.tensor and parting.stage == "gradient" else ""
        tensor = f": {parting.tensor}" if parting.tensor and not tensor else tensor
        return Text(f"✗ first in step {parting.step:,}{worker}, in {STAGES[parting.stage]}{tensor}", style="bold red")
    tensor = f", tensor {found.checkpoint_tensor}" if found.step == found.checkpoint_step else ""
    return Text(f"✗ first seen in step {found.step:,}{tensor}", style="bold red")


def _fields(title: str, pairs: dict[str, tuple[Any, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in (title, "left", "right"):
        table.add_column(name, overflow="fold")
    for name, (left, right) in pairs.items():
        table.add_row(name, str(left), str(right))
    return table


def _recomputed(parting: Parting, both: tuple[Replay, Replay], found: Comparison) -> Text:
    """Which of the runs gives here what it gave there."""
    if parting.stage is not None:
        return Text(f"computed again here, up to step {parting.step:,}: they part as said above", style="dim")
    names = [name for name, one in zip(("left", "right"), both, strict=True) if one.matches is False]
    if not names:
        return Text("computed again here, both give the same", style="dim")
    told = " and ".join(names)
    return Text(f"computed again here, step {parting.step:,} is the same for both, and not what {told} recorded")


def _reasons(found: Comparison, differ: bool) -> list[RenderableType]:
    if not found.reasons:
        return [Text(NOT_RECORDED, style="yellow")] if differ else []
    title = "likely reason" if differ else "also different, without effect so far"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in (title, "left", "right", ""):
        table.add_column(name, overflow="fold")
    for reason in found.reasons:
        table.add_row(reason.what, _short(reason.left), _short(reason.right), WHY.get(reason.what, ""))
    return [table]


def _short(value: Any) -> str:  # noqa: ANN401  (any JSON value)
    text = str(value)
    return text if len(text) <= 24 else text[:23] + "…"
