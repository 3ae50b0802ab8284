from __future__ import annotations

import pytest

from scalewise import schedules
from scalewise.recipe import Recipe


def test_warmup_rises_from_the_single_worker_rate():
    recipe = Recipe(workers=8, worker_batch=10, epochs=12.0, lr=0.001, lr_rule="linear", warmup_epochs=3.0)
    rate = schedules.build(recipe, samples_per_epoch=1000)
    assert rate(0) == pytest.approx(0.001)
    assert rate(1500) == pytest.approx(0.0045)
    assert rate(3000) == rate(9000) == pytest.approx(0.008)


def test_warmup_without_scaling_rises_from_zero():
    rate = schedules.build(Recipe(lr=0.1, warmup_epochs=1.0), samples_per_epoch=100)
    assert rate(0) == 0
    assert rate(50) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("name", "half", "end"), [("constant", 1.0, 1.0), ("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("step", 0.1, 0.01)]
)
def test_decay(name, half, end):
    rate = schedules.build(Recipe(worker_batch=10, lr=1.0, epochs=2.0, schedule=name), samples_per_epoch=100)
    assert rate(0) == pytest.approx(1.0)
    assert rate(100) == pytest.approx(half)
    assert rate(200) == pytest.approx(end, abs=1e-12)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "step"])
@pytest.mark.parametrize("workers", [1, 2, 8, 32])
def test_the_rate_summed_over_samples_does_not_depend_on_workers(name, workers):
    recipe = Recipe(workers=workers, worker_batch=10, lr=1.0, epochs=8.0, schedule=name)
    rate = schedules.build(recipe, samples_per_epoch=6400)
    steps = recipe.total_steps(6400)
    total = sum(rate((step + 0.5) * recipe.global_batch) * recipe.global_batch for step in range(steps))
    expected = {"constant": 51200, "cosine": 25600, "linear": 25600, "step": 51200 * (0.5 + 0.025 + 0.0025)}
    assert total == pytest.approx(expected[name], rel=2e-3)


@pytest.mark.parametrize("drop", [2, 3, 10])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20, 28, 45, 56, 100, 449])
def test_growth_keeps_to_the_samples_of_equal_steps(steps, drop):
    cuts = schedules.Cuts(Recipe(worker_batch=10, steps=steps, schedule="growth", drop=drop), samples=100)
    assert cuts.start(cuts.total_steps) == pytest.approx(10 * steps, rel=0.04)
    assert abs(cuts.start(cuts.total_steps) - 10 * steps) <= 10 * cuts.most_parts / 2
    assert cuts.total_steps <= steps


def test_growth_takes_larger_global_batches_where_step_lowers_the_rate():
    recipe = Recipe(workers=2, worker_batch=5, lr=1.0, epochs=8.0, schedule="growth", drop=4)
    cuts = schedules.Cuts(recipe, samples=400)
    lowered = schedules.build(recipe.replace(schedule="step"), samples_per_epoch=400)
    rate = schedules.build(recipe, samples_per_epoch=400)
    for step in range(cuts.total_steps):
        samples = cuts.start(step + 1) - cuts.start(step)
        assert samples == 10 * cuts.parts(step)
        assert rate(cuts.start(step)) / cuts.parts(step) == pytest.approx(lowered(cuts.start(step)))
    assert cuts.start(cuts.total_steps) == 3200
    assert cuts.total_steps == 160 + 20 + 5
