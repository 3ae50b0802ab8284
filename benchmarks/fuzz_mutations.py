"""Files changed at random: bits, bytes, stretches, numbers in text, values in JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

MOST_BYTES = 1 << 20
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NUMBERS = [
    b"0", b"-1", b"1e999", b"-1e308", b"NaN", b"Infinity", b"1e-320", b"9" * 25, b"-" + b"9" * 400, b"4" * 5000,
    b"18446744073709551616", b"2147483648", b"0.1", b"true", b'"7"', b"null", b"[]",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 10**30, -(2**63), 1e308, float("nan"), float("inf"), "", "x", "../../etc/passwd",
    "é\u0000", "a" * 3000, [], {}, [[]], [None], {"x": 1}, [1] * 500, {"": {"": {}}},
]  # fmt: skip
Mutation = Callable[[bytes, random.Random], bytes]


def mutated(seed: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """A seed after one to four changes; now and then something that never was a file."""
    if chance.random() < 0.03:
        return chance.choice([b"", b"[" * chance.randint(1, 100_000), chance.randbytes(chance.randrange(4096))])
    content = seed
    for _ in range(chance.choice([1, 1, 1, 2, 3, 4])):
        content = chance.choice(MUTATIONS)(content, chance)
        if chance.random() < 0.05:
            content = spliced(content, chance.choice(others), chance)
    return content[:MOST_BYTES]


def spliced(content: bytes, other: bytes, chance: random.Random) -> bytes:
    """The beginning of one file and the end of another."""
    return content[: chance.randint(0, len(content))] + other[chance.randint(0, len(other)) :]


def flip(content: bytes, chance: random.Random) -> bytes:
    """Some bits."""
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwrite(content: bytes, chance: random.Random) -> bytes:
    """A stretch, with random bytes, zeros or ones."""
    start = chance.randint(0, len(content))
    length = chance.choice([1, 2, 4, 8, 64, 1024])
    filler = chance.choice([chance.randbytes(length), bytes(length), b"\xff" * length])
    return content[:start] + filler + content[start + length :]


def remove(content: bytes, chance: random.Random) -> bytes:
    """A stretch."""
    start = chance.randint(0, len(content))
    return content[:start] + content[start + chance.choice([1, 2, 16, 256]) :]


def insert(content: bytes, chance: random.Random) -> bytes:
    """Random bytes, or a stretch of the file itself once more."""
    start, place = chance.randint(0, len(content)), chance.randint(0, len(content))
    extra = chance.choice([chance.randbytes(chance.randint(1, 64)), content[start : start + 300]])
    return content[:place] + extra + content[place:]


def truncate(content: bytes, chance: random.Random) -> bytes:
    """The end of it."""
    return content[: chance.randint(0, len(content))]


def renumber(content: bytes, chance: random.Random) -> bytes:
    """A number in the text."""
    found = [*NUMBER.finditer(content)]
    if not found:
        return flip(content, chance)
    chosen = chance.choice(found)
    return content[: chosen.start()] + chance.choice(NUMBERS) + content[chosen.end() :]


def revalue(content: bytes, chance: random.Random) -> bytes:
    """A value, a key or an item in the JSON, or in one line of it."""
    lines = content.split(b"\n")
    place = chance.randrange(len(lines))
    for candidate, start, stop in ((content, 0, len(lines)), (lines[place], place, place + 1)):
        try:
            document = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        changed = json.dumps(_changed(document, chance)).encode()
        return b"\n".join([*lines[:start], changed, *lines[stop:]])
    return renumber(content, chance)


def _changed(value: Any, chance: random.Random) -> Any:  # noqa: ANN401  (any JSON value)
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(VALUES)
    if isinstance(value, list):
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    key = chance.choice([*value])
    way = chance.random()
    if way < 0.1:
        return {name: item for name, item in value.items() if name != key}
    if way < 0.2:
        return {**value, chance.choice(["", "__class__", "recipe", "kind", key + "x"]): chance.choice(VALUES)}
    return {**value, key: _changed(value[key], chance)}


MUTATIONS: list[Mutation] = [flip, overwrite, remove, insert, truncate, renumber, renumber, revalue, revalue, revalue]
