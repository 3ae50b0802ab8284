"""A forecast on one screen: the answer in a sentence, then errors by size, measured and expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scalewise.cli.plan_view import money_of
from scalewise.present.words import rough, seconds

if TYPE_CHECKING:
    from scalewise.runs.forecast import Outlook
    from scalewise.stats.learning_curve import Interval

MOST_ROWS, BAR_WIDTH = 14, 12


def screen(found: Outlook, takes: Sequence[dict[str, Any]]) -> RenderableType:
    """What a person can act on."""
    parts: list[RenderableType] = ["", Text(sentence(found), style="bold yellow" if found.unreachable else "bold")]
    parts += [Text(line) for line in floor_lines(found)]
    parts += ["", errors_table(found), ""]
    parts.append(Text(law(found), style="dim"))
    if takes:
        parts += ["", takes_table(takes)]
    return Group(*parts)


def sentence(found: Outlook) -> str:
    """The answer: what the target takes, or where the curve leads."""
    target, needed, kind = found.target, found.needed, found.kind
    if found.is_flat:
        asked = "" if not found.unreachable else f", so nothing says that {target:g} is reached"
        return f"the errors do not fall with more {kind}: about {_digits(found.level)} at every size{asked}"
    if target is None or needed is None:
        ahead = found.ahead()[1]
        expected = _with(found.curve.at(ahead))
        return f"at {rough(ahead)} {kind}, 4 times the most seen, the error is expected to be {expected}"
    floor = found.curve.gamma
    if needed.value is None:
        least = f"it comes down to {_with(floor)}"
        if needed.low is None:
            return f"an error of {target:g} is below the irreducible error, which no number of {kind} removes: {least}"
        return (
            f"an error of {target:g} is not reached by the best curve: {least}; at the most hopeful it takes "
            f"{rough(needed.low)} {kind}"
        )
    high = "unbounded" if needed.high is None else rough(needed.high)
    more = needed.value / found.largest
    times = f"{more:.1f} times the most seen" if more >= 1 else "fewer than were seen"
    return f"an error of {target:g} takes {rough(needed.value)} {kind} ({rough(needed.low or 0.0)} to {high}), {times}"


def floor_lines(found: Outlook) -> list[str]:
    """What is known of the irreducible error, and of the regions."""
    curve = found.curve
    low, high = _digits(curve.gamma.low or 0.0), _digits(curve.gamma.high or 0.0)
    if curve.identified:
        lines = [f"irreducible error {_digits(curve.gamma.value or 0.0)} ({low} to {high})"]
    else:
        lines = [
            f"irreducible error unidentified: anything from {low} to {high} fits; errors at larger sizes would tell"
        ]
    if found.small is not None:
        lines.append(f"small-data region below {rough(found.small)} {found.kind}: left out of the curve")
    if found.irreducible is not None:
        lines.append(
            f"irreducible region from {rough(found.irreducible)} {found.kind}: more than half of the error stays"
        )
    return lines


def errors_table(found: Outlook) -> Table:
    """Errors by size: measured, by the curve, and ahead."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in (found.kind, "measured", "", "curve", "95 %"):
        table.add_column(name, justify="right" if name in (found.kind, "measured", "curve") else "left", no_wrap=True)
    table.add_column("region", no_wrap=True)
    by_size: dict[float, list[float]] = {}
    for size, error in found.points:
        by_size.setdefault(size, []).append(error)
    largest = max(error for _, error in found.points)
    for size, errors in [*by_size.items()][-MOST_ROWS:]:
        mean = sum(errors) / len(errors)
        count = f" (n={len(errors)})" if len(errors) > 1 else ""
        table.add_row(
            rough(size), f"{_digits(mean)}{count}", Text(_bar(mean / largest), style="cyan"), *_expected(found, size)
        )
    for size in found.ahead():
        middle = found.curve.at(size).value or 0.0
        row = _expected(found, size)
        table.add_row(f"→ {rough(size)}", "", Text(_bar(min(1.0, middle / largest)), style="blue"), *row, style="bold")
    return table


def _expected(found: Outlook, size: float) -> tuple[str, str, str]:
    at = found.curve.at(size)
    return _digits(at.value or 0.0), f"{_digits(at.low or 0.0)}–{_digits(at.high or 0.0)}", _region(found, size)


def _region(found: Outlook, size: float) -> str:
    if found.small is not None and size < found.small:
        return "small data"
    return "irreducible" if found.irreducible is not None and size >= found.irreducible else "power law"


def law(found: Outlook) -> str:
    """The curve itself."""
    curve = found.curve
    alpha, beta = curve.alpha, curve.beta
    shown = (
        f"error = {_digits(alpha.value or 0.0)} · {found.kind}^{beta.value:.3f} + {_digits(curve.gamma.value or 0.0)}"
    )
    return f"{shown}; exponent {beta.low:.3f} to {beta.high:.3f}; errors scatter by {100 * curve.spread:.1f} % about it"


def takes_table(takes: Sequence[dict[str, Any]]) -> Table:
    """What training to the target takes."""
    priced = takes[0]["cost"] is not None
    table = Table(title="training on so many", title_justify="left", title_style="bold", box=None, header_style="dim")
    for name in ("workers", "samples seen", "time", *(["cost"] if priced else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in takes:
        cost = [money_of(row["cost"])] if priced else []
        table.add_row(f"{row['workers']:,}", rough(row["samples"]), seconds(row["seconds"]), *cost)
    return table


def _bar(share: float) -> str:
    return "█" * max(1, round(share * BAR_WIDTH))


def _with(interval: Interval) -> str:
    return f"{_digits(interval.value or 0.0)} ({_digits(interval.low or 0.0)} to {_digits(interval.high or 0.0)})"


def _digits(value: float) -> str:
    """Three digits.

    >>> _digits(0.08312), _digits(12.0)
    ('0.0831', '12')
    """
    return f"{value:.3g}"
