"""Optional libraries: which extra installs each, and one clear line where it is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from scalewise.errors import MissingExtra

# By the name that is imported.
EXTRAS = {
    "PIL": "images",
    "accelerate": "accelerate",
    "keras": "keras",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "optuna": "tune",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "transformers": "transformers",
    "wandb": "wandb",
}


def require(module: str) -> ModuleType:
    """Import a library; the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing(error) or error from None


def check(module: str) -> None:
    """Refuse a missing library early, without importing it."""
    if importlib.util.find_spec(module) is None:
        absent = ModuleNotFoundError(name=module)
        raise missing(absent) or absent


def missing(error: ModuleNotFoundError) -> MissingExtra | None:
    """The error for a missing library; None for any other module.

    >>> str(missing(ModuleNotFoundError("", name="lightning.pytorch")))
    "lightning is needed and not installed; run: pip install 'scalewise[lightning]'"
    """
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return MissingExtra(f"{name} is needed and not installed; run: pip install 'scalewise[{EXTRAS[name]}]'", name=name)
