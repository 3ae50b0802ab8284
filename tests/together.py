"""Runs a script in several processes, as torchrun does, but as forks of this one, which has imported torch."""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path

import forked

# what some scripts import only when they are under way, then in every process
PRELOADED = {
    "fully_shard.py": ("torch.distributed.fsdp",),
    "parallel.py": tuple(f"scalewise.engine.parallel.{name}" for name in ("fsdp", "stages", "tensor")),
}


def main(processes: int, arguments: list[str]) -> None:
    """Exit with the first code that is not 0, upon which the other processes are ended."""
    import torch
    from torch.distributed import TCPStore

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # OpenMP has read its own number already
    for name in ("torch.distributed.nn", *PRELOADED.get(Path(arguments[0]).name, ())):
        import_module(name)
    port = free_port()
    running = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
            forked.script(arguments)
            return
        running.add(child)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # after forking: it has a thread
    code = 0
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGKILL)
    del store
    sys.exit(code)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
