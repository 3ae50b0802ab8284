"""The critical batch from steps and samples: planted laws, and intervals that cover them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalewise.stats.critical_batch import (
    CriticalBatch,
    agreement,
    efficiency,
    fit_law,
    from_noise,
    held_out_one_by_one,
)
from scalewise.stats.noise_scale import NoiseEstimate

BATCHES = (8, 16, 32, 64, 128, 256, 512)
TRIALS = 1000


def planted(critical: float, least_steps: float, noise: float = 0.0, seed: int = 0) -> list[tuple[int, float]]:
    generator = np.random.default_rng(seed)
    return [
        (batch, least_steps * (1 + critical / batch) * math.exp(noise * generator.standard_normal()))
        for batch in BATCHES
    ]


@pytest.mark.parametrize("critical", [3.0, 40.0, 600.0, 20_000.0])
def test_a_planted_law_is_recovered(critical):
    law = fit_law(planted(critical, least_steps=37.0))
    assert law.critical.value == pytest.approx(critical, rel=1e-3)
    assert law.least_steps == pytest.approx(37.0, rel=1e-3)
    assert law.least_samples == pytest.approx(37.0 * critical, rel=1e-3)
    assert law.steps_at(100).value == pytest.approx(37.0 * (1 + critical / 100), rel=1e-3)
    assert law.residual < 1e-3


def test_at_the_critical_batch_steps_and_samples_are_twice_their_least():
    law = fit_law(planted(64.0, least_steps=50.0))
    steps = law.steps_at(64).value
    assert steps == pytest.approx(2 * law.least_steps, rel=1e-3)
    assert steps * 64 == pytest.approx(2 * law.least_samples, rel=1e-3)
    assert efficiency(64, law.critical.value) == pytest.approx(0.5, rel=1e-3)


def test_intervals_cover_what_was_planted():
    covered = predicted = 0
    for seed in range(TRIALS):
        law = fit_law(planted(90.0, 50.0, noise=0.1, seed=seed))
        covered += law.critical.low <= 90.0 and (law.critical.high is None or law.critical.high >= 90.0)
        new = 50.0 * (1 + 90.0 / 100) * math.exp(0.1 * np.random.default_rng(seed + TRIALS).standard_normal())
        at = law.steps_at(100)
        predicted += at.low <= new <= at.high
    assert 0.93 <= covered / TRIALS <= 0.97
    assert 0.93 <= predicted / TRIALS <= 0.98


def test_steps_that_keep_falling_leave_it_unbounded():
    law = fit_law(planted(1e7, 0.01, noise=0.05))
    assert law.critical.high is None
    assert law.critical.low > max(BATCHES)
    assert not law.critical.identified
    assert "at least" in str(law.critical)


def test_steps_that_do_not_fall_leave_zero_in_it():
    law = fit_law(planted(0.01, 100.0, noise=0.05))
    assert law.critical.low == 0
    assert law.critical.high < min(BATCHES)
    assert not law.critical.identified


def test_two_global_batches_identify_nothing():
    law = fit_law([(8, 100.0), (64, 40.0)])
    assert law.critical == CriticalBatch(None, None, None, "sweep")
    assert law.steps_at(20).low is None


def test_runs_at_one_global_batch_count_by_their_median():
    runs = planted(90.0, 50.0)
    outliers = [(batch, steps * factor) for batch, steps in runs for factor in (1.0, 1.0, 9.0)]
    assert fit_law(outliers) == fit_law(runs)


def test_the_held_out_global_batches_lie_in_between():
    rows = held_out_one_by_one(planted(90.0, 50.0, noise=0.05))
    assert [row.global_batch for row in rows] == [*BATCHES[1:-1]]
    for row in rows:
        assert abs(row.error) < 0.2
        assert row.predicted.low < row.predicted.value < row.predicted.high
    exact = planted(90.0, 50.0)
    wrong = [(batch, steps * 3 if batch == 64 else steps) for batch, steps in exact]
    (row,) = [row for row in held_out_one_by_one(wrong) if row.global_batch == 64]
    assert row.error == pytest.approx(1 / 3 - 1, rel=1e-3)  # the other six still tell the truth


def test_the_cheap_estimate_is_the_noise_scale():
    assert from_noise(NoiseEstimate(200.0, 150.0, None, False)) == CriticalBatch(200.0, 150.0, None, "noise scale")


@pytest.mark.parametrize(
    ("cheap", "direct", "words"),
    [
        ((100.0, 80.0, 130.0), (120.0, 100.0, 160.0), ["they agree", "1.2 times"]),
        ((100.0, 80.0, 130.0), (900.0, 700.0, None), ["they disagree", "9 times", "trust the sweep", "700"]),
        ((100.0, 95.0, 105.0), (120.0, 110.0, 130.0), ["they disagree, though not by much", "1.2 times"]),
        ((100.0, 80.0, 130.0), (None, 512.0, None), ["they disagree", "512"]),
        ((900.0, 800.0, None), (None, 512.0, None), ["they do not contradict each other", "a lower bound only"]),
        ((None, None, None), (120.0, 100.0, 160.0), ["cannot be compared", "noise scale"]),
        ((100.0, None, None), (120.0, 90.0, 160.0), ["they agree"]),
    ],
)
def test_agreement_and_disagreement_are_said(cheap, direct, words):
    sentence = agreement(CriticalBatch(*cheap, "noise scale"), CriticalBatch(*direct, "sweep"))
    for word in words:
        assert word in sentence


def test_a_number_that_the_sweep_does_not_bound_is_not_one_to_go_by():
    anything = CriticalBatch(13.0, 0.0, None, "sweep")
    assert str(anything) == "not bounded (best fit 13)"
    cheap = CriticalBatch(159.0, 140.0, 180.0, "noise scale")
    assert agreement(cheap, anything).startswith("they cannot be compared, as the sweep gives no critical batch")
