"""A forecast: how the error falls with data or model size, and what a target takes."""

from __future__ import annotations

from scalewise.present.charts import Mark, Series, line_chart
from scalewise.present.scales import Axis
from scalewise.present.stored import Stored
from scalewise.present.story import Block, Fact, Section, Story, Table
from scalewise.present.words import interval, money, number, rough, seconds

CURVE_POINTS = 60


def forecasting_story(document: Stored) -> Story:
    """The story of one forecast."""
    sections = [curve_section(document), takes_section(document)]
    return Story(
        question=f"How much does the error fall with more {document.text('kind') or 'data'}?",
        answer=answer(document),
        facts=_facts(document),
        sections=tuple(section for section in sections if section is not None),
    )


def answer(document: Stored) -> str:
    """The law, and what the target takes."""
    needed, kind, gamma = document.part("needed"), document.text("kind") or "samples", document.part("gamma")
    floor = interval(gamma.number("value"), gamma.number("low"), gamma.number("high"))
    law = f"The error is {number(document.number('alpha'))} · {kind}^{number(document.number('beta'))} + {floor}"
    law += "." if gamma.flag("identified") else "; how much of it no data removes, the last number, is not identified."
    if document.flag("unreachable"):
        hopeful = needed.number("low")
        at_best = f"; at the most hopeful it takes {rough(hopeful)}" if hopeful else ""
        target = number(document.number("target"))
        return f"No number of {kind} is seen to bring the error down to {target}{at_best}. {law}"
    if needed.number("samples") is None:
        return law
    amount = interval(needed.number("samples"), needed.number("low"), needed.number("high"), rough)
    return f"An error of {number(document.number('target'))} takes {amount} {kind}. {law}"


def _facts(document: Stored) -> tuple[Fact, ...]:
    found = []
    for name in ("alpha", "beta", "gamma"):
        part = document.part("intervals", name)
        if part.number("value") is not None:
            ends = f"{number(part.number('low'))} to {number(part.number('high'))}"
            found.append(Fact(name, number(part.number("value")), ends))
    return tuple(found)


def curve_section(document: Stored) -> Section | None:
    """Measured errors, the curve through them, and what lies ahead."""
    pairs = [(point.number("size"), point.number("error")) for point in document.parts("points")]
    seen = tuple((a, b) for a, b in pairs if a and b is not None)
    ahead = [[row.number(name) for name in ("size", "value", "low", "high")] for row in document.parts("ahead")]
    points = tuple((a, b) for a, b, _, _ in ahead if a and b is not None)
    band = tuple((a, low, high) for a, _, low, high in ahead if a and low is not None and high is not None)
    series = [Series("fitted", _law(document, [a for a, _ in (*seen, *points)])), Series("measured", seen, kind="dots")]
    series.append(Series("ahead", points, band, "both"))
    kind = document.text("kind") or "samples"
    figure = line_chart("Error", Axis(kind, log=True), Axis("error", log=True), series, _marks(document))
    if figure is None:
        return None
    rows = tuple((number(a), number(b), f"{number(low)} to {number(high)}") for a, b, low, high in ahead)
    blocks: list[Block] = [figure]
    if rows:
        blocks.append(Table((kind, "error", "interval"), rows, "What lies ahead"))
    return Section("The learning curve", tuple(blocks), "Bars are intervals of a new measurement there.")


def _law(document: Stored, sizes: list[float]) -> tuple[tuple[float, float], ...]:
    """ε(m) = α·m^β + γ over the sizes on show."""
    alpha, beta, gamma = document.number("alpha"), document.number("beta"), document.number("gamma", "value") or 0.0
    known = [size for size in sizes if 0 < size < 1e30]
    if alpha is None or beta is None or abs(beta) > 9 or not known:
        return ()
    low, ratio = min(known), max(known) / min(known)
    places = [low * ratio ** (place / (CURVE_POINTS - 1)) for place in range(CURVE_POINTS)]
    return tuple((place, alpha * place**beta + gamma) for place in places)


def _marks(document: Stored) -> list[Mark]:
    named = {"target": document.number("target"), "error that stays": document.number("gamma", "value")}
    if not document.flag("gamma", "identified"):
        named.pop("error that stays")
    regions = {
        "power law from here": document.number("regions", "small_until"),
        "little to gain from here": document.number("regions", "irreducible_from"),
    }
    across = [Mark("x", size, name) for name, size in regions.items() if size and size > 0]
    return [Mark("y", value, name) for name, value in named.items() if value and value > 0] + across


def takes_section(document: Stored) -> Section | None:
    """What the target takes in samples, time and money."""
    rows = tuple(
        (
            number(row.number("workers")),
            rough(row.number("samples")),
            seconds(row.number("seconds")),
            money(row.number("cost")),
        )
        for row in document.parts("takes")
    )
    table = Table(("workers", "samples seen", "time", "cost"), rows, "To the target")
    return Section("What the target takes", (table,)) if rows else None
