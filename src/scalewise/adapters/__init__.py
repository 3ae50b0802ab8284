"""Other people's training loops and models: Lightning, Accelerate, Transformers, Keras on torch.

Each module needs its own library and is loaded when it is first used: `sw.adapters.lightning.task(…)`.
May import: watch and everything below. Public: `accelerate`, `keras`, `lightning`, `transformers`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["accelerate", "keras", "lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"scalewise.adapters.{name}")
    raise AttributeError(f"module 'scalewise.adapters' has no attribute {name!r}")
