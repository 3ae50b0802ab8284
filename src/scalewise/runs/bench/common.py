"""What every bench shares: checks of the request, facts about the machine, hosts, and the folder of the result.

Hosts are network namespaces of one Linux machine on one switch, with links as slow as asked for. Each has its own
loopback, address and ports; the file system, the clock and the host name are shared. The switch is a bridge in a
namespace of its own, so nothing is ever added to the interfaces or routes of the machine itself.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from scalewise.engine.placement import DeviceName, available_cores
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.job import Job, Start
from scalewise.engine.processes.team import choose_device
from scalewise.engine.store.folder import check_folder, make_folder
from scalewise.errors import PlacementError, UsageError
from scalewise.records import save_document
from scalewise.runs.request import check_alone
from scalewise.stats.interval import as_json

DOCUMENT_FILE = "bench.json"


@dataclass(frozen=True)
class Report:
    """What a bench has measured; `run` is the folder that holds it."""

    kind: ClassVar[str]
    run: Path | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        content = as_json(self)
        return {"run": str(content.pop("run")), "kind": self.kind, **content}

    def stored(self, out: Path | None) -> Self:
        """The report, written into `out` or into runs/bench-<kind>-<time>."""
        folder = make_folder(out, f"bench-{self.kind}").path
        report = replace(self, run=folder)
        save_document(folder / DOCUMENT_FILE, report.to_json())
        return report


@contextmanager
def benching(out: Path | None) -> Iterator[None]:
    """The context of a bench that starts its own processes, with its folder checked before minutes of timing."""
    check_alone("bench")
    check_folder(out)
    with translating():
        yield


@dataclass(frozen=True)
class Topology:
    """Facts that timings depend on; None where the system does not say."""

    processor: str
    cores: int  # that this process may use, of those that the machine has
    machine_cores: int
    sockets: int | None
    memory_nodes: int | None
    load: float | None  # mean number of running processes over the last minute, before anything was timed
    gpu_links: str | None  # what `nvidia-smi topo -m` prints


def topology(system: Path = Path("/sys/devices/system"), information: Path = Path("/proc/cpuinfo")) -> Topology:
    """Those of this machine; the arguments are where Linux keeps them."""
    sockets = system.glob("cpu/cpu[0-9]*/topology/physical_package_id")
    return Topology(
        processor=_processor(information),
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        sockets=len({file.read_text() for file in sockets}) or None,
        memory_nodes=len([*system.glob("node/node[0-9]*")]) or None,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpu_links=_gpu_links(),
    )


def _processor(information: Path) -> str:
    if information.is_file():
        found = re.search(r"model name\s*: (.+)", information.read_text(errors="replace"))
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _gpu_links() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    done = _called("nvidia-smi", "topo", "-m")
    return done.stdout.strip() or None if done.returncode == 0 else None


def _called(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)


def chosen_device(device: DeviceName, processes: int) -> DeviceName:
    """The kind of device for N processes; `auto` takes CUDA where each of them gets a device."""
    if device == "auto":
        return "cuda" if torch.cuda.device_count() >= processes else "cpu"
    choose_device(device, 0 if device != "cuda" else processes - 1)
    if device == "mps" and processes > 1:
        raise PlacementError("several processes cannot share MPS; use --device cpu")
    return device


SUBNET = "198.18.0"  # reserved for measuring networks (RFC 2544): no real machine or name server has such an address
MOST_HOSTS = 254
INTERFACE = "eth0"
BRIDGE = "bridge"
BURST = "128kb"  # sent at once after a pause; two full-sized segments, small beside what a training step sends
QUEUE = "50ms"
END_SECONDS = 10.0

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace that behaves like a machine of its own."""

    name: str
    address: str
    interface: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on this host.

        >>> Host("a", "198.18.0.1", "eth0").command(["hostname", "-I"])
        ['ip', 'netns', 'exec', 'a', 'hostname', '-I']
        """
        return ["ip", "netns", "exec", self.name, *words]


def reason_unavailable() -> str | None:
    """Why hosts cannot be made here, found by making one; None if they can."""
    try:
        with hosts(1, rate="1gbit"):
            return None
    except PlacementError as error:
        return str(error)


@contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other; at the end they are removed, and with them every process still on one.

    The rate is what each link carries per second, in each direction, as `tc` writes it ("100mbit"); None for no limit.
    """
    if not 1 <= count <= MOST_HOSTS:
        raise PlacementError(f"the number of hosts must be from 1 to {MOST_HOSTS}, got {count}; change it")
    if sys.platform != "linux":
        raise PlacementError(f"hosts are network namespaces and need Linux, got {sys.platform}; use a Linux machine")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise PlacementError(f"hosts are made with `ip` and `tc`, not found: {', '.join(missing)}; install iproute2")
    prefix = f"scalewise-{os.getpid()}-{next(_numbers)}"
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{prefix}-switch"))
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
        made = []
        for number in range(1, count + 1):
            name = stack.enter_context(_namespace(f"{prefix}-{number}"))
            host = Host(name, f"{SUBNET}.{number}", INTERFACE)
            _connect(host, switch, port=f"port{number}", rate=rate)
            made.append(host)
        yield made


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    try:  # around the making too: an interrupt may come when it is half done
        _run("ip", "netns", "add", name)
        yield name
    finally:
        _end_processes(name)
        _called("ip", "netns", "del", name)


def _connect(host: Host, switch: str, port: str, rate: str | None) -> None:
    """Lay a cable from the host to the switch and give the host its address."""
    cable = ["type", "veth", "peer", "name", host.interface, "netns", host.name]
    _run("ip", "-n", switch, "link", "add", port, *cable)
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
    if rate is not None:  # each end limits what leaves it, so the cable is limited in both directions
        limit(host.name, host.interface, rate)
        limit(switch, port, rate)
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    _run("ip", "-n", host.name, "link", "set", host.interface, "up")
    _run("ip", "-n", switch, "link", "set", port, "master", BRIDGE, "up")


def limit(namespace: str, interface: str, rate: str) -> None:
    """From now on let no more than `rate` leave an interface."""
    bucket = ["tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)


def _end_processes(namespace: str) -> None:
    """Kill what still runs in the namespace and wait until it is gone."""
    deadline = time.monotonic() + END_SECONDS
    while (running := _called("ip", "netns", "pids", namespace).stdout.split()) and time.monotonic() < deadline:
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)


def _run(*words: str) -> None:
    done = _called(*words)
    if done.returncode:
        raise PlacementError(
            f"making hosts needs `{shlex.join(words)}` to succeed, got: {done.stderr.strip()}; "
            "run as root (in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN), with a rate that tc knows"
        )


@contextmanager
def interleaved(
    starts: Mapping[int, Start], host_count: int | None = None, rate: str | None = None
) -> Iterator[dict[int, Job[Any, Any]]]:
    """Jobs by their number of processes, all alive at once; on this machine, or spread over hosts with slow links."""
    with ExitStack() as stack:
        machines = [] if host_count is None else stack.enter_context(hosts(host_count, rate))
        jobs = {}
        for number, (processes, start) in enumerate(starts.items()):
            chosen = machines[: min(processes, len(machines))]
            placed = replace(start, addresses=tuple(host.address for host in chosen), number=number)
            jobs[processes] = stack.enter_context(Job[Any, Any](placed, chosen))
        yield jobs


def check_timing(
    counts: Sequence[int], smallest: int, host_count: int | None, rate: str | None, seconds: float
) -> None:
    """Refuse numbers of processes that are impossible or that hosts cannot share evenly, and times too short."""
    if rate is not None and host_count is None:
        raise PlacementError(f"--rate {rate} is that of links between hosts, got no --hosts; add --hosts 2")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, got {seconds}; write for example --seconds 30")
    wrong = [count for count in counts if count < smallest]
    if wrong or not counts or len(set(counts)) < len(counts):
        shown = ",".join(map(str, counts)) or "none"
        raise PlacementError(f"processes must be different whole numbers from {smallest} on, got {shown}; change them")
    if host_count is None:
        return
    if host_count < 2:
        raise PlacementError(f"hosts must be at least 2, to have a link between them, got {host_count}; change --hosts")
    uneven = [count for count in counts if count % min(count, host_count)]
    if uneven:
        raise PlacementError(
            f"processes must spread evenly over hosts, got {uneven[0]} on {host_count}; use multiples of --hosts"
        )
