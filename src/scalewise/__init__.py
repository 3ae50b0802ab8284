"""Take a PyTorch training run from one worker to many without losing accuracy.

>>> import scalewise as sw
>>> recipe = sw.Recipe(workers=8, worker_batch=64)

Importing scalewise imports no torch; each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from scalewise import adapters, nn, optim
    from scalewise.engine.loop import train
    from scalewise.engine.placement import Placement
    from scalewise.errors import ScalewiseError
    from scalewise.recipe import Recipe
    from scalewise.records import Epoch, Result, Step
    from scalewise.runs.compare.compare import compare
    from scalewise.runs.forecast import forecast
    from scalewise.runs.measure.measure import measure
    from scalewise.runs.plan import plan
    from scalewise.runs.train import fit
    from scalewise.runs.tune.tune import tune
    from scalewise.tasks import augment
    from scalewise.tasks.load import load_task
    from scalewise.tasks.task import Loss, Task, accuracy
    from scalewise.watch.noise import NoiseScale
    from scalewise.watch.watcher import watch

_HOMES = {
    "Epoch": "scalewise.records",
    "Loss": "scalewise.tasks.task",
    "NoiseScale": "scalewise.watch.noise",
    "Placement": "scalewise.engine.placement",
    "Recipe": "scalewise.recipe",
    "Result": "scalewise.records",
    "ScalewiseError": "scalewise.errors",
    "Step": "scalewise.records",
    "Task": "scalewise.tasks.task",
    "accuracy": "scalewise.tasks.task",
    "compare": "scalewise.runs.compare.compare",
    "fit": "scalewise.runs.train",
    "forecast": "scalewise.runs.forecast",
    "load_task": "scalewise.tasks.load",
    "measure": "scalewise.runs.measure.measure",
    "plan": "scalewise.runs.plan",
    "train": "scalewise.engine.loop",
    "tune": "scalewise.runs.tune.tune",
    "watch": "scalewise.watch.watcher",
}
_MODULES = {
    "adapters": "scalewise.adapters",
    "augment": "scalewise.tasks.augment",
    "nn": "scalewise.nn",
    "optim": "scalewise.optim",
}

__all__ = [
    "Epoch",
    "Loss",
    "NoiseScale",
    "Placement",
    "Recipe",
    "Result",
    "ScalewiseError",
    "Step",
    "Task",
    "accuracy",
    "adapters",
    "augment",
    "compare",
    "fit",
    "forecast",
    "load_task",
    "measure",
    "nn",
    "optim",
    "plan",
    "train",
    "tune",
    "watch",
]


class _Package(types.ModuleType):
    """A public function stays what its name stands for, also once the package of that name has been imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _HOMES or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'scalewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
