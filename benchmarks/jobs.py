"""Starts two_processes.py: two processes of this machine, or one on each of two hosts with a slow link between."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cases import Case
from rounds import Measured
from scalewise.runs.bench.common import Host, hosts
from two_processes import WHAT

PROCESSES = 2
PORT = 29500
MOST_SECONDS = 3600
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Script = Sequence[str]


def here(script: Script) -> str:
    """Run on two processes of this machine; says what went wrong, if anything did."""
    return _run([[*TORCHRUN, "--standalone", "--nproc-per-node", str(PROCESSES), *script]])


def over_link(rate: str) -> Callable[[Script], str]:
    """Run with one process on each of two hosts whose links carry `rate`."""

    def run(script: Script) -> str:
        with hosts(PROCESSES, rate=rate) as machines:
            return _run([_on_host(number, machines, script) for number in range(PROCESSES)])

    return run


def _on_host(number: int, machines: Sequence[Host], script: Script) -> list[str]:
    machine = machines[number]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{PORT}", "--rdzv-id", "speed"]
    itself = ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", machine.address]
    count = ["--nnodes", str(len(machines)), "--nproc-per-node", "1"]
    return machine.command([*TORCHRUN, *count, *rendezvous, *itself, *script])


def measure(
    run: Callable[[Script], str], cases: Sequence[Case], cycles: int, threads: int, data: Path | None
) -> dict[str, Measured]:
    """All cases in one job, by title; a job that fails leaves what it had measured and a reason for the rest."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        numbers = [str(output), str(cycles), str(threads), str(data or "")]
        words = [word for case in cases for word in (case.task, str(case.worker_batch))]
        problem = run([str(Path(__file__).with_name("two_processes.py")), *numbers, *words])
        found = json.loads(output.read_text()) if output.exists() else {}
    measured = {title: Measured(**values) for title, values in found.items()}
    missing = Measured(0, failures=dict.fromkeys(WHAT, problem or "the job left no result"))
    return {case.title: measured.get(case.title, missing) for case in cases}


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Run commands at the same time; what the first failed one said, or nothing."""
    variables = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(number) for number in range(len(commands))]
        processes = []
        try:
            for command, log in zip(commands, logs, strict=True):
                with log.open("wb") as stream:
                    processes.append(subprocess.Popen(command, env=variables, stdout=stream, stderr=stream))
            codes = [process.wait(timeout=MOST_SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            return f"not done after {MOST_SECONDS} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        wrong = [log for log, code in zip(logs, codes, strict=True) if code]
        return _reason(wrong[0].read_text()) if wrong else ""


def _reason(log: str) -> str:
    """The first line that names an error and says something about it, else the last one."""
    found = re.search(r"\w+Error: \S.*", log)
    return (found[0] if found else (log.strip().splitlines() or ["no message"])[-1])[:200]
