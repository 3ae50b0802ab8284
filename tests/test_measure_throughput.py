"""Throughput against the worker batch: the knee of planted curves, operations counted by hand, and a real task."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

import scalewise as sw
from scalewise.engine.processes.memory import Free, Held
from scalewise.runs.measure import throughput as module
from scalewise.runs.measure.throughput import count_operations, matrix_product_peak, throughput
from scalewise.stats.interval import median_interval
from scalewise.stats.timing import find_knee, rate

BATCHES = [2**power for power in range(12)]


def curve(half, noise, rounds, seed):
    """Rounds of a throughput b ÷ (b + half), 90 % of its end at 9 × half; machine load is shared by a round."""
    generator = random.Random(seed)
    found = {batch: [] for batch in BATCHES}
    for _ in range(rounds):
        load = generator.uniform(0.5, 1.0)
        for batch in BATCHES:
            found[batch].append(load * 1000 * batch / (batch + half) * (1 + generator.gauss(0, noise)))
    return found


@pytest.mark.parametrize("half", [0.3, 2, 7, 30])
def test_the_knee_of_a_curve_without_noise(half):
    knee = find_knee(curve(half, 0.0, 5, seed=0))
    best = BATCHES[-1] / (BATCHES[-1] + half)
    expected = next(batch for batch in BATCHES if batch / (batch + half) >= 0.9 * best)
    assert knee.worker_batch == knee.low == knee.high == expected


def test_under_noise_the_interval_holds_the_knee():
    true = 64  # 64 ÷ 68 of the end; 32 has 89 %, close enough to be mistaken for it
    knees = [find_knee(curve(4, 0.03, 9, seed)) for seed in range(200)]
    assert all(knee.low <= knee.worker_batch <= knee.high for knee in knees)
    assert sum(knee.low <= true <= knee.high for knee in knees) >= 190
    assert sum(knee.worker_batch in (32, true) for knee in knees) >= 190


def test_a_curve_that_falls_again_has_its_knee_before_the_best():
    speeds = {1: 10.0, 2: 19.0, 4: 30.0, 8: 28.0, 16: 20.0}
    assert find_knee({batch: [speed] * 3 for batch, speed in speeds.items()}).worker_batch == 4


def test_the_interval_of_a_median_covers_it():
    generator = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([generator.expovariate(1.0) for _ in range(9)])
        hits += low <= 0.6931 <= high
    assert 0.95 <= hits / 2000 <= 0.975  # 96.1 % for nine values
    assert rate(4, [3.0, 1.0, 2.0]) == (rate(4, [1.0, 2.0, 3.0]))
    assert rate(4, [3.0, 1.0, 2.0]).samples_per_second == 2.0


def test_the_peak_is_that_of_a_matrix_product():
    peak = matrix_product_peak(torch.device("cpu"), torch.float32, seconds=0.05)
    left = torch.randn(512, 512)
    seconds = min(module.timed(lambda: left @ left, torch.device("cpu")) for _ in range(20))
    assert peak > 0.5 * 2 * 512**3 / seconds


def linear(width=96):
    x = torch.rand(512, 64)
    return sw.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)),
        train=(x, torch.arange(512) % 10),
        test=(x, torch.arange(512) % 10),
        loss=F.cross_entropy,
        recipe=sw.Recipe(worker_batch=8, threads=1),
    )


@pytest.fixture(scope="module", autouse=True)
def short_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROUND_SECONDS", 0.01)
        patch.setattr(module, "PRODUCT_SIDES", (256, 512))
        yield


def test_a_slow_moment_does_not_end_the_curve(monkeypatch):
    begun: list[str] = []

    def timed(work, device, times=1):
        """The first try at every worker batch but the first falls into another program's time."""
        work()
        return 0.05 if begun and begun.pop() != "throughput: worker batch 1" else 0.001

    monkeypatch.setattr(module, "timed", timed)
    found = throughput(linear(), linear().recipe, largest=64, notify=begun.append)
    assert [row.worker_batch for row in found.rows] == [1, 2, 4, 8, 16, 32, 64]


def test_a_shortage_in_the_rounds_ends_the_curve_earlier(monkeypatch):
    """As when other trainings, or another program, have taken the memory by then."""
    begun: list[str] = []
    taken = module.take_step

    def take_step(training):
        if "round 3" in begun[-1] and training.recipe.worker_batch > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        taken(training)

    monkeypatch.setattr(module, "take_step", take_step)
    found = throughput(linear(), linear().recipe, largest=32, notify=begun.append)
    assert [row.worker_batch for row in found.rows] == [1, 2, 4, 8]
    assert {row.rounds for row in (*found.rows, *found.inference)} == {module.ROUNDS}


def test_the_curve_ends_before_the_memory_does(monkeypatch):
    """Each training that is opened holds 100 bytes more than the one before, and 1,000 were free at the start."""
    own = [100 * number for number in (0, 1, 1, 3, 3, 6, 6, 10, 10, 15)]
    monkeypatch.setattr(module, "held", lambda: Held(own.pop(0), 0, 0))
    monkeypatch.setattr(module, "free_memory", lambda: Free(1000 - 100 * {8: 1, 6: 3, 4: 6, 2: 10}[len(own)], "told"))
    found = throughput(linear(), linear().recipe, largest=64)
    assert [row.worker_batch for row in found.rows] == [1, 2, 4]  # 600 held and 400 free, with 600 to come


def test_a_shortage_at_the_only_worker_batch_is_raised(monkeypatch):
    def take_step(training):
        raise MemoryError("not one")

    monkeypatch.setattr(module, "take_step", take_step)
    with pytest.raises(MemoryError, match="not one"):
        throughput(linear(), linear().recipe, largest=1)


@pytest.fixture(scope="module")
def report():
    task = linear()
    told = []
    found = throughput(task, task.recipe, largest=64, notify=told.append)
    assert told[0].startswith("throughput: counting")
    return found


def test_operations_are_those_counted_by_hand(report):
    products = 64 * 96 + 96 * 10
    forward, weights, inputs = products, products, 96 * 10  # the first layer's input needs no gradient
    assert report.flops_per_sample == 2 * (forward + weights + inputs)


def attended(query, key, value):
    """Attention as two products."""
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value


def test_attention_in_one_piece_counts_as_its_products_do():
    heads = [torch.rand(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    scores = 2 * (2 * 4 * 16 * 16 * 8)  # of all queries with all keys

    def both(attention):
        return count_operations(lambda: attention(*heads)), count_operations(lambda: attention(*heads).sum().backward())

    assert both(attended) == (2 * scores, 6 * scores)
    assert both(F.scaled_dot_product_attention) == (2 * scores, 7 * scores)  # backward computes the scores anew


def test_the_curve_goes_in_doublings_to_the_largest_that_fits(report):
    assert [row.worker_batch for row in report.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert [row.worker_batch for row in report.inference] == [1, 2, 4, 8, 16, 32, 64]
    assert all(0 < row.low <= row.samples_per_second <= row.high for row in (*report.rows, *report.inference))
    assert {row.rounds for row in report.rows} == {module.ROUNDS}
    assert report.rows[-1].samples_per_second > 4 * report.rows[0].samples_per_second
    assert report.knee in [row.worker_batch for row in report.rows]


def test_mfu_is_what_it_says(report):
    best = max(row.samples_per_second for row in report.rows)
    assert report.mfu == pytest.approx(report.flops_per_sample * best / report.peak_flops_per_second)
    assert 0 < report.mfu < 1
    assert json.loads(json.dumps(asdict(report)))["rows"][0].keys() >= {
        "worker_batch",
        "samples_per_second",
    }


def test_batch_norm_begins_with_two_samples_and_ghosts_with_whole_groups():
    task = sw.load_task("digits", ["bn=true"])
    for recipe, expected in [(task.recipe, [2, 4, 8]), (task.recipe.replace(batch_norm="ghost:4"), [4, 8])]:
        rows = throughput(task, recipe.replace(worker_batch=8, threads=1), largest=8).rows
        assert [row.worker_batch for row in rows] == expected
