from __future__ import annotations

import math

import numpy as np

from scalewise.noise import NoiseScale, ratio_of_means, signal_and_noise


def observed(random, groups, samples, mean, deviation, steps, population=math.inf):
    """A monitor fed with groups of iid gaussian gradients."""
    monitor = NoiseScale(population)
    for _ in range(steps):
        gradients = mean + deviation * random.standard_normal((groups, len(mean))) / math.sqrt(samples)
        square = float((gradients.mean(0) ** 2).sum())
        monitor.observe(float((gradients**2).sum(1).mean()), square, groups, samples)
    return monitor


def test_both_parts_are_unbiased():
    random = np.random.default_rng(0)
    mean, deviation = np.full(50, 0.2), 1.5
    truth = (50 * 0.04, 50 * 2.25)  # |G|², trΣ
    pairs = []
    for _ in range(4000):
        gradients = mean + deviation * random.standard_normal((4, 50)) / math.sqrt(8)
        pairs.append(signal_and_noise((gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum(), 4, 8))
    means, errors = np.mean(pairs, 0), np.std(pairs, 0) / math.sqrt(len(pairs))
    assert abs(means[0] - truth[0]) < 4 * errors[0]
    assert abs(means[1] - truth[1]) < 4 * errors[1]


def test_without_replacement_is_corrected():
    random = np.random.default_rng(1)
    population = random.standard_normal((60, 20)) + 0.4
    signal = float((population.mean(0) ** 2).sum())
    noise = float(population.var(0, ddof=1).sum())
    pairs = []
    for _ in range(6000):
        chosen = population[random.permutation(60)[:40]].reshape(4, 10, 20).mean(1)
        pairs.append(signal_and_noise((chosen**2).sum(1).mean(), (chosen.mean(0) ** 2).sum(), 4, 10, population=60))
    means, errors = np.mean(pairs, 0), np.std(pairs, 0) / math.sqrt(len(pairs))
    assert abs(means[0] - signal) < 4 * errors[0]
    assert abs(means[1] - noise) < 4 * errors[1]
    assert abs(means[0] - noise / 60 - signal) > 4 * errors[0]  # what leaving the correction out would give


def test_the_interval_covers_the_truth():
    random = np.random.default_rng(2)
    mean = np.full(40, 0.3)
    truth = 40 / (40 * 0.09)
    trials = 400
    covered = 0
    for _ in range(trials):
        estimate = observed(random, 4, 16, mean, 1.0, steps=60).estimate()
        assert estimate.low is not None
        covered += estimate.low <= truth <= (estimate.high or math.inf)
    assert 0.92 <= covered / trials <= 0.98


def test_few_steps_are_not_enough():
    estimate = observed(np.random.default_rng(3), 4, 16, np.full(40, 0.3), 1.0, steps=5).estimate()
    assert not estimate.enough


def test_no_signal_is_unbounded():
    estimate = observed(np.random.default_rng(4), 4, 16, np.zeros(40), 1.0, steps=60).estimate()
    assert estimate.high is None
    assert not estimate.enough


def test_an_unbounded_interval_still_has_a_lower_end():
    random = np.random.default_rng(5)
    estimate = ratio_of_means(10 + random.standard_normal(64), 0.1 + random.standard_normal(64))
    assert estimate.high is None
    assert estimate.low is not None
    assert 5 < estimate.low < 100


def test_steps_that_are_not_finite_are_skipped():
    monitor = NoiseScale()
    monitor.observe(math.inf, 1.0, 2, 4)
    monitor.observe(1.0, math.nan, 2, 4)
    assert monitor.current is None
    assert monitor.estimate().value is None


def test_identical_workers_have_no_noise():
    monitor = NoiseScale()
    for _ in range(60):
        monitor.observe(2.0, 2.0, 4, 8)
    assert monitor.current == 0.0
    assert not monitor.estimate().enough


def test_state_round_trip():
    random = np.random.default_rng(6)
    first = observed(random, 4, 8, np.full(10, 0.5), 1.0, steps=30)
    second = NoiseScale()
    second.restore(first.state())
    for monitor in (first, second):
        monitor.observe(3.0, 2.0, 4, 8)
    assert (first.current, first.estimate()) == (second.current, second.estimate())
