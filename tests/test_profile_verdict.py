"""What a profile says holds a step up, for every cause there is, and how it is drawn."""

from __future__ import annotations

import json

import pytest

from scalewise.present import terminal
from scalewise.present.stored import Stored
from scalewise.present.stories.profile import profiling_story
from scalewise.runs.profile.result import (
    OTHER,
    PHASES,
    Communication,
    InFlight,
    LayerRow,
    LoaderRow,
    Overhead,
    PhaseRow,
    Piece,
    Point,
    ProcessRow,
    Profile,
    Setting,
    Usage,
    verdict,
)
from scalewise.runs.profile.spans import Label, Segment
from scalewise.runs.profile.times import coalesced, middle_steps

WALL = 0.1
SETTING = {
    "task": "digits",
    "workers": 4,
    "worker_batch": 32,
    "processes": 2,
    "threads": 1,
    "device": "cpu",
    "cores": 4,
    "in_memory": True,
    "loaders": 0,
    "reduce": "ordered",
    "shard_optimizer": False,
    "optimizer": "adam",
    "precision": "fp32",
    "layout": "contiguous",
    "compiled": False,
}
LAYERS = (
    LayerRow("0", "Conv2d", 0.06, 0.02, 0.04, 0.6),
    LayerRow("very.long.name.of.a.layer.in.a.deep.model.1", "Linear", 0.02, 0.01, 0.01, 0.2),
)


def phases(**shares: float) -> tuple[PhaseRow, ...]:
    """Worked shares of the wall time by phase; `queue_waited` and `read_beside` are what they say."""
    found = []
    for name in (*PHASES, OTHER):
        worked = WALL * shares.get(name, 0.0)
        waited = WALL * shares.get(f"{name}_waited", 0.0)
        beside = WALL * shares.get(f"{name}_beside", 0.0)
        found.append(PhaseRow(name, worked + beside, waited, beside, (worked + waited) / WALL))
    return tuple(found)


def process(number: int, waited: float, rows: tuple[PhaseRow, ...] = ()) -> ProcessRow:
    points = tuple(Point(float(moment), 1.0 + moment) for moment in range(20))
    usage = Usage(0.9, 0.3, None, 200_000_000, None, points, points)
    exchanged = Communication(3, 0.03, waited, 0.01, 0.005)
    return ProcessRow(number, WALL, rows, exchanged, usage, (LoaderRow(0, 0.8),))


def judged(rows, waits=(0.01, 0.01), **changes):
    setting = Setting(**(SETTING | changes))
    return verdict(setting, WALL, rows, LAYERS, [process(number, waited) for number, waited in enumerate(waits)])


@pytest.mark.parametrize(
    ("shares", "changes", "bottleneck", "advice"),
    [
        ({"forward": 0.3, "backward": 0.5}, {}, "the largest part backward in 0 (Conv2d): 40 %", "--processes 4"),
        ({"forward": 0.9}, {"cores": 2}, "Computing takes 90 % of the step", "--layout channels_last"),
        ({"forward": 0.9}, {"cores": 2, "compiled": True, "layout": "channels_last"}, "forward 90 %", "Only more"),
        ({"preprocess": 0.6}, {}, "most of it in preprocess (60 %)", "augmentation cheaper"),
        ({"read": 0.6}, {"in_memory": False}, "most of it in read (60 %)", "--loaders 1"),
        (
            {"queue_waited": 0.6, "read_beside": 0.9, "forward": 0.3},
            {"in_memory": False, "loaders": 1, "processes": 1},
            "waits for its samples, 60 ms of 100 ms: 1 loader needs 90 ms",
            "--loaders 3: then reading is as fast",
        ),
        (
            {"queue_waited": 0.88, "preprocess_beside": 1.8},
            {"in_memory": False, "loaders": 2},
            "2 loaders need 180 ms for those of one step, most of it in preprocess",
            "About 15 loaders would keep up, and there are 2 cores",
        ),
        ({"communication_waited": 0.7}, {}, "33 % of its time in flight is hidden", "Raise --worker-batch"),
        ({"optimizer": 0.7}, {}, "most of it in optimizer", "--shard-optimizer"),
        ({"optimizer": 0.7}, {"processes": 1}, "most of it in optimizer", "Raise --worker-batch"),
        ({"norms": 0.7}, {}, "most of it in norms", "--no-noise"),
        ({"other": 0.7}, {}, "The loop around the phases takes 70 %", "Raise --worker-batch"),
    ],
)
def test_every_cause_is_named_with_what_to_try(shares, changes, bottleneck, advice):
    said, tried = judged(phases(**shares), **changes)
    assert bottleneck in said
    assert advice in tried


@pytest.mark.parametrize(("workers", "advice"), [(3, "--processes that divides"), (4, "runs beside process 1")])
def test_uneven_processes_are_told_from_a_slow_link(workers, advice):
    said, tried = judged(phases(communication_waited=0.6), waits=(0.06, 0.01), workers=workers)
    assert "process 1 works 90 ms in each, process 0 40 ms" in said
    assert advice in tried


def test_the_middle_half_of_the_steps_counts():
    assert middle_steps({1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0}) == [3, 4]
    assert middle_steps({1: 5.0, 2: 1.0}) == [1, 2]


def test_pieces_too_short_to_be_seen_join_their_neighbour():
    read, collate = Label("read"), Label("transport to memory")
    pieces = [Segment(read, 0, 10), Segment(collate, 10, 10.1), Segment(read, 10.1, 20), Segment(collate, 30, 40)]
    assert coalesced(pieces, 1) == [Segment(read, 0, 20), Segment(collate, 30, 40)]
    assert coalesced([Segment(collate, 0, 0.1), Segment(read, 0.1, 5)], 1) == [Segment(read, 0, 5)]


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_fits(width):
    rows = phases(forward=0.2, backward=0.4, communication_waited=0.2, queue_waited=0.1, read_beside=0.9, optimizer=0.1)
    said, tried = judged(rows)
    pieces = (
        Piece("0", "queue", None, 0.0, 0.0, 0.01),
        Piece("0", "forward", "0", 0.01, 0.04, 0.0),
        Piece("0", "backward", "0", 0.05, 0.05, 0.0),
        Piece("0 loader 0", "read", None, 0.0, 0.1, 0.0),
    )
    found = Profile(
        setting=Setting(**SETTING),
        steps=100,
        step_seconds=WALL,
        phases=rows,
        layers=LAYERS,
        communication=Communication(3, 0.03, 0.02, 0.01, 0.005),
        by_process=(process(0, 0.01, rows), process(1, 0.01, rows)),
        timeline=pieces,
        flights=(InFlight("0", "all_reduce", 0.06, 0.02),),
        overhead=Overhead(0.02, 0.01, 0.03, 0.02, 10, 0.102, 0.1),
        bottleneck=said,
        advice=tried,
    )
    shown = terminal.text(profiling_story(Stored(json.loads(json.dumps(found.to_json())))), width)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(shown.split())
    assert "profiling makes a step 2.0 % longer (95 %: 1.0 to 3.0 %" in text
    drawn = next(line for line in lines if line.startswith("process 0 ") and "f" in line)
    cells = drawn.split("process 0", 1)[1].strip()
    assert cells.count("░") == pytest.approx(len(cells) * 0.1, abs=1)
    assert cells.count("f") == pytest.approx(len(cells) * 0.4, abs=1)
    assert cells.count("b") == pytest.approx(len(cells) * 0.5, abs=1)
    loader = next(line for line in lines if line.startswith("process 0 loader 0"))
    assert set(loader.split("loader 0", 1)[1].strip()) == {"r"}
    under_way = next(line for line in lines if line.startswith("  under way"))
    assert under_way.count("━") == pytest.approx(len(cells) * 0.2, abs=2)
    assert "Communication: 3 operations a step, 30 ms under way: 20 ms waited for, 10 ms hidden" in text
    assert "Other programs had the cores 30 % of the time: look again without them." in text
