"""`scalewise bench` as a person uses it: real processes and hosts, planted faults found, mistakes in one clear line."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from conftest import environment
from scalewise.engine.processes.job import Job, Start
from scalewise.errors import Failed
from scalewise.plan import hardware
from scalewise.present.stored import Stored
from scalewise.present.stories.bench import machine_words
from scalewise.runs.bench import devices, workloads
from scalewise.runs.bench.collectives import NAMES, bus_factor
from scalewise.runs.bench.common import reason_unavailable, topology
from scalewise.runs.bench.workloads import OPERATIONS, Place, missing, places
from scalewise.runs.measure import throughput

REASON = reason_unavailable()
PLANTED_SECONDS = 0.04
MANY_SIZES = ",".join(f"{kilobytes}kB" for kilobytes in range(4, 64, 4))  # 9 rounds of 0.03 s a case: 24 s at least

# One process computes longer than the other, in every step and whatever the machine does.
UNEVEN = f"""
import os, time
import torch, scalewise as sw
from torch.nn import functional as F


class Slow(torch.nn.Linear):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            time.sleep({PLANTED_SECONDS})
        return super().forward(x)


def task():
    x = torch.rand(256, 8, generator=torch.Generator().manual_seed(0))  # every process makes them
    y = x.sum(dim=1, keepdim=True)
    recipe = sw.Recipe(worker_batch=8, lr=0.01)
    return sw.Task(model=lambda: Slow(8, 1), train=(x, y), test=(x, y), loss=F.mse_loss, recipe=recipe)
"""


def test_scaling_finds_the_process_that_keeps_the_others_waiting(scalewise, tmp_path):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    done = scalewise("bench", "scaling", "uneven.py", "--processes", "2,1", "--seconds", 1, "--json")
    document = done.json
    assert document == json.loads((tmp_path / document["run"] / "bench.json").read_text())
    assert (document["kind"], document["mode"], document["same_weights"]) == ("scaling", "strong", True)
    one, two = document["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["workers"] == two["workers"] == 2
    assert (one["efficiency"], one["communication_seconds"] < 1e-4, one["imbalance_seconds"]) == (1, True, 0)
    assert 0.4 * PLANTED_SECONDS < two["imbalance_seconds"] < 0.5 * two["step_seconds"]  # the other half of it computes
    assert two["imbalance_seconds"] > 2 * two["communication_seconds"] > 0
    lost = two["lost"]
    assert two["efficiency"] + sum(lost.values()) == pytest.approx(1, abs=1e-6)
    assert two["speedup"] == pytest.approx(2 * two["efficiency"])
    assert "The weights are the same bytes" in done.stderr
    assert "2 processes: " in done.stderr


@contextmanager
def benching(tmp_path, *arguments) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "scalewise", "bench", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_round(process) -> None:
    """Until processes are being timed; without a terminal, a line every 2 s at most says which round it is."""
    said = ""
    for line in process.stderr:
        said += line
        if "round " in line:
            return
    pytest.fail(f"no line reported a round: {said}")


def parts_of(process) -> list[psutil.Process]:
    below = psutil.Process(process.pid).children(recursive=True)
    return [one for one in below if one.name() in ("scalewise-0", "scalewise-1")]


def test_a_process_that_dies_ends_the_bench_and_leaves_nobody(tmp_path):
    with benching(tmp_path, "collectives", "--processes", 2, "--sizes", MANY_SIZES, "--seconds", 600) as process:
        wait_for_round(process)
        everybody = psutil.Process(process.pid).children(recursive=True)
        parts = parts_of(process)
        assert len(parts) == 2
        next(part for part in parts if part.name() == "scalewise-1").kill()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert "scalewise: process 1 was killed by SIGKILL; one of 2 that were timed together: start again" in said
    assert "Traceback" not in said
    assert psutil.wait_procs(everybody, timeout=20)[1] == []
    assert not (tmp_path / "runs").exists()


def test_processes_end_with_a_command_that_is_killed(tmp_path):
    with benching(tmp_path, "collectives", "--processes", 2, "--sizes", MANY_SIZES, "--seconds", 600) as process:
        wait_for_round(process)
        everybody = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(everybody) == 4  # with their launcher and the one from which they are forked
    assert psutil.wait_procs(everybody, timeout=20)[1] == []


@pytest.fixture
def failing(monkeypatch):
    """Two processes that can be asked to fail."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "jobs")
    return Start(importlib.import_module("failing").Failing(), 2, threads=1)


def test_a_failure_of_one_process_is_passed_on_with_its_words_and_code(failing):
    with Job(failing) as job:
        assert job.ask("who") == [(0, 1), (1, 1)]
        with pytest.raises(Failed, match="planted must not be, got it; take it away") as failed:
            job.ask("fail")
    assert failed.value.exit_code == 2


@pytest.fixture
def link():
    """What to say for a link of a known rate, and its bytes per second; without hosts, any link."""
    return ["--hosts", 2, "--rate", "100mbit"] if REASON is None else [], 12.5e6 if REASON is None else None


def test_collectives_write_the_link_where_plan_reads_it(scalewise, tmp_path, link):
    slow, rate = link
    words = ("--processes", 2, "--sizes", "64KiB,512KiB", "--seconds", 0.1, *slow, "--out", "link.json", "--json")
    document = scalewise("bench", "collectives", *words).json
    assert document == json.loads((tmp_path / document["run"] / "bench.json").read_text())
    rows = document["rows"]
    assert {row["collective"] for row in rows} == set(NAMES)
    assert [row["bytes"] for row in rows if row["collective"] == "broadcast"] == [64 << 10, 512 << 10]
    for row in rows:
        speed = row["bytes"] / row["seconds"]
        assert row["algorithm_bytes_per_second"] == pytest.approx(speed)
        assert row["bus_bytes_per_second"] == pytest.approx(bus_factor(row["collective"], 2) * speed)
        assert row["rounds"] == 3
        if rate is not None and row["bytes"] == 512 << 10:  # 128 kB go through at once
            assert row["bus_bytes_per_second"] < 1.6 * rate
    assert [line["collective"] for line in document["fits"]] == list(NAMES)
    found = hardware.load_link(tmp_path / "link.json")
    assert found == hardware.load_link(tmp_path / document["run"] / "link.json")
    assert document["link_latency_seconds"]["low"] <= found.latency_seconds <= document["link_latency_seconds"]["high"]
    assert document["link"]["bytes_per_second"] == found.bytes_per_second > 0
    assert found.source.startswith("scalewise bench collectives --processes 2")
    if rate is not None:
        assert 0.2 * rate < found.bytes_per_second < 2 * rate
        assert found.name == "2 hosts at 100mbit, cpu"


@pytest.fixture
def short(monkeypatch):
    """Two small sizes of everything, and one round."""
    few = tuple(operation for operation in OPERATIONS if operation.name in ("matrix product", "reduction"))
    monkeypatch.setattr(devices, "OPERATIONS", tuple(_smaller(operation) for operation in few))
    monkeypatch.setattr(devices, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(devices, "QUICK_PEAK_SECONDS", 0.01)
    monkeypatch.setattr(throughput, "PRODUCT_SIDES", (256,))
    monkeypatch.setattr(devices, "places", lambda: [Place("cpu", 1), Place("cpu", 2)])
    monkeypatch.setattr(workloads, "EPOCHS", 1.0)


def _smaller(operation):
    return type(operation)(**(vars(operation) | {"sizes": operation.sizes[:2]}))


@pytest.mark.usefixtures("short")
def test_devices_are_timed_and_what_is_missing_is_said(scalewise_here, tmp_path):
    before = torch.get_num_threads()
    done = scalewise_here("bench", "devices", "--quick", "--json")
    document = done.json
    assert torch.get_num_threads() == before
    assert document == json.loads((tmp_path / document["run"] / "bench.json").read_text())
    assert document["kind"] == "devices"
    assert [(row["operation"], row["size"], row["threads"]) for row in document["rows"]][:4] == [
        ("matrix product", 32, 1), ("matrix product", 32, 2), ("matrix product", 64, 1), ("matrix product", 64, 2),
    ]  # fmt: skip
    for row in document["rows"]:
        assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
        assert 0 < row["peak_share"] <= 1
    product = next(row for row in document["rows"] if row["size"] == 64)
    assert product["gflops"] == pytest.approx(2 * 64**3 / product["seconds"] / 1e9)
    assert product["bytes"] == 3 * 64 * 64 * 4
    one, two = document["training"]
    assert one["steps_to_loss"] == two["steps_to_loss"] == 45  # kernels differ, the training does not
    assert 0 < one["utilisation"] < 1.1
    assert [row["operation"] for row in document["break_even"]] == ["matrix product", "reduction"]
    assert any("no CUDA or MPS device" in line for line in document["missing"]) != torch.cuda.is_available()
    assert "what is worth sending there were not measured" in " ".join(done.stderr.split())


def test_places_are_the_cpu_at_powers_of_two_and_all_cores():
    cpus = [place.threads for place in places(6) if place.device == "cpu"]
    assert cpus == [1, 2, 4, 6]
    assert [place.threads for place in places(1) if place.device == "cpu"] == [1]
    assert any("one core" in line for line in missing([Place("cpu", 1)]))
    assert missing([Place("cpu", 1), Place("cuda", 1)]) == []


def test_operations_count_their_arithmetic_and_bytes():
    """By torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    for operation in OPERATIONS:
        run = operation.prepare(4, torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            run()
        if operation.name in ("matrix product", "convolution 3×3"):
            padding = counter.get_total_flops() / operation.flops(4)
            assert padding == 1, operation.name


def test_the_machine_tells_its_sockets_and_nodes(tmp_path):
    for number in range(4):
        folder = tmp_path / f"cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{number // 2}\n")
    (tmp_path / "node/node0").mkdir(parents=True)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9\n")
    found = topology(tmp_path, tmp_path / "cpuinfo")
    assert (found.sockets, found.memory_nodes, found.processor) == (2, 1, "Abacus 9")
    said = machine_words(Stored(asdict(found)))
    assert said.startswith("Abacus 9")
    assert "2 sockets, 1 memory node" in said
    assert topology(tmp_path / "nowhere", tmp_path / "nowhere").sockets is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["collectives", "--sizes", "lots,1MB"], "--sizes must be an amount of memory above 0 with its unit"),
        (["collectives", "--sizes", "1MB"], "--sizes must name two sizes at least"),
        (["collectives", "--processes", "1"], "processes must be different whole numbers from 2 on, got 1"),
        (["collectives", "--processes", "two"], "--processes must be whole numbers with commas, got 'two'"),
        (["collectives", "--rate", "1gbit"], "--rate 1gbit is that of links between hosts, got no --hosts"),
        (["collectives", "--processes", "3", "--hosts", "2"], "processes must spread evenly over hosts, got 3 on 2"),
        (["collectives", "--seconds", "0"], "--seconds must be above 0"),
        (
            ["collectives", "--out", "nowhere/link.json"],
            "/nowhere is no writable folder; fix its permissions",
        ),
        (["parallelism", "digits", "--out", __file__], "must be a new or empty folder, found one in use"),
        (["collectives", "--device", "cuda"], "--device cuda is not available here"),
        (["scaling", "nothing", "--processes", "1,2"], "unknown task 'nothing'"),
        (["scaling", "digits", "--processes", "0"], "processes must be different whole numbers from 1 on, got 0"),
        (["scaling", "digits", "--processes", "2,2"], "from 1 on, got 2,2"),
        (["scaling", "digits", "--processes", "1,2", "--hosts", "1"], "hosts must be at least 2"),
        (["scaling", "digits", "--processes", "1,2", "--weak", "--strong"], "either weak or strong, got both"),
        (["scaling", "digits", "--processes", "1,4", "--workers", "2"], "workers must be at least 4 here, got 2"),
        (["scaling", "digits", "--processes", "1,2", "--worker-batch", "0"], "worker_batch"),
        (["scaling", "digits", "--processes", "1,2", "--threads", "0"], "threads"),
        (["scaling", "digits"], "--processes"),
        (["everything"], "everything"),
    ],
)
def test_a_mistake_is_one_clear_line(scalewise_here, tmp_path, arguments, words):
    done = scalewise_here("bench", *arguments)
    assert done.code == 2
    assert words in done.stderr
    assert done.stderr.startswith("scalewise: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_hosts_without_the_tools_and_jobs_of_others_are_refused(scalewise_here, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        done = scalewise_here("bench", "collectives", "--processes", 2, "--hosts", 2)
        assert done.code == 2
        assert done.stderr.splitlines()[-1].startswith("scalewise: hosts are ")
    monkeypatch.setenv("RANK", "0")
    done = scalewise_here("bench", "devices")
    assert (done.code, "run it without torchrun" in done.stderr) == (2, True)
