"""A watcher's noise scale as the numbers that a library's own log takes."""

from __future__ import annotations

from scalewise.watching.watcher import Watcher


def noise_values(watcher: Watcher) -> dict[str, float]:
    """value, low, high and enough (1 or 0) under `noise_scale/`; nothing where it was not measured."""
    noise = watcher.noise()
    known = {} if noise is None else noise.to_json()
    return {f"noise_scale/{name}": float(value) for name, value in known.items() if value is not None}
