"""What every bench shares: checks of the request, facts about the machine, and the folder of the result."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from scalewise.engine.placement import DeviceName, available_cores
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.team import choose_device
from scalewise.engine.store.folder import check_folder, make_folder
from scalewise.errors import PlacementError, UsageError
from scalewise.records import save_document
from scalewise.runs.request import check_alone
from scalewise.stats.interval import as_json

DOCUMENT_FILE = "bench.json"


ReportT = TypeVar("ReportT", bound="Report")


@dataclass(frozen=True)
class Report:
    """What a bench has measured; `run` is the folder that holds it."""

    kind: ClassVar[str]
    run: Path | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        content = as_json(self)
        return {"run": str(content.pop("run")), "kind": self.kind, **content}


@contextmanager
def benching(out: Path | None) -> Iterator[None]:
    """The context of a bench that starts its own processes, with its folder checked before minutes of timing."""
    check_alone("bench")
    check_folder(out)
    with translating():
        yield


def stored(report: ReportT, out: Path | None) -> ReportT:
    """The report, written into `out` or into runs/bench-<kind>-<time>."""
    folder = make_folder(out, f"bench-{report.kind}").path
    report = replace(report, run=folder)
    save_document(folder / DOCUMENT_FILE, report.to_json())
    return report


def check_links(hosts: int | None, rate: str | None) -> None:
    """Refuse a rate of links that do not exist."""
    if rate is not None and hosts is None:
        raise PlacementError(f"--rate {rate} is that of links between hosts, got no --hosts; add --hosts 2")


def check_seconds(seconds: float) -> None:
    """Refuse a duration in which nothing can be timed."""
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, got {seconds}; write for example --seconds 30")


SYSTEM = Path("/sys/devices/system")
CPU_INFO = Path("/proc/cpuinfo")
QUERY_SECONDS = 10.0


@dataclass(frozen=True)
class Topology:
    """Facts that timings depend on; None where the system does not say.

    cores: that this process may use, of those that the machine has.
    load: mean number of running processes over the last minute, before anything was timed.
    gpu_links: what `nvidia-smi topo -m` prints.
    """

    processor: str
    cores: int
    machine_cores: int
    sockets: int | None
    memory_nodes: int | None
    load: float | None
    gpu_links: str | None


def topology(system: Path = SYSTEM, information: Path = CPU_INFO) -> Topology:
    """Those of this machine; the arguments are where Linux keeps them."""
    return Topology(
        processor=_processor(information),
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        sockets=_sockets(system),
        memory_nodes=len([*system.glob("node/node[0-9]*")]) or None,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpu_links=_gpu_links(),
    )


def _sockets(system: Path) -> int | None:
    files = system.glob("cpu/cpu[0-9]*/topology/physical_package_id")
    return len({file.read_text() for file in files}) or None


def _processor(information: Path) -> str:
    if information.is_file():
        found = re.search(r"model name\s*: (.+)", information.read_text(errors="replace"))
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _gpu_links() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "topo", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def chosen_device(device: DeviceName, processes: int) -> DeviceName:
    """The kind of device for N processes; `auto` takes CUDA where each of them gets a device."""
    if device == "auto":
        return "cuda" if torch.cuda.device_count() >= processes else "cpu"
    choose_device(device, 0 if device != "cuda" else processes - 1)
    if device == "mps" and processes > 1:
        raise PlacementError("several processes cannot share MPS; use --device cpu")
    return device
