"""Runs a script in several processes, as torchrun does, but as forks of one that has imported torch: python
together.py PROCESSES SCRIPT ARGUMENTS…
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

PRELOADED = ("scalewise.engine.store.folder", "torch.distributed.nn", "torch.optim")


def main(processes: int, script: str, arguments: list[str]) -> int:
    """The first exit code that is not 0, upon which the other processes are ended; a child returns the script's 0."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        __import__(name)
    gc.freeze()  # the children's collections need not look through what was imported
    from torch.distributed import TCPStore

    port = free_port()
    running = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            return 0
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
    return code


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
