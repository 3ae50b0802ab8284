"""Benches as they are drawn, from figures made up here."""

from __future__ import annotations

import dataclasses

import pytest

from scalewise.plan.hardware import Link
from scalewise.present import terminal
from scalewise.present.stored import Stored
from scalewise.present.stories.bench import benching_story
from scalewise.present.words import percent
from scalewise.runs.bench.collectives import CollectivesReport, Line
from scalewise.runs.bench.collectives import Row as Exchange
from scalewise.runs.bench.common import Topology
from scalewise.runs.bench.devices import DevicesReport, Peak, Row, Worth
from scalewise.runs.bench.scaling import Row as Scaled
from scalewise.runs.bench.scaling import ScalingReport
from scalewise.runs.bench.workloads import Trained
from scalewise.stats.interval import Interval
from scalewise.stats.timing import Lost

MACHINE = Topology("Abacus 9", 2, 8, 1, 2, 0.25, None)


def rendered(report, width=80) -> list[str]:
    lines = terminal.text(benching_story(Stored(report.to_json())), width).splitlines()
    assert not any("…" in line for line in lines), "something was cut off"
    return lines


def scaled(processes, speed, efficiency, lost=(0.0, 0.0, 0.0, 0.0)) -> Scaled:
    rates = (speed, 0.9 * speed, 1.1 * speed)
    step = 128 / speed
    parts = (step, 0.7 * step, 0.2 * step, 0.1 * step, 0.0)
    spread = (efficiency, efficiency - 0.02, efficiency + 0.02)
    return Scaled(
        processes, 1, 2, 64, 128, *rates, processes * efficiency, *spread, *parts, Lost(*lost), 90, 9, "a" * 64
    )


def scaling_report(rows, same=True, mode="strong") -> ScalingReport:
    return ScalingReport("digits", mode, rows, same, "ordered", "cpu", None, None, MACHINE)


def test_scaling_says_what_came_of_it_and_where_the_rest_went():
    rows = (scaled(1, 1000.0, 1.0), scaled(2, 1560.0, 0.78, (0.15, 0.04, 0.0, 0.03)))
    lines = rendered(scaling_report(rows))
    sentence = " ".join(lines[1:3])
    assert "2 processes: 1.56 times the speed of 1 process, 78 % efficient (strong scaling)" in sentence
    assert sentence.endswith("most of the rest went into communication.")
    at = lines.index("digits, strong scaling, 2 workers of 64")
    assert lines[at + 1 : at + 4] == [
        "processes        samples/s (95 %)                   speed         efficiency",
        "1            1,000 (900 to 1,100)  █████████       × 1.00              100 %",
        "2          1,560 (1,400 to 1,720)  ██████████████  × 1.56  78 % (76 to 80 %)",
    ]
    at = lines.index("What ideal scaling would save of a step")
    assert lines[at + 3].split() == ["2", "15", "%", "4", "%", "0", "%", "3", "%", "22", "%"]
    assert "The weights are the same bytes on every number of processes." in lines


def test_scaling_says_when_processes_share_cores_and_when_bytes_differ():
    rows = (scaled(1, 1000.0, 1.0), scaled(4, 1200.0, 0.3, (0.1, 0.1, 0.0, 0.5)))
    text = " ".join(rendered(scaling_report(rows, same=False)))
    assert "4 processes on 2 cores: they take turns" in text
    assert "The weights differ in bytes: does the task make the same data in every process?" in text
    alone = " ".join(rendered(scaling_report(rows[:1])))
    assert "1 process: 1,000 samples/s" in alone
    assert "The weights" not in alone


def test_a_busy_machine_is_said():
    rows = (scaled(1, 1000.0, 1.0),)
    busy = dataclasses.replace(scaling_report(rows), topology=dataclasses.replace(MACHINE, load=11.0))
    assert "Other programs were running (load 11.0 on 8 cores)" in " ".join(rendered(busy))
    assert "Other programs" not in " ".join(rendered(scaling_report(rows)))


def test_collectives_show_times_fits_and_the_link():
    rows = tuple(
        Exchange(name, 2, size, 1e-3, 9e-4, 2e-3, size / 1e-3, size / 1e-3, 5)
        for name, sizes in (("all-reduce", (4096, 1 << 20)), ("ordered", (16384, 1 << 20)))
        for size in sizes
    )
    latency, speed = Interval(9.5e-4, 9e-4, 1.04e-3), Interval(1.25e8, 1.1e8, 1.4e8)
    fits = tuple(Line(name, 2, latency, speed, speed, 0.04) for name in ("all-reduce", "ordered"))
    link = Link("one machine, cpu", 4.5e-4, 1.25e8)
    report = CollectivesReport(rows, fits, link, latency, speed, 0.5, (2,), 2, "1gbit", "cpu", MACHINE)
    lines = rendered(report)
    text = " ".join(lines)
    assert (
        "The link takes 450 µs a message and carries 125 MB/s each way, by the ordered reduction; the timings are off"
        in text
    )
    assert "2 processes over 2 hosts at 1gbit: time, and bus bandwidth as a curve" in lines
    assert ["all-reduce", "1", "ms", "1", "ms", "▁█"] in [line.split() for line in lines]
    fitted = [
        "all-reduce",
        "950",
        "(900",
        "to",
        "1040)",
        "µs",
        "125",
        "(110",
        "to",
        "140)",
        "MB/s",
        "125",
        "MB/s",
        "4",
        "%",
    ]
    assert fitted in [line.split() for line in lines]
    assert "ordered sums whole chunks of gradients, so 16.4 kB at least." in lines
    assert "Abacus 9, 2 of 8 cores, 1 socket, 2 memory nodes, load 0.2 before; medians of 5 rounds" in text


def operation(device, threads, size, gflops) -> Row:
    return Row(
        "matrix product", device, threads, size, "side", "compute", 1, 1.0, 1.0, 1.0, gflops, 0.1, gflops / 50, 7
    )


def test_devices_show_curves_what_to_send_and_what_is_missing():
    rows = tuple(operation("cpu", 1, size, speed) for size, speed in ((32, 0.4), (1024, 40.0)))
    worth = (
        Worth("matrix product", "side", "cpu, 2 threads", "cuda", 384, False, 65536, 0.05),
        Worth("elementwise", "elements", "cpu, 2 threads", "cuda", None, False, 1 << 20, 0.5),
        Worth("reduction", "elements", "cpu, 2 threads", "cuda", 1, True, 1 << 20, 0.0),
    )
    times = (2e-3, 1.8e-3, 2.5e-3)
    trained = Trained("digits", "cpu", 1, 32, *times, 16000.0, 0.6, None, None, 0.5, (0.0, 0.5, 1.0), 3)
    report = DevicesReport(rows, (Peak("cpu", 1, 50.0, 20.0),), worth, (trained,), ("no GPU here",), MACHINE)
    lines = rendered(report)
    words = [line.split() for line in lines]
    assert lines[1] == "At most: cpu, 1 thread: 50 GFLOP/s and 20 GB/s."
    assert [
        "matrix",
        "product",
        "cpu,",
        "1",
        "thread",
        "32",
        "to",
        "1k",
        "side",
        "▁█",
        "40",
        "GFLOP/s",
        "80",
        "%",
    ] in words
    assert ["matrix", "product", "384", "side"] in words
    assert ["elementwise", "never", "up", "to", "1,048,576,", "but", "the", "timings", "scatter", "elements"] in words
    assert ["reduction", "any", "elements"] in words
    cnn = ["cpu,", "1", "thread", "2", "(1.8", "to", "2.5)", "ms", "16,000", "not", "reached", "50", "%", "▁▅█"]
    assert cnn in words
    assert "No GPU here." in lines


@pytest.mark.parametrize(("share", "shown"), [(0.123, "12 %"), (-0.08, "−8 %"), (-0.001, "0 %")])
def test_shares(share, shown):
    assert percent(share) == shown
