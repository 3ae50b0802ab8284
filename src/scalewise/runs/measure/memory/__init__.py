"""The largest worker batch that fits: predicted, then tried in processes of their own under a memory limit.

`largest.py` searches, `trials.py` runs a trial and reads its note, `steps.py` is what a trial does. Public:
`largest_worker_batch`, `MemoryReport`, and here amounts of memory as people write and read them. Imports the engine.
"""

from __future__ import annotations

import re

from scalewise.errors import UsageError

PREFIXES = ("", "k", "m", "g", "t")
UNITS = {f"{prefix}b": 1000**power for power, prefix in enumerate(PREFIXES)} | {
    f"{prefix}ib": 1024**power for power, prefix in enumerate(PREFIXES) if prefix
}
MOST_BYTES = 10**18  # far beyond any machine, and within what limits of the system can hold
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(amount: str | int, flag: str = "--memory") -> int:
    """Bytes of an amount with decimal units (kB, MB, GB, TB) or binary ones (KiB, MiB, GiB, TiB), or of a number.

    >>> parse_bytes("512MB"), parse_bytes("2GiB"), parse_bytes("1.5 gb")
    (512000000, 2147483648, 1500000000)
    """
    text = f"{amount}B" if isinstance(amount, int) else amount
    found = _AMOUNT.fullmatch(text)
    unit = UNITS.get(found[2].lower()) if found else None
    count = float(found[1]) * unit if found and unit else 0.0
    if count > MOST_BYTES:
        raise UsageError(
            f"{flag} must be at most {MOST_BYTES // UNITS['tb']:,} TB, got {text!r}; write for example {flag} 4GB"
        )
    if count < 1:
        raise UsageError(
            f"{flag} must be an amount of memory above 0 with its unit (MB, GB, MiB, GiB, …), got {text!r}; "
            f"write for example {flag} 4GB"
        )
    return int(count)


def show_bytes(amount: float) -> str:
    """An amount of memory, for people.

    >>> show_bytes(1_234_567_890), show_bytes(52_400), show_bytes(12)
    ('1.23 GB', '52.4 kB', '12 B')
    """
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if abs(amount) >= 1000**power:
            return f"{amount / 1000**power:.3g} {prefix}B"
    return f"{amount:.0f} B"
