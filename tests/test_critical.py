"""The critical batch from steps and samples: planted laws, and intervals that cover them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scalewise.stats.critical_batch import CriticalBatch, agreement, efficiency, from_noise, predicted
from scalewise.stats.interval import Interval
from scalewise.stats.steps_law import fit_law, held_out_one_by_one, medians, to_go_by

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
    covered = foretold = 0
    for seed in range(TRIALS):
        law = fit_law(planted(90.0, 50.0, noise=0.1, seed=seed))
        covered += law.critical.low <= 90.0 and (law.critical.high is None or law.critical.high >= 90.0)
        new = 50.0 * (1 + 90.0 / 100) * math.exp(0.1 * np.random.default_rng(seed + TRIALS).standard_normal())
        at = law.steps_at(100)
        foretold += at.low <= new <= at.high
    assert 0.93 <= covered / TRIALS <= 0.97
    assert 0.93 <= foretold / TRIALS <= 0.98


def test_steps_that_keep_falling_leave_it_unbounded():
    law = fit_law(planted(1e7, 0.01, noise=0.05))
    assert law.critical.high is None
    assert law.critical.low > max(BATCHES)
    assert "at least" in str(law.critical)


def test_steps_that_do_not_fall_leave_zero_in_it():
    law = fit_law(planted(0.01, 100.0, noise=0.05))
    assert law.critical.low == 0
    assert law.critical.high < min(BATCHES)


def test_two_global_batches_identify_nothing():
    law = fit_law([(8, 100.0), (64, 40.0)])
    assert law.critical == CriticalBatch(None, None, None, "sweep")
    assert law.steps_at(20).low is None


def test_runs_at_one_global_batch_count_by_their_median():
    runs = planted(90.0, 50.0)
    outliers = [(batch, steps * factor) for batch, steps in runs for factor in (1.0, 1.0, 9.0)]
    assert fit_law(medians(outliers)) == fit_law(runs)


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
    found = from_noise([(0, Interval(200.0, 150.0, 300.0)), (100, Interval(200.0, 200.0, 200.0))], worker_batch=32)
    assert found.value == pytest.approx(200.0)
    assert 150.0 < found.low < 200.0 < found.high < 300.0
    assert found.method == "noise scale"


def test_a_prediction_holds_the_sampling_error_and_the_factor_by_which_a_noise_scale_is_off():
    exact, vague = (predicted(CriticalBatch(100.0, 100 / off, 100 * off, "noise scale")) for off in (1.0, 5.0))
    assert (exact.low, exact.high) == (pytest.approx(10.0), pytest.approx(1000.0))
    widened = 100 * math.exp(math.hypot(math.log(5), math.log(10)))
    assert (vague.low, vague.high) == (pytest.approx(100**2 / widened), pytest.approx(widened))
    assert predicted(CriticalBatch(100.0, 50.0, None, "noise scale")).high is None
    assert predicted(CriticalBatch(None, 50.0, None, "noise scale")).low == pytest.approx(5.0)


def test_trainings_that_bound_the_critical_batch_stand_alone():
    noise, law = CriticalBatch(900.0, 800.0, 1000.0, "noise scale"), fit_law(planted(64.0, 50.0, noise=0.05))
    assert to_go_by(noise, law) == law.critical
    narrow = to_go_by(noise, law, level=0.8)
    assert (narrow.value, narrow.level, narrow.method) == (law.critical.value, 0.8, "sweep")
    assert law.critical.low < narrow.low < narrow.value < narrow.high < law.critical.high
    branch = CriticalBatch(128.0, 64.0, 256.0, "branch")
    assert to_go_by(noise, branch) == to_go_by(None, branch) == branch


def test_a_law_without_an_upper_end_is_taken_together_with_the_noise_scale():
    """Steps at small global batches only: the best fit says as little as any larger critical batch."""
    law = fit_law([(8, 101.0), (16, 52.0), (32, 25.0), (64, 12.8)], "runs")
    assert law.critical.high is None
    noise = CriticalBatch(300.0, 250.0, 350.0, "noise scale")
    found, narrow = to_go_by(noise, law), to_go_by(noise, law, level=0.8)
    assert found.method == "runs and noise scale"
    assert found.low < narrow.low < found.value == narrow.value < narrow.high < found.high < 10_000
    assert found.value > noise.value  # the steps rule small ones out
    assert to_go_by(None, law) == law.critical
    assert to_go_by(noise, fit_law([(8, 100.0), (64, 40.0)])) == predicted(noise)


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
