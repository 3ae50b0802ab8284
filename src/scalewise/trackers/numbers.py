"""A record as trackers take it: numbers by name, at a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def numbers(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a stored record, and every number in it by its path.

    >>> numbers({"kind": "epoch", "step": 7, "train": {"loss": 0.5}, "best": True, "validation": None})
    (7, {'epoch/train/loss': 0.5, 'epoch/best': 1.0})
    """
    content = {key: value for key, value in record.items() if key not in ("kind", "step")}
    return int(record.get("step", record.get("steps", 0))), dict(_flat(record["kind"], content))


def _flat(path: str, value: Any) -> Iterator[tuple[str, float]]:  # noqa: ANN401  (any JSON value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{path}/{key}", item)
    elif isinstance(value, bool | int | float):
        yield path, float(value)
