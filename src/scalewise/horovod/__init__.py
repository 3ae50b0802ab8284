"""Horovod scripts on torch.distributed: only the import changes, and torchrun starts them.

import scalewise.horovod.torch as hvd   # for: import horovod.torch as hvd
import scalewise.horovod.keras as hvd   # for: import horovod.keras as hvd (Keras 3 on torch)

May import: watch and everything below. Public: `run`, `HorovodInternalError`, and the modules `torch` and `keras` with
Horovod's own names.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scalewise.engine.processes.signals import restored
from scalewise.errors import PlacementError, UsageError
from scalewise.horovod.operations import HorovodInternalError
from scalewise.horovod.unsupported import explain_imports

REPLACED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)  # torch's agent leaves its own handlers

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
    call = _packed(func, args, kwargs or {})
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="scalewise-horovod",
        max_restarts=0,
    )
    try:
        with restored(REPLACED):
            results: dict[int, Any] = elastic_launch(config, _call)(call)
    except ChildFailedError as error:
        raise HorovodInternalError(f"run() must call a function that ends on every process, got {error}") from error
    return [results[rank] for rank in sorted(results)]


def _packed(func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"run() needs a function of a module and arguments that can be pickled, got {func!r}: {error}; define it "
            f"at the top level of a file"
        ) from None


def _call(call: bytes) -> Any:  # noqa: ANN401
    func, args, kwargs = pickle.loads(call)
    return func(*args, **kwargs)
