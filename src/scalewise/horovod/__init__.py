"""Horovod scripts on torch.distributed: only the import changes, and torchrun starts them.

import scalewise.horovod.torch as hvd   # for: import horovod.torch as hvd
import scalewise.horovod.keras as hvd   # for: import horovod.keras as hvd (Keras 3 on torch)

May import: watch and everything below. Public: `run`, `HorovodInternalError`, and the modules `torch` and `keras` with
Horovod's own names.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scalewise.engine.processes.job import call
from scalewise.errors import PlacementError, ProcessFailed, UsageError
from scalewise.horovod.operations import HorovodInternalError
from scalewise.horovod.unsupported import explain_imports

__version__ = "0.28.1"  # of the interface: scripts compare it
HERE = ("localhost", "127.0.0.1")
FINDERS = ("hostfile", "host_discovery_script")

explain_imports()


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
        return call(_unpacked, _packed(func, args, kwargs or {}), processes)
    except ProcessFailed as error:
        raise HorovodInternalError(f"run() must call a function that ends on every process, got {error}") from error


def _packed(func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run() needs a function of a module and arguments that can be pickled, got {func!r}: {error}; define it "
            f"at the top level of a file"
        ) from None


def _unpacked(call: bytes) -> Any:  # noqa: ANN401
    func, args, kwargs = pickle.loads(call)
    return func(*args, **kwargs)
