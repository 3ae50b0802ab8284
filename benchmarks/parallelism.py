"""Every kind of parallelism against one process, and its counted payload against a network interface's own counters.

python benchmarks/parallelism.py equal      # losses of 20 steps on 2 and 4 processes, float64
python benchmarks/parallelism.py wire       # 26 M parameters on two network namespaces (Linux, root)

Both write into benchmarks/results/. The jobs are this file again, run by torchrun.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import scalewise as sw
from jobs import over_link
from scalewise.engine.loop import Training
from scalewise.engine.processes.team import joined
from scalewise.runs.bench.parallelism import take_step, ways
from scalewise.runs.bench.payload import Payload
from scalewise.tasks.digits import load

RESULTS = Path(__file__).parent / "results"
INTERFACE = "eth0"
RATE = "4gbit"
WIDTH = 3584
STEPS = 20
RECIPE = {"workers": 4, "worker_batch": 8, "micro_batch": 4, "steps": STEPS, "lr": 0.05, "threads": 1}


def doubled(task: sw.Task, model: Callable[[], nn.Module] | None = None) -> sw.Task:
    """A task in float64: differences are then those of the strategies, not of rounding."""
    make = model or task.model
    train, test = (tree_map(_wide, data) for data in (task.train, task.test))
    return dataclasses.replace(task, model=lambda: make().double(), train=train, test=test)


def _wide(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def deep() -> nn.Module:
    """Five layers: stages for four processes."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *layers, nn.Linear(32, 10))


CASES: dict[str, Callable[[], sw.Task]] = {
    "mlp": lambda: doubled(sw.load_task("mlp"), deep),
    "cnn": lambda: doubled(sw.load_task("digits", ["bn=true"])),
    "chars": lambda: doubled(sw.load_task("chars", ["context=16", "layers=2"])),
}
WITHOUT_TENSOR = ("cnn",)  # its only Linear layer has no partner


def large() -> sw.Task:
    """26.0 million parameters."""
    (x, y), test = load()
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return sw.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), *layers, nn.Linear(WIDTH, 10)),
        train=(x, y),
        test=test,
        loss=F.cross_entropy,
    )


def equal_job(output: Path) -> None:
    """Losses of every case, each way; on one process plain."""
    found: dict[str, dict[str, list[float]]] = {}
    with joined("cpu") as team:
        for case, make in CASES.items():
            for name, placement in ways("cpu").items():
                if (name == "tensor" and case in WITHOUT_TENSOR) or (team.size == 1 and name != "data"):
                    continue
                fields = RECIPE | ({"optimizer": "adam", "lr": 0.002} if case == "chars" else {})
                with Training(make(), sw.Recipe(**fields), placement) as training:
                    found.setdefault(case, {})[name] = [take_step(training) for _ in range(STEPS)]
                if team.leads:
                    output.write_text(json.dumps(found))


def wire_job(output: Path) -> None:
    """Counted bytes of a step beside those of the interface, on every process."""
    found: dict[str, list[dict[str, int]]] = {}
    recipe = sw.Recipe(workers=2, worker_batch=64, micro_batch=16, steps=9, lr=0.01, threads=1)
    with joined("cpu") as team:
        everywhere = {**ways("cpu"), "all-reduce": sw.Placement(device="cpu", reduce="allreduce")}
        for name, placement in everywhere.items():
            with Training(large(), recipe, placement) as training:
                take_step(training)
                team.barrier()
                before = counters()
                with Payload(team) as payload:
                    take_step(training)
                team.barrier()
                after = counters()
            mine = {
                "counted_sent": sum(traffic.sent_bytes for traffic in payload.found.values()),
                "counted_received": sum(traffic.received_bytes for traffic in payload.found.values()),
                "interface_sent": after["tx_bytes"] - before["tx_bytes"],
                "interface_received": after["rx_bytes"] - before["rx_bytes"],
            }
            everybody: list[dict[str, int]] = [mine] * team.size
            dist.all_gather_object(everybody, mine)
            found[name] = everybody
            if team.leads:
                output.write_text(json.dumps(found))


def counters() -> dict[str, int]:
    """What the interface of this host has carried."""
    folder = Path("/sys/class/net") / INTERFACE / "statistics"
    return {name: int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")}


def equal(folder: Path) -> list[str]:
    """The largest relative difference of any loss, by case and way."""
    losses = {count: _run_here(count, folder / f"equal-{count}.json") for count in (1, 2, 4)}
    lines = [f"| task | processes | {' | '.join(ways('cpu'))} |", f"| {' | '.join(['---'] * 8)} |"]
    for case in CASES:
        alone = losses[1][case]["data"]
        for count in (2, 4):
            cells = [_difference(losses[count][case].get(name), alone) for name in ways("cpu")]
            lines.append(f"| {case} | {count} | {' | '.join(cells)} |")
    return lines


def _difference(found: list[float] | None, expected: list[float]) -> str:
    if found is None:
        return "–"
    largest = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return "0" if not largest else f"{largest:.1e}"


def _run_here(processes: int, output: Path) -> dict[str, dict[str, list[float]]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    subprocess.run([*launcher, __file__, "equal", str(output)], check=True)
    found: dict[str, dict[str, list[float]]] = json.loads(output.read_text())
    return found


def wire(folder: Path) -> list[str]:
    """Counted against carried, by way and host."""
    output = folder / "wire.json"
    problem = over_link(RATE)([__file__, "wire", str(output)])
    if problem:
        raise SystemExit(problem)
    columns = ["way", "process", "counted out", "interface out", "÷", "counted in", "interface in", "÷"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    for name, everybody in json.loads(output.read_text()).items():
        for number, mine in enumerate(everybody):
            cells = [name, str(number)]
            for way in ("sent", "received"):
                counted, carried = mine[f"counted_{way}"], mine[f"interface_{way}"]
                ratio = f"{carried / counted:.3f}" if counted > 1_000_000 else "–"
                cells += [f"{counted:,}", f"{carried:,}", ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(part: str, folder: Path) -> None:
    """Measure a part and print it as a table; what it means is in the dated file."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for line in equal(folder) if part == "equal" else wire(folder):
        print(line)
    print(f"\n{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        (equal_job if sys.argv[1] == "equal" else wire_job)(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS)
