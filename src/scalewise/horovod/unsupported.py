"""What is said about the parts of Horovod that are not here, when a script imports them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "scalewise.horovod."
WAYS_OUT = {
    "tensorflow": "scripts with Keras run on Keras 3 with torch: pip install 'scalewise[keras]', set "
    "KERAS_BACKEND=torch, import keras instead of tensorflow.keras, and import scalewise.horovod.keras as hvd",
    "mxnet": "MXNet itself has ended; scalewise.horovod.torch has the same functions for torch",
    "runner": "torchrun starts the processes; scalewise.horovod.run() calls a function in several on this machine",
    "spark": "start the script with torchrun or with Spark's TorchDistributor, and use scalewise.horovod.torch",
    "ray": "start the script with torchrun or with Ray Train's TorchTrainer, and use scalewise.horovod.torch",
}


class Unsupported:
    """Answers imports that nothing else answers."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Nothing, or the error that names the way out."""
        part = name.removeprefix(PACKAGE).split(".")[0]
        if name.startswith(PACKAGE) and part in WAYS_OUT:
            raise ImportError(f"{name} does not exist; {WAYS_OUT[part]}", name=name)
        return None


def explain_imports() -> None:
    """Be asked after every other finder."""
    sys.meta_path.append(Unsupported)
