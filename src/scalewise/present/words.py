"""Numbers as people read them on a page."""

from __future__ import annotations

import re
from collections.abc import Callable

# Metrics between 0 and 1 that people read as percentages.
SHARES = ("accuracy",)
NOTHING = "–"


def number(value: float | None) -> str:
    """A number with as many digits as a person wants.

    >>> number(0.97234), number(123456.7), number(0.000012), number(1e30), number(None)
    ('0.9723', '123,457', '1.2e-05', '1e+30', '–')
    """
    if value is None:
        return NOTHING
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1e12:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """A number for the tick of an axis.

    >>> short(20000), short(1500000), short(0.02), short(7), short(0.00002)
    ('20k', '1.5M', '0.02', '7', '2e-05')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size and not (unit == "k" and abs(value) < 1e4):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e4 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(3.25), seconds(0.0123), seconds(75), seconds(7300), seconds(2e5), seconds(1e300)
    ('3.2 s', '12.3 ms', '1 min 15 s', '2 h 1 min', '2 d 7 h', '1e+300 s')
    """
    if value is None:
        return NOTHING
    if not 1e-9 < abs(value) < 1e12:
        return f"{value:.3g} s"
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    if abs(value) < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def money(amount: float | None) -> str:
    """A price.

    >>> money(12.3456), money(1234567.0), money(0.00345)
    ('12.35', '1,234,567', '0.0034')
    """
    if amount is None or abs(amount) < 1 or abs(amount) >= 1e12:
        return NOTHING if amount is None else f"{amount:.2g}"
    return f"{amount:,.2f}" if abs(amount) < 1000 else f"{amount:,.0f}"


def size(amount: float | None) -> str:
    """An amount of memory.

    >>> size(1_234_567_890), size(52_400), size(12), size(None)
    ('1.23 GB', '52.4 kB', '12 B', '–')
    """
    if amount is None:
        return NOTHING
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(amount) >= 1000**power:
            return f"{amount / 1000**power:.3g} {prefix}B"
    return f"{amount:.0f} B"


def percent(value: float | None, digits: int = 0) -> str:
    """A share.

    >>> percent(0.4321), percent(0.97777, 2), percent(1e300)
    ('43 %', '97.78 %', '1e+302 %')
    """
    if value is None:
        return NOTHING
    return f"{100 * value:.{digits}f} %" if abs(value) < 1e6 else f"{100 * value:.3g} %"


def metric(name: str, value: float | None) -> str:
    """The value of a metric.

    >>> metric("accuracy", 0.97777), metric("loss", 0.0693)
    ('97.78 %', '0.0693')
    """
    return percent(value, 2) if name in SHARES else number(value)


def interval(
    value: float | None, low: float | None, high: float | None, shown: Callable[[float | None], str] = number
) -> str:
    """A value with its interval; a missing end is an open one.

    >>> interval(100.3, 95.6, 105.2), interval(100.3, 95.6, None), interval(None, 80.0, None)
    ('100.3 (95.6 to 105.2)', '100.3 (95.6 to ∞)', 'at least 80')
    """
    if value is None:
        return "not known" if low is None else f"at least {shown(low)}"
    if low is None and high is None:
        return shown(value)
    return f"{shown(value)} ({'?' if low is None else shown(low)} to {'∞' if high is None else shown(high)})"


def rough(value: float | None) -> str:
    """Three digits of a number that is not known better.

    >>> rough(353745.2), rough(2.17634), rough(None)
    ('354,000', '2.18', '–')
    """
    return number(None if value is None else float(f"{value:.3g}"))


def count(amount: float | None, word: str, plural: str | None = None) -> str:
    """A number of things.

    >>> count(1, "worker"), count(8, "worker"), count(2, "process", "processes")
    ('1 worker', '8 workers', '2 processes')
    """
    return f"{number(amount)} {word if amount == 1 else plural or word + 's'}"


def signed(text: str) -> str:
    """Numbers with a minus as wide as a plus, and none before zero.

    >>> signed("-2.59 to +0.10"), signed("-0.00 points")
    ('−2.59 to +0.10', '0.00 points')
    """
    return re.sub(r"[-+](0\.0+)(?!\d)", r"\1", text).replace("-", "−")


def listed(names: list[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"
