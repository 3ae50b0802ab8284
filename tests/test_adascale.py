from __future__ import annotations

import numpy as np
import pytest
import torch

import scalewise as sw
from scalewise import schedules
from scalewise.recipe import Recipe
from scalewise.stats.gain import GainAverage, gain
from scalewise.stats.noise_scale import signal_and_noise


def test_the_gain_is_that_of_the_paper_in_terms_of_workers_gradients():
    gradients = np.random.default_rng(0).normal(size=(4, 50)) + 0.5  # (worker, parameter), of 16 samples each
    mean_square, square_of_mean = (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()
    signal, noise = signal_and_noise(mean_square, square_of_mean, groups=4, group_samples=16)
    variance = (gradients**2).sum() / 3 - 4 / 3 * square_of_mean
    square = square_of_mean - variance / 4
    assert gain(noise, signal, workers=4, worker_batch=16) == pytest.approx(
        (variance + square) / (variance / 4 + square)
    )


@pytest.mark.parametrize(
    ("noise", "signal", "expected"),
    [(0.0, 1.0, 1.0), (1.0, 0.0, 8.0), (1.0, -1.0, 8.0), (-1.0, 1.0, 1.0), (0.0, 0.0, 1.0)],
)
def test_the_gain_lies_between_one_and_the_workers(noise, signal, expected):
    assert gain(noise, signal, workers=8, worker_batch=32) == expected


def test_averages_have_no_start_up_bias_and_skip_what_is_not_finite():
    average = GainAverage()
    for _ in range(5):
        average.observe(signal=2.0, noise=3.0, decay=0.9)
    average.observe(signal=float("nan"), noise=1.0, decay=0.9)
    assert (average.signal, average.noise, average.steps) == (pytest.approx(2.0), pytest.approx(3.0), 5)


def test_one_worker_is_the_plain_run_byte_for_byte():
    task = sw.load_task("mlp")
    plain, adapted = (
        [*sw.train(task, Recipe(worker_batch=20, epochs=3.0, lr=0.1, schedule="linear", lr_rule=rule, threads=1))][-1]
        for rule in ("none", "adascale")
    )
    assert adapted.weights_sha256 == plain.weights_sha256
    assert adapted.steps == plain.steps


def test_steps_count_as_many_as_they_are_worth():
    recipe = Recipe(workers=8, worker_batch=10, epochs=4.0, lr=0.05, lr_rule="adascale", schedule="linear", threads=1)
    task = sw.load_task("mlp")
    records = [*sw.train(task, recipe)]
    steps = [record for record in records if isinstance(record, sw.Step)]
    single = recipe.total_steps(len(task.train[1]))
    total = sum(step.gain for step in steps)
    assert single <= total < single + steps[-1].gain
    assert [step.progress for step in steps] == pytest.approx(np.cumsum([10 * step.gain for step in steps]).tolist())
    rate = schedules.build(recipe, len(task.train[1]))
    middle = steps[-1].progress - 5 * steps[-1].gain
    assert steps[-1].lr == pytest.approx(steps[-1].gain * rate(middle))
    assert records[-1].lr["peak"] == max(step.lr for step in steps)
    assert single / 8 <= records[-1].steps == len(steps) < single


def test_micro_batches_leave_the_gain_what_it_is():
    """The estimate is of the same quantity, from more and smaller groups: not the same number, but near it."""
    gains = []
    for micro_batch in (None, 10):
        recipe = Recipe(workers=4, worker_batch=40, micro_batch=micro_batch, epochs=10.0, lr=0.0, lr_rule="adascale",
                        threads=1)  # fmt: skip
        steps = [record for record in sw.train(sw.load_task("mlp"), recipe) if isinstance(record, sw.Step)]
        gains.append(steps[-1].gain)
    assert gains[0] == pytest.approx(gains[1], rel=0.15)


def test_momentum_correction_is_built_in():
    """Goyal et al. 2017, section 3: with the rate inside of the buffer, u ← μ·(η′÷η)·u + η′·g keeps a change of rate
    from changing old gradients' weight. Torch keeps the rate outside, v ← μ·v + g, which is the same without a factor.
    """
    rates = [0.01, 0.02, 0.04, 0.04, 0.01]
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = sw.optim.OPTIMIZERS["momentum"]([weight], Recipe(optimizer="momentum", momentum=0.9))
    by_hand, buffer, before = weight.detach().clone(), torch.zeros(2, dtype=torch.float64), rates[0]
    for rate in rates:
        weight.grad = 3 * weight.detach()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        buffer = 0.9 * (rate / before) * buffer + rate * 3 * by_hand
        by_hand, before = by_hand - buffer, rate
    torch.testing.assert_close(weight.detach(), by_hand)
