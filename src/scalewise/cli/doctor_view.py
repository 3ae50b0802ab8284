"""A diagnosis, drawn for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scalewise.doctor.diagnose import CHECKS, TITLES, Diagnosis
from scalewise.doctor.evidence import Evidence, Finding, Severity
from scalewise.present.words import number

COLOURS: dict[Severity, str] = {"high": "bold white on red", "medium": "black on yellow", "low": "black on cyan"}


def diagnosis_view(diagnosis: Diagnosis) -> RenderableType:
    """What was looked at, what was found, and what could not be looked for."""
    evidence = diagnosis.evidence
    parts: list[RenderableType] = [f"[bold]{escape(evidence.name)}[/bold]", f"[dim]{_size(evidence)}[/dim]", ""]
    for rank, finding in enumerate(diagnosis.findings, 1):
        parts += [_finding(rank, finding), ""]
    if not diagnosis.findings:
        looked = len(CHECKS) - len(diagnosis.unknown)
        parts += [f"[bold green]✓ nothing found[/bold green]  [dim]{looked} causes looked for[/dim]"]
    if diagnosis.unknown:
        parts += [_unknown(diagnosis.unknown)]
    return Group(*parts)


def _size(evidence: Evidence) -> str:
    workers = f"{evidence.workers} worker{'s' if evidence.workers > 1 else ''} × {number(evidence.worker_batch)}"
    return f"{workers} = global batch {number(evidence.global_batch)}, {evidence.steps:,} steps, {evidence.optimizer}"


def _finding(rank: int, finding: Finding) -> RenderableType:
    title = Text.assemble(
        (f"{rank}  ", "dim"),
        (f" {finding.severity} ", COLOURS[finding.severity]),
        ("  " + TITLES[finding.cause], "bold"),
        (f"  {finding.cause}", "dim"),
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("seen", Text(finding.evidence[0].upper() + finding.evidence[1:]))
    table.add_row("fix", Text(finding.fix, style="green"))
    return Group(title, Padding(table, (0, 0, 0, 3)))


def _unknown(unknown: dict[str, str]) -> RenderableType:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), style="dim")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for place, (cause, reason) in enumerate(unknown.items()):
        table.add_row("" if place else "not looked for", f"{cause}: {reason}")
    return table
