"""A forecast: how the error falls with data or model size, and what a target takes."""

from __future__ import annotations

from scalewise.present.charts import Axis, Mark, Series, line_chart, log_spaced, series_of
from scalewise.present.stored import Stored, number_of
from scalewise.present.story import Cell, Columns, Fact, Meter, Section, Story, Table, kept, table_of
from scalewise.present.words import (
    NOTHING,
    aligned,
    interval,
    money,
    percent,
    rough,
    seconds,
    sentence,
    signed,
    span,
)

MOST_ROWS, METER_WIDTH = 14, 12
AHEAD = 1  # which of the sizes ahead the answer is about


def forecasting_story(document: Stored) -> Story:
    """The story of one forecast."""
    return Story(
        question=f"How much does the error fall with more {_kind(document)}?",
        answer=answer(document),
        facts=_facts(document),
        sections=kept(curve_section(document), takes_section(document)),
        tone="warning" if document.flag("unreachable") else "strong",
    )


def _kind(document: Stored) -> str:
    return document.text("kind") or "samples"


def answer(document: Stored) -> str:
    """What the target takes, or where the curve leads."""
    return sentence(_said(document))


def _said(document: Stored) -> str:
    target, needed, kind = document.number("target"), document.part("needed"), _kind(document)
    largest = max((point.number("size") or 0.0 for point in document.parts("points")), default=0.0)
    if document.number("beta") == 0:
        level = rough(_error_at(document, largest))
        asked = f", so nothing says that {target:g} is reached" if document.flag("unreachable") else ""
        return f"the errors do not fall with more {kind}: about {level} at every size{asked}"
    if target is None or not needed.is_object:
        ahead = next(iter(document.parts("ahead")[AHEAD:]), Stored())
        times = f"{rough((ahead.number('size') or 0.0) / largest)} times the most seen" if largest else ""
        return f"at {rough(ahead.number('size'))} {kind}, {times}, the error is expected to be {_range(ahead)}"
    amount, low, high = (needed.number(name) for name in ("samples", "low", "high"))
    if amount is not None:
        more = amount / largest if largest else 0.0
        times = f"{rough(more)} times the most seen" if more >= 1 else "fewer than were seen"
        return f"an error of {target:g} takes {interval(amount, low or 0.0, high, rough)} {kind}, {times}"
    least = f"it comes down to {_range(document.part('gamma'))}"
    if low is None:
        return f"an error of {target:g} is below the irreducible error, which no number of {kind} removes: {least}"
    hopeful = f"at the most hopeful it takes {rough(low)} {kind}"
    return f"an error of {target:g} is not reached by the best curve: {least}; {hopeful}"


def _range(part: Stored) -> str:
    return interval(*part.estimate(), shown=rough)


def _facts(document: Stored) -> tuple[Fact, ...]:
    """What is known of the irreducible error, of the regions, and of the exponent."""
    gamma, kind = document.part("gamma"), _kind(document)
    fits = f"anything from {span(gamma.number('low'), gamma.number('high'), rough)} fits"
    floor = Fact("irreducible error", _range(gamma))
    if not gamma.flag("identified"):
        floor = Fact("irreducible error", "unidentified", f"{fits}; errors at larger sizes would tell")
    small, large = (document.number("regions", name) for name in ("small_until", "irreducible_from"))
    exponent, low, high = document.estimate("intervals", "beta")
    spread = document.number("spread")
    found = [floor] if gamma.number("value") is not None else []
    if small is not None:
        found.append(Fact("small data", f"below {rough(small)} {kind}", "left out of the curve"))
    if large is not None:
        found.append(Fact("irreducible region", f"from {rough(large)} {kind}", "more than half of the error stays"))
    if exponent is not None:
        found.append(Fact("exponent", signed(rough(exponent)), signed(span(low, high, rough))))
    if spread is not None:
        found.append(Fact("scatter", percent(spread, 1), "of the errors about the curve"))
    return tuple(found)


def curve_section(document: Stored) -> Section | None:
    """Measured errors, the curve through them, and what lies ahead."""
    seen = series_of("measured", document.parts("points"), "size", ["error"], kind="dots")
    ahead = series_of("ahead", document.parts("ahead"), "size", ["value"], (["low"], ["high"]), "both")
    fitted = Series("fitted", _law(document, [size for size, _ in (*seen.points, *ahead.points)]))
    axes = Axis(_kind(document), log=True), Axis("error", log=True)
    figure = line_chart("Error", *axes, [fitted, seen, ahead], _marks(document))
    if figure is None:
        return None
    alpha, beta, gamma = (document.number(*names) for names in (["alpha"], ["beta"], ["gamma", "value"]))
    law = f"error = {rough(alpha)} · {_kind(document)}^{signed(rough(beta))} + {rough(gamma)}"
    blocks = figure, errors_table(document, seen.points), Cell(law, "dim")
    return Section("The learning curve", blocks, "Bars are intervals of a new measurement there.")


def errors_table(document: Stored, seen: tuple[tuple[float, float], ...]) -> Table:
    """Errors by size: measured, by the curve, and ahead."""
    measured: dict[float, list[float]] = {}
    for size, error in sorted(seen):
        measured.setdefault(size, []).append(error)
    fitted = {point.number("size"): point.part("fitted") for point in document.parts("points")}
    largest = max((error for _, error in seen), default=1.0) or 1.0
    names: list[str] = []
    rows: list[tuple[str | Meter, ...]] = []
    for size, errors in [*measured.items()][-MOST_ROWS:]:
        mean = sum(errors) / len(errors)
        runs = f" (n={len(errors)})" if len(errors) > 1 else ""
        expected = fitted.get(size, Stored())
        names.append(rough(size))
        bar = Meter(((mean / largest, 0),), METER_WIDTH)
        rows.append((f"{rough(mean)}{runs}", bar, *_expected(document, expected, size)))
    for row in document.parts("ahead"):
        ahead, value = row.number("size") or 0.0, row.number("value") or 0.0
        bar = Meter(((min(1.0, value / largest), 4),), METER_WIDTH)
        names.append(f"→ {rough(ahead)}")
        rows.append(("", bar, *_expected(document, row, ahead)))
    columns = (_kind(document), "measured", "", "curve", "95 % interval", "region")
    rows = [(name, *cells) for name, cells in zip(aligned(names), rows, strict=True)]
    return Table(columns, tuple(rows), "Errors by size", words=frozenset({5}))


def _expected(document: Stored, part: Stored, size: float) -> tuple[str, str, str]:
    value, low, high = part.estimate()
    value = _error_at(document, size) if value is None else value
    small, large = (document.number("regions", name) for name in ("small_until", "irreducible_from"))
    region = "irreducible" if large is not None and size >= large else "power law"
    region = "small data" if small is not None and size < small else region
    return rough(value), NOTHING if low is None else span(low, high, rough), region


def _error_at(document: Stored, size: float) -> float | None:
    """ε(m) = α·m^β + γ, where that is a number."""
    alpha, beta, gamma = document.number("alpha"), document.number("beta"), document.number("gamma", "value") or 0.0
    if alpha is None or beta is None or abs(beta) > 9 or not 0 < size < 1e30:
        return None
    return alpha * size**beta + gamma


def _law(document: Stored, sizes: list[float]) -> tuple[tuple[float, float], ...]:
    """The law over the sizes on show."""
    known = [size for size in sizes if 0 < size < 1e30]
    if not known:
        return ()
    places = log_spaced(min(known), max(known))
    return tuple((place, error) for place in places if (error := _error_at(document, place)) is not None)


def _marks(document: Stored) -> list[Mark]:
    floor = document.number("gamma", "value") if document.flag("gamma", "identified") else None
    small, large = (document.number("regions", name) for name in ("small_until", "irreducible_from"))
    up = {"target": document.number("target"), "error that stays": floor}
    across = {"power law from here": small, "little to gain from here": large}
    marks = [Mark("y", value, name) for name, value in up.items() if value and value > 0]
    return marks + [Mark("x", size, name) for name, size in across.items() if size and size > 0]


def takes_section(document: Stored) -> Section | None:
    """What the target takes in samples, time and money."""
    takes = document.parts("takes")
    columns: Columns[Stored] = {
        "workers": number_of("workers"),
        "samples seen": number_of("samples", shown=rough),
        "time": number_of("seconds", shown=seconds),
        "cost": number_of("cost", shown=money) if any(row.number("cost") is not None for row in takes) else None,
    }
    return Section("Training to the target", (table_of(takes, columns, "To the target"),)) if takes else None
