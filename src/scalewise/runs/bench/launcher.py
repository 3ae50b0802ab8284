"""Starts the processes of a job on one machine or host, through torch's elastic launcher.

Run by jobs.py: python -m scalewise.runs.bench.launcher FOLDER NODE
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scalewise.engine.processes.fork_server import forking_from, preloaded
from scalewise.engine.processes.launch import LAUNCHER, end_with_launcher
from scalewise.runs.bench.work import Start

CODES = "codes-{node}.json"
END_SECONDS = 5


def config(start: Start, folder: Path, node: int) -> LaunchConfig:
    """How torch starts the processes of one node."""
    return LaunchConfig(
        min_nodes=start.nodes,
        max_nodes=start.nodes,
        nproc_per_node=start.processes // start.nodes,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=start.endpoint,
        rdzv_configs={"is_host": node == 0},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / f"node-{node}")),
        local_addr=start.addresses[node] if start.addresses else "127.0.0.1",
        shutdown_timeout=END_SECONDS,
    )


def main(folder: Path, node: int) -> int:
    """Run until the processes end; notes their exit codes if they fail."""
    end_with_launcher()  # the command that started this process
    os.environ[LAUNCHER] = str(os.getpid())
    logging.disable(logging.ERROR)  # the agent's own words on children and signals; the command has better ones
    (folder / f"node-{node}").mkdir()
    try:
        with preloaded() as fork_server, forking_from(fork_server):
            elastic_launch(config(Start.load(folder), folder, node), sys.executable)(
                "-m", "scalewise.runs.bench.part", str(folder)
            )
    except SignalException:
        return 1
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (folder / CODES.format(node=node)).write_text(json.dumps(codes))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
