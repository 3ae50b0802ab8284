"""What is learned: the task type, the built-in tasks with their data, and the loader.

May import: recipe, records, errors, files, extras. Importing this imports no torch.
Public: `BUILT_IN` here, `Task`, `Loss` and `accuracy` in `task`, `load_task` in `load`, and `augment`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalewise.tasks.sources import Source


@dataclass(frozen=True)
class BuiltIn:
    """A task that comes with scalewise; `source` names the published data set it needs, if any."""

    factory: str
    summary: str
    data: str
    source: str | None = None

    def published(self) -> Source | None:
        """The data set that must be found or downloaded."""
        return getattr(importlib.import_module("scalewise.tasks.sources"), self.source) if self.source else None

    def place(self, data: Path | None = None) -> str:
        """Where the data are, in words."""
        if (source := self.published()) is None:
            return self.data
        found = importlib.import_module("scalewise.tasks.sources").find(source, data)
        return f"{self.data}, in {found}" if found else f"{self.data}, downloaded when first used"


BUILT_IN: dict[str, BuiltIn] = {
    "digits": BuiltIn(
        "scalewise.tasks.digits:digits",
        "8×8 digits, small CNN (--set bn=true, dropout=0.2)",
        "embedded, 1,797 images",
    ),
    "mlp": BuiltIn("scalewise.tasks.digits:mlp", "8×8 digits, two hidden layers", "embedded, 1,797 images"),
    "linear": BuiltIn("scalewise.tasks.generated:linear", "linear regression", "generated"),
    "logistic": BuiltIn("scalewise.tasks.generated:logistic", "logistic regression, two classes", "generated"),
    "chars": BuiltIn(
        "scalewise.tasks.chars:chars",
        "character transformer, bits per character",
        "embedded, 148 kB of Lewis Carroll",
    ),
    "fashion-mnist": BuiltIn(
        "scalewise.tasks.mnist:fashion_mnist",
        "28×28 clothes, compact CNN (--set bn=false)",
        "70,000 images, 31 MB",
        "FASHION_MNIST",
    ),
    "mnist": BuiltIn(
        "scalewise.tasks.mnist:mnist",
        "28×28 handwritten digits, compact CNN (--set bn=false)",
        "70,000 images, 12 MB",
        "MNIST",
    ),
    "cifar10": BuiltIn(
        "scalewise.tasks.cifar:cifar10",
        "32×32 photographs, the lecture's residual CNN (--set bn=true)",
        "60,000 images, 170 MB",
        "CIFAR10",
    ),
    "cifar10-small": BuiltIn(
        "scalewise.tasks.cifar:cifar10_small",
        "32×32 photographs, small CNN for laptops (--set bn=false, augmented=false)",
        "60,000 images, 170 MB",
        "CIFAR10",
    ),
    "images": BuiltIn(
        "scalewise.tasks.images:images",
        "your photographs, VGG-like CNN (--set folder=DIR --set size=64 --set width=16)",
        "a folder per class, JPEG or PNG",
    ),
}
