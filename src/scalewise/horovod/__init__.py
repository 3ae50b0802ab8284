"""Horovod scripts on torch.distributed: only the import changes, and torchrun starts them.

import scalewise.horovod.torch as hvd   # for: import horovod.torch as hvd
import scalewise.horovod.keras as hvd   # for: import horovod.keras as hvd (Keras 3 on torch)

May import: watch and everything below. Public: `run`, `HorovodInternalError`, and the modules `torch` and `keras` with
Horovod's own names.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from scalewise.engine.processes.job import call
from scalewise.errors import PlacementError, ProcessFailed, UsageError
from scalewise.horovod.common.exceptions import HorovodInternalError

__version__ = "0.28.1"  # of the interface: scripts compare it
HERE = ("localhost", "127.0.0.1")
FINDERS = ("hostfile", "host_discovery_script")
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
    """Explains imports of the parts of Horovod that are not here; asked after every other finder."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Nothing, or the error that names the way out."""
        part = name.removeprefix(PACKAGE).split(".")[0]
        if name.startswith(PACKAGE) and part in WAYS_OUT:
            raise ImportError(f"{name} does not exist; {WAYS_OUT[part]}", name=name)
        return None


sys.meta_path.append(Unsupported)


def run(
    func: Callable[..., Any],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int | None = None,
    *,
    hosts: str | None = None,
    np: int | None = None,
    **ignored: object,
) -> list[Any]:
    """Call a function of a module in `num_proc` processes on this machine; what each returned, in order.

    Older scripts say `np`. Horovod's other arguments (use_gloo, verbose, …) change nothing here.
    """
    processes = num_proc or np or 1
    elsewhere = [host for host in (hosts or "").split(",") if host and host.split(":")[0] not in HERE]
    found = {name: ignored[name] for name in FINDERS if ignored.get(name)} | ({"hosts": hosts} if elsewhere else {})
    if found:
        raise PlacementError(
            f"run() starts processes on this machine only, got {found}; start the script on each machine with "
            f"torchrun --nnodes"
        )
    try:
        packed = pickle.dumps((func, args, kwargs or {}))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run() needs a function of a module and arguments that can be pickled, got {func!r}: {error}; define it "
            f"at the top level of a file"
        ) from None
    try:
        return call(_unpacked, packed, processes)
    except ProcessFailed as error:
        raise HorovodInternalError(f"run() must call a function that ends on every process, got {error}") from error


def _unpacked(call: bytes) -> Any:  # noqa: ANN401
    func, args, kwargs = pickle.loads(call)
    return func(*args, **kwargs)
