"""Costs, break-even sizes and shares of time, recovered from timings made up with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalewise.plan.hardware import Link
from scalewise.runs.bench.devices import break_even
from scalewise.runs.bench.workloads import OPERATIONS
from scalewise.stats.interval import Interval
from scalewise.stats.timing import Cost, Parts, fit, lost, medians, parts_of_step, rounds

BYTES = np.array([4e3, 3e4, 2.5e5, 1e6, 4e6, 16e6])
NOISE, BUSY, ROUNDS, SEEDS = 0.05, 0.08, 9, 60


def noisy(seconds, generator):
    """Rounds of some timings: 5 % of noise, and now and then another program that makes it up to 4 times as long."""
    found = np.asarray(seconds)[:, None] * np.exp(generator.normal(0, NOISE, (len(seconds), ROUNDS)))
    return np.where(generator.random(found.shape) < BUSY, found * generator.uniform(1.5, 4, found.shape), found)


def fitted(messages, units, seconds):
    return [fit(messages, units, noisy(seconds, np.random.default_rng(seed)), seed) for seed in range(SEEDS)]


@pytest.mark.parametrize(("latency", "bandwidth"), [(60e-6, 1.2e9), (2e-3, 12e6), (5e-6, 2e10)])
def test_latency_and_bandwidth_are_recovered_within_5_percent(latency, bandwidth):
    costs = fitted([1.0] * 6, BYTES, latency + BYTES / bandwidth)
    for values, true in [
        ([cost.fixed_seconds.value for cost in costs], latency),
        ([1 / cost.unit_seconds.value for cost in costs], bandwidth),
    ]:
        assert np.median(values) == pytest.approx(true, rel=0.02)
        assert np.mean(np.abs(np.array(values) / true - 1) < 0.05) >= 0.9
    held = [cost.fixed_seconds.low <= latency <= cost.fixed_seconds.high for cost in costs]
    assert np.mean(held) >= 0.85
    assert all(cost.misfit < 0.1 for cost in costs)


def test_the_link_is_recovered_over_sizes_and_process_counts():
    link = Link("planted", 150e-6, 1.1e8)
    cases = [(count, size) for count in (2, 4, 8) for size in BYTES]
    messages = [2.0 * (count - 1) for count, _ in cases]
    carried = [2 * (count - 1) / count * size for count, size in cases]
    costs = fitted(messages, carried, [link.reduction_seconds(size, count) for count, size in cases])
    for cost in costs:
        assert cost.fixed_seconds.value == pytest.approx(link.latency_seconds, rel=0.05)
        assert 1 / cost.unit_seconds.value == pytest.approx(link.bytes_per_second, rel=0.05)


def test_no_cost_is_below_zero_and_none_is_made_up():
    without_latency = fit([1.0] * 6, BYTES, [[size / 1e9] for size in BYTES])
    assert without_latency.fixed_seconds.value == pytest.approx(0, abs=1e-9)
    falling = fit([1.0] * 3, [1.0, 2.0, 3.0], [[3.0], [2.0], [1.0]])
    assert falling.unit_seconds.value == 0
    assert falling.misfit > 0.3
    with pytest.raises(ValueError, match="two sizes"):
        fit([1.0, 1.0], [5.0, 5.0], [[1.0], [1.0]])


def test_the_inverse_of_an_interval_turns_it_around():
    assert Interval(2.0, 1.0, 4.0).inverse() == Interval(0.5, 0.25, 1.0)
    assert Interval(1.0, 0.0, 2.0).inverse(3.0) == Interval(3.0, 1.5, math.inf)


def cost(fixed, unit):
    return Cost(Interval(fixed, fixed, fixed), Interval(unit, unit, unit), 0.0)


HOST, DEVICE, COPIES = cost(2e-6, 1 / 5e10), cost(1e-5, 1 / 5e12), cost(4e-5, 1 / 1e10)


def operation_called(name):
    return next(operation for operation in OPERATIONS if operation.name == name)


def true_break_even(operation):
    """By trying one size after another."""

    def pays(size):
        there = DEVICE.seconds(operation.work(size)) + COPIES.seconds(operation.moved_bytes(size))
        return there <= HOST.seconds(operation.work(size))

    return next(size for size in range(1, 100_000) if pays(size))


def test_the_break_even_is_where_sending_begins_to_pay():
    operation = operation_called("matrix product")
    found = break_even(HOST, DEVICE, COPIES, operation.work, operation.moved_bytes, (32, 1024))
    assert found.size == true_break_even(operation) > 32
    assert not found.extrapolated
    assert break_even(HOST, DEVICE, COPIES, operation.work, operation.moved_bytes, (512, 1024)).extrapolated


def test_the_break_even_is_recovered_from_timings_within_5_percent():
    operation = operation_called("matrix product")
    sizes = np.array(operation.sizes)
    work, moved = operation.work(sizes), operation.moved_bytes(sizes)
    found = []
    for seed in range(SEEDS):
        generator = np.random.default_rng(seed)
        fits = [
            fit(
                [1.0] * len(sizes),
                units,
                noisy(planted.fixed_seconds.value + units * planted.unit_seconds.value, generator),
            )
            for planted, units in ((HOST, work), (DEVICE, work), (COPIES, moved))
        ]
        found.append(break_even(*fits, operation.work, operation.moved_bytes, (32, 1024)).size)
    relative = np.array(found) / true_break_even(operation)
    assert np.median(relative) == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(relative - 1) < 0.05) >= 0.9


def test_what_costs_more_to_carry_than_to_do_is_never_sent():
    elementwise = operation_called("elementwise")
    host, device = cost(1e-6, 1 / 2e10), cost(1e-5, 1 / 1e12)
    found = break_even(host, device, COPIES, elementwise.work, elementwise.moved_bytes, (4096, 1 << 22))
    assert found.size is None
    assert found.looked_to == 64 << 22
    free = break_even(host, device, None, elementwise.work, elementwise.moved_bytes, (4096, 1 << 22))
    assert free.size == pytest.approx(9e-6 / (1 / 2e10 - 1 / 1e12) / 12, rel=0.01)  # 12 bytes an element
    assert break_even(device, cost(0.0, 0.0), None, elementwise.work, elementwise.moved_bytes, (1, 2)).size == 1


def test_waiting_is_split_into_communication_and_imbalance():
    """Two processes: 10 s of computing, one of them 4 s more in every other step, 2 s of exchange, 1 s for samples."""
    waits = [[2.0, 6.0, 2.0, 6.0], [2.0, 2.0, 2.0, 2.0]]
    found = parts_of_step([56.0, 55.9], waits, [4.0, 4.0], 4)
    assert found == Parts(14.0, 2.0, 1.0, 1.0)
    assert found.compute_seconds == 10.0


def test_shares_and_efficiency_add_up_to_the_whole():
    base, own = Parts(20.0, 0.0, 0.0, 2.0), Parts(14.0, 2.0, 1.0, 1.0)
    efficiency = 10.0 / 14.0  # half of 20 would be ideal
    found = lost(own, base, 10.0)
    assert found.communication_share == pytest.approx(2 / 14)
    assert found.imbalance_share == pytest.approx(1 / 14)
    assert found.input_share == pytest.approx(0)
    assert found.rest_share == pytest.approx(1 / 14)  # 10 instead of 9
    whole = efficiency + found.communication_share + found.imbalance_share + found.input_share + found.rest_share
    assert whole == pytest.approx(1)


def test_one_disturbed_round_does_not_count():
    quiet = Parts(1.0, 0.1, 0.0, 0.0)
    assert medians([quiet, Parts(9.0, 5.0, 1.0, 1.0), quiet]) == quiet


def test_rounds_end_when_time_is_up_but_there_are_some():
    assert [*rounds(5, 1e9)] == [0, 1, 2, 3, 4]
    assert [*rounds(5, 0.0)] == [0, 1, 2]
    assert [*rounds(5, 0.0, least=1)] == [0]
