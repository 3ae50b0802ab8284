"""Where a step's time goes: 15 phases, layer by layer, on one process or several.

    runs.profile.profile("digits", workers=8, processes=2).profile.bottleneck

May import: what `runs` may.
Public: `profile` and its `Outcome`. The way of a step through the files: `probes` puts `spans` around the engine's
seams, `session` takes steps with and without them, `times` turns spans into seconds, `profiler` puts the
`result` together. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalewise.runs.profile.profiler import Outcome, profile

__all__ = ["Outcome", "profile"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in __all__:
        return getattr(importlib.import_module("scalewise.runs.profile.profiler"), name)
    raise AttributeError(f"module 'scalewise.runs.profile' has no attribute {name!r}")
