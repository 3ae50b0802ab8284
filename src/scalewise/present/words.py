"""Numbers in words: the only place where a number, a share, a duration, an amount or an interval becomes text.

What is missing is "–". An interval is always "95.6 to 105.2"; its level, where it is not said by a column, is 95 %.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from scalewise.records import SHARES
from scalewise.runs.measure.memory import show_bytes

NOTHING = "–"
Shown = Callable[[float | None], str]
Units = tuple[tuple[str, float], ...]
TIMES: Units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
RATES: Units = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
UNITS: Units = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))


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


def rough(value: float | None) -> str:
    """Three digits of a number that is not known better.

    >>> rough(353745.2), rough(97.31), rough(2.17634), rough(None)
    ('354,000', '97.3', '2.18', '–')
    """
    return number(None if value is None else float(f"{value:.3g}"))


def short(value: float) -> str:
    """A number for the tick of an axis.

    >>> short(20000), short(1500000), short(0.02), short(7), short(0.00002)
    ('20k', '1.5M', '0.02', '7', '2e-05')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size and not (unit == "k" and abs(value) < 1e4):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e4 else f"{value:.3g}"


def magnitude(count: float | None) -> str:
    """The order of a number.

    >>> magnitude(512), magnitude(4096), magnitude(4 << 20), magnitude(1.3e-8)
    ('512', '4k', '4M', '1e-08')
    """
    if count is None:
        return NOTHING
    if 0 < abs(count) < 1:
        return f"{count:.0e}"
    return f"{count:.0f}" if count < 1e3 else f"{count / 1e3:.0f}k" if count < 1e6 else f"{count / 1e6:.0f}M"


def percent(value: float | None, digits: int = 0) -> str:
    """A share.

    >>> percent(0.4321), percent(0.97777, 2), percent(-0.1), percent(-0.001), percent(1e300)
    ('43 %', '97.78 %', '−10 %', '0 %', '1e+302 %')
    """
    if value is None:
        return NOTHING
    return signed(f"{100 * value:.{digits}f} %") if abs(value) < 1e6 else f"{100 * value:.3g} %"


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(3.25), seconds(0.0123), seconds(75), seconds(7300), seconds(2e5), seconds(1e300)
    ('3.2 s', '12.3 ms', '1 min 15 s', '2 h 1 min', '2 d 7 h', '1e+300 s')
    >>> seconds(0.0000123), seconds(0)
    ('12.3 µs', '0 s')
    """
    if value is None:
        return NOTHING
    if not 1e-9 < abs(value) < 1e12:
        return f"{value:.3g} s"
    if abs(value) < 1:
        return f"{1e6 * value:.3g} µs" if abs(value) < 1e-3 else f"{1e3 * value:.3g} ms"
    if abs(value) < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def seconds_span(low: float | None, high: float | None) -> str:
    """From one duration to another, in one unit.

    >>> seconds_span(3.04, 5.3), seconds_span(300, 5400), seconds_span(1, None)
    ('3.0 to 5.3 s', '5.0 to 90 min', '–')
    """
    if low is None or high is None:
        return NOTHING
    unit, length = next((one for one in UNITS if high < 100 * one[1]), UNITS[-1])
    first, last = (f"{end / length:.1f}" if end < 10 * length else f"{end / length:,.0f}" for end in (low, high))
    return f"{first} to {last} {unit}"


def money(amount: float | None) -> str:
    """A price.

    >>> money(12.3456), money(1234567.0), money(0.5), money(0.00345), money(0)
    ('12.35', '1,234,567', '0.50', '0.0034', '0.00')
    """
    if amount is None:
        return NOTHING
    if 0 < abs(amount) < 0.1 or abs(amount) >= 1e12:
        return f"{amount:.2g}"
    return f"{amount:,.2f}" if abs(amount) < 1000 else f"{amount:,.0f}"


def size(amount: float | None) -> str:
    """An amount of memory.

    >>> size(1_234_567_890), size(52_400), size(12), size(None)
    ('1.23 GB', '52.4 kB', '12 B', '–')
    """
    return NOTHING if amount is None else show_bytes(amount)


def count(amount: float | None, word: str, plural: str | None = None) -> str:
    """A number of things.

    >>> count(1, "worker"), count(8, "worker"), count(2, "process", "processes")
    ('1 worker', '8 workers', '2 processes')
    """
    return f"{number(amount)} {word if amount == 1 else plural or word + 's'}"


def times(ratio: float | None) -> str:
    """A multiple.

    >>> times(0.3219), times(8.0), times(None)
    ('× 0.322', '× 8', '–')
    """
    return NOTHING if ratio is None else f"× {rough(ratio)}"


def span(low: float | None, high: float | None, shown: Shown = number) -> str:
    """From one number to another, with the unit said once; a missing end is an open one.

    >>> span(95.6, 105.2), span(0.67, 0.77, percent), span(0.9, None, percent), span(0.5, 2, seconds)
    ('95.6 to 105.2', '67 to 77 %', '90 % to ∞', '500 ms to 2.0 s')
    """
    first, last = "?" if low is None else shown(low), "∞" if high is None else shown(high)
    amount, space, unit = first.rpartition(" ")
    return f"{amount if space and last.endswith(f' {unit}') else first} to {last}"


def interval(value: float | None, low: float | None, high: float | None, shown: Shown = number) -> str:
    """A value with its interval; a missing end is an open one.

    >>> interval(100.3, 95.6, 105.2), interval(100.3, 95.6, None), interval(None, 80.0, None)
    ('100.3 (95.6 to 105.2)', '100.3 (95.6 to ∞)', 'at least 80')
    >>> interval(0.72, 0.67, 0.77, percent)
    '72 % (67 to 77 %)'
    """
    if value is None:
        return f"at least {shown(low)}" if low else "not known"
    return shown(value) if low is None and high is None else f"{shown(value)} ({span(low, high, shown)})"


def in_unit(value: float | None, low: float | None, high: float | None, units: Units) -> str:
    """A value with its interval in two digits, all in the value's unit.

    >>> in_unit(0.0018, 0.0013, 0.0027, TIMES), in_unit(628e6, 400e6, 903e6, RATES)
    ('1.8 (1.3 to 2.7) ms', '628 (400 to 903) MB/s')
    """
    if value is None or low is None or high is None:
        return NOTHING
    name, unit = next((one for one in units if value >= one[1]), units[-1])
    first, *ends = (f"{part / unit:.0f}" if part >= 10 * unit else f"{part / unit:.2g}" for part in (value, low, high))
    return f"{first} ({' to '.join(ends)}) {name}"


def metric(name: str, value: float | None) -> str:
    """The value of a metric.

    >>> metric("accuracy", 0.97777), metric("loss", 0.0693)
    ('97.78 %', '0.0693')
    """
    return percent(value, 2) if name in SHARES else number(value)


def metrics(values: Mapping[str, float | None]) -> str:
    """Several metrics with their names.

    >>> metrics({"loss": 0.0693, "bits_per_character": 2.5})
    'loss 0.0693, bits per character 2.5'
    """
    return ", ".join(f"{spelled(name)} {metric(name, value)}" for name, value in values.items())


def spelled(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")


def difference(name: str, value: float | None) -> str:
    """How far two values of a metric lie apart, with its sign; of shares, in points.

    >>> difference("accuracy", -0.0439), difference("accuracy", -1e-9), difference("loss", 0.21049)
    ('−4.39', '0.00', '+0.21')
    """
    if value is None:
        return NOTHING
    return signed(f"{100 * value:+.2f}" if name in SHARES else f"{value:+.3g}")


def spread(name: str, mean: float | None, deviation: float | None) -> str:
    """Mean ± standard deviation of a metric.

    >>> spread("accuracy", 0.975, 0.00314), spread("loss", 2.45, 0.0501), spread("loss", 2.45, None)
    ('97.50 ± 0.31 %', '2.45 ± 0.05', '2.45')
    """
    if mean is None or deviation is None:
        return metric(name, mean)
    amount, _, unit = metric(name, mean).partition(" ")
    return f"{amount} ± {100 * deviation:.2f} {unit}" if name in SHARES else f"{amount} ± {deviation:.2g}"


def signed(text: str) -> str:
    """Numbers with a minus as wide as a plus, and none before zero.

    >>> signed("-2.59 to +0.10"), signed("-0.00 points"), signed("-0 %"), signed("-1e-05")
    ('−2.59 to +0.10', '0.00 points', '0 %', '−1e-05')
    """
    return re.sub(r"(?<!e)-", "−", re.sub(r"(?<!e)[-+](0(?:\.0+)?)(?![\d.])", r"\1", text))


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def aligned(texts: Sequence[str]) -> list[str]:
    """Numbers that name rows, as wide as the widest; a page drops the spaces.

    >>> aligned(["8", "1,024"])
    ['    8', '1,024']
    """
    widest = max(map(len, texts), default=0)
    return [text.rjust(widest) for text in texts]


def sentence(text: str) -> str:
    """A clause as a sentence.

    >>> sentence("they agree"), sentence("Done."), sentence("")
    ('They agree.', 'Done.', '')
    """
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '?', '!')) else '.'}" if text else ""
