from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.errors import UsageError
from scalewise.stats.interval import Scatter
from scalewise.stats.noise_scale import NoiseEstimate, ratio_of_means, signal_and_noise, weighted_mean
from scalewise.stats.precondition import preconditioner
from scalewise.watch.noise import Meter, NoiseScale

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from noise_synthetic import Quadratic, Setting, coverage, frozen, moving

JOB = Path(__file__).parent / "jobs" / "noise.py"


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


@pytest.mark.parametrize(
    "setting",
    [
        Setting(2, 2, 1.0, 50),
        Setting(2, 200, 20.0, 50),
        Setting(8, 10, 1.0, 50),
        Setting(8, 200, 0.05, 50),
        Setting(8, 2, 20.0, 100),
        Setting(4, 50, 300.0, 100),  # |G|² is hardly to be told from 0, and not at all
    ],
)
def test_the_interval_covers_the_truth(setting):
    """All settings, each 1,000 times, are in benchmarks/noise.py."""
    random = np.random.default_rng(2)
    found = coverage([frozen(setting, random) for _ in range(1000)])
    assert 0.93 <= found.covered <= 0.97


@pytest.mark.parametrize(
    ("measured", "low", "high"),
    [
        (-3.0, None, 0.42),
        (-2.0, None, 0.62),
        (0.0, None, 1.96),
        (1.0, None, 2.96),
        (2.0, 0.35, 3.96),
        (4.0, 2.04, 5.96),
    ],
)
def test_a_bottom_that_cannot_be_negative_has_the_published_interval(measured, low, high):
    """A Gaussian mean with a bound at 0, 95 %: Feldman and Cousins 1998, table X."""
    seen = Scatter(steps=100, top=1.0, bottom=measured, top_top=0.0, top_bottom=0.0, bottom_bottom=1.0, freedom=1e9)
    found = seen.interval()
    assert 1 / found.low == pytest.approx(high, abs=0.006)
    assert (found.high and 1 / found.high) == (None if low is None else pytest.approx(low, abs=0.006))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_an_interval_does_not_depend_on_the_unit(scale):
    random = np.random.default_rng(6)
    for signal in (0.05, 0.2, 0.4, 2.0):
        top, bottom = 10 + random.standard_normal(64), signal + random.standard_normal(64)
        one, other = ratio_of_means(top, bottom), ratio_of_means(scale * top, bottom)
        assert other.low == pytest.approx(scale * one.low, rel=1e-6)
        assert (other.high and other.high / scale) == (one.high and pytest.approx(one.high, rel=1e-6))


@pytest.mark.parametrize("setting", [Quadratic(), Quadratic(groups=2, deviation=8.0)])
def test_on_a_path_the_interval_covers_the_windows_ratio_of_means(setting):
    random = np.random.default_rng(3)
    assert coverage([moving(setting, random) for _ in range(400)]).covered >= 0.9


def test_few_steps_are_not_enough():
    estimate = observed(np.random.default_rng(3), 4, 16, np.full(40, 0.3), 1.0, steps=5).estimate()
    assert not estimate.enough
    assert estimate.verdict.startswith("not enough: about ")
    assert observed(np.random.default_rng(3), 4, 16, np.full(40, 0.3), 1.0, steps=2).estimate().more_steps == 18
    assert NoiseScale().estimate().verdict == "not enough: about 20 more steps"


def test_as_many_steps_as_were_missing_are_enough():
    """At twenty times the batch, from 60 steps: those it asks for, times one half, two and so on."""
    shares = dict.fromkeys((0.25, 1.0, 2.0), 0)
    trials = 20
    for seed in range(trials):
        mean, deviation = np.full(100, 0.1), math.sqrt(10.0)  # a noise scale of 1,000 samples at a batch of 64
        missing = observed(np.random.default_rng(seed), 4, 16, mean, deviation, steps=60).estimate().more_steps
        for times in shares:
            steps = 60 + round(times * (missing or 0))
            shares[times] += (
                observed(np.random.default_rng(1000 + seed), 4, 16, mean, deviation, steps).estimate().enough
            )
    assert shares[0.25] < 0.4 * trials < shares[1.0] < shares[2.0]


def test_no_signal_is_unbounded():
    estimate = observed(np.random.default_rng(4), 4, 16, np.zeros(40), 1.0, steps=60).estimate()
    assert estimate.high is None
    assert not estimate.enough
    assert estimate.verdict.startswith("not enough")


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


@pytest.mark.parametrize(
    ("square", "value", "verdict"), [(2.0, 0.0, "identical workers: "), (0.0, None, "no gradient: it is 0")]
)
def test_identical_workers_and_no_gradients_are_named(square, value, verdict):
    monitor = NoiseScale()
    for _ in range(60):
        monitor.observe(square * (1 + 1e-7), square, 4, 8)  # to rounding
    estimate = monitor.estimate()
    assert (estimate.value, estimate.low, estimate.high, estimate.enough) == (value, None, None, False)
    assert estimate.verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((1.0, 0.5, math.nan, 4), "at least 2 groups"),
        ((1.0, 0.5, 2, 0), "a group must have samples, got group_samples=0"),
        ((-1.0, 0.5, 2, 4), "at least 0, got mean_square=-1.0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, words):
    with pytest.raises(UsageError, match=words):
        NoiseScale().observe(*numbers)
    with pytest.raises(UsageError, match="population=0"):
        NoiseScale(population=0)


def test_norms_too_large_to_be_squared_are_skipped():
    monitor = NoiseScale()
    monitor.observe_norms(1e200, 1e199, small_batch=4, big_batch=8)
    assert monitor.current is None


def test_a_parameter_that_never_has_a_gradient_counts_for_nothing():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])  # the second is never used
    optimizer = torch.optim.Adam(model.parameters())
    meter = Meter(NoiseScale(), model, 1, optimizer, layers=False)
    gradient = torch.ones(2, 3)
    assert math.isnan(meter.norm(2, gradient))  # before the first step nothing has coordinates
    model[0](torch.ones(4, 3)).sum().backward()
    optimizer.step()
    meter.forget()
    assert float(meter.norm(2, gradient)) == 0.0
    assert float(meter.norm(0, gradient)) > 0.0


def test_sparse_gradients_are_measured():
    table = nn.Embedding(20, 4, sparse=True)
    monitor = NoiseScale()
    accumulation = monitor.watch_accumulation(table, micro_batch=2)
    for step in range(30):
        for part in range(2):
            table(torch.tensor([(2 * step + part) % 20, 3])).square().sum().backward()
        accumulation.step()
        table.zero_grad()
    assert monitor.estimate().value is not None


def test_state_round_trip():
    random = np.random.default_rng(6)
    first = observed(random, 4, 8, np.full(10, 0.5), 1.0, steps=30)
    second = NoiseScale()
    second.restore(json.loads(json.dumps(first.state())))
    for monitor in (first, second):
        monitor.observe(3.0, 2.0, 4, 8)
    assert (first.current, first.estimate()) == (second.current, second.estimate())


def test_the_state_keeps_layers_and_how_often_was_looked():
    first, _ = accumulated(layers=True, steps=30)
    second = NoiseScale()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.every == 4
    assert [*second.layers] == [*first.layers] != []
    assert second.estimate() == first.estimate()
    assert {name: layer.estimate() for name, layer in second.layers.items()} == {
        name: layer.estimate() for name, layer in first.layers.items()
    }
    assert second.layers["0.weight"].every == 4


def test_a_plain_state_has_the_keys_it_always_had():
    state = observed(np.random.default_rng(7), 4, 8, np.full(10, 0.5), 1.0, steps=3).state()
    assert [*state] == ["steps", "seen", "different", "average"]


def test_a_state_from_before_identical_workers_were_counted_is_read():
    state = observed(np.random.default_rng(7), 4, 8, np.full(10, 0.5), 1.0, steps=30).state()
    del state["different"]
    monitor = NoiseScale()
    monitor.restore(state)
    assert monitor.estimate().value is not None


def test_the_result_keeps_its_keys():
    assert set(NoiseEstimate(1.0, 0.5, 2.0, True, 3, "x").to_json()) == {"value", "low", "high", "enough"}


def test_two_norms_and_two_batch_sizes():
    random = np.random.default_rng(8)
    monitor = NoiseScale()
    mean, deviation = np.full(40, 0.3), 2.0
    for _ in range(800):
        samples = mean + deviation * random.standard_normal((24, 40))
        small, big = samples[:8].mean(0), samples.mean(0)
        monitor.observe_norms(float(np.linalg.norm(small)), float(np.linalg.norm(big)), small_batch=8, big_batch=24)
    estimate = monitor.estimate()
    assert estimate.enough
    assert estimate.low < 4.0 / 0.09 < estimate.high
    with pytest.raises(UsageError, match="small_batch below big_batch, got 8 and 8"):
        monitor.observe_norms(1.0, 1.0, small_batch=8, big_batch=8)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def micro_batch(model):
    F.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,))).backward()


def accumulated(optimizer_of=None, layers=False, steps=3, clip=False, every=4):
    """A loop of four micro batches a step; what it shows, and L and T by parameter as they are."""
    model, generator = small_model(), torch.Generator().manual_seed(1)
    optimizer = (optimizer_of or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    monitor = sw.NoiseScale()
    meter = monitor.watch_accumulation(
        model, 5, optimizer=optimizer if optimizer_of else None, layers=layers, every=every
    )
    expected = []
    for _ in range(steps):
        parts = []
        factors = [
            preconditioner(optimizer.state[p]["exp_avg_sq"], float(optimizer.state[p]["step"]), 0.999, 1e-8)
            if optimizer_of and optimizer.state
            else torch.tensor(math.nan if optimizer_of else 1.0)
            for p in model.parameters()
        ]
        for _ in range(4):
            x = torch.randn(5, 6, generator=generator)
            loss = F.cross_entropy(model(x), (x.sum(1) > 0).long())
            parts.append(
                [
                    g * f
                    for g, f in zip(
                        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True), factors, strict=True
                    )
                ]
            )
            (loss / 4).backward()
        meter.step()
        small = [np.mean([float((part[i] ** 2).sum()) for part in parts]) / 16 for i in range(4)]
        big = [float((sum(part[i] for part in parts) / 4).square().sum()) / 16 for i in range(4)]
        expected.append((small, big))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return monitor, expected


def pairs(monitor):
    steps = monitor.state()["steps"]
    return [*zip(steps[::2], steps[1::2], strict=True)]


@pytest.mark.parametrize("clip", [False, True])
def test_gradient_accumulation_sees_every_micro_batch(clip):
    monitor, expected = accumulated(clip=clip)
    for pair, (small, big) in zip(pairs(monitor), expected, strict=True):
        assert pair == pytest.approx(signal_and_noise(sum(small), sum(big), 4, 5), rel=1e-4)


@pytest.mark.parametrize(("every", "looked"), [(1, [*range(30)]), (4, [*range(20), 20, 24, 28])])
def test_after_twenty_steps_an_accumulating_loop_is_looked_at_now_and_then(every, looked):
    monitor, expected = accumulated(steps=30, every=every)
    assert len(pairs(monitor)) == len(looked)
    for pair, step in zip(pairs(monitor), looked, strict=True):
        small, big = expected[step]
        assert pair == pytest.approx(signal_and_noise(sum(small), sum(big), 4, 5), rel=1e-4)


def test_missing_steps_are_those_of_the_training_not_of_the_looks():
    looks = np.random.default_rng(5).normal(1.0, 2.0, 24)
    each, some = sw.NoiseScale(), sw.NoiseScale()
    some.every = 4
    for monitor in (each, some):
        for value in looks:
            monitor.observe(3.0 + value, 2.0, groups=2, group_samples=4)
    assert not each.estimate().enough
    assert some.estimate().more_steps == 4 * each.estimate().more_steps > 0


def test_layers_of_an_accumulating_loop():
    monitor, expected = accumulated(layers=True)
    assert [*monitor.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for number, layer in enumerate(monitor.layers.values()):
        for pair, (small, big) in zip(pairs(layer), expected, strict=True):
            assert pair == pytest.approx(signal_and_noise(small[number], big[number], 4, 5), rel=1e-3, abs=1e-9)


def test_the_one_parameter_of_a_model_is_a_layer():
    model, scale = nn.Linear(6, 3, bias=False), sw.NoiseScale()
    meter = scale.watch_accumulation(model, 5, layers=True)
    micro_batch(model)
    micro_batch(model)
    meter.step()
    assert [*scale.layers] == ["weight"]
    assert pairs(scale.layers["weight"]) == pairs(scale)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_passes_that_can_be_differentiated_again_are_seen_too():
    model, scale = small_model(), sw.NoiseScale()
    meter = scale.watch_accumulation(model, 5)
    for _ in range(2):
        for _ in range(2):
            F.cross_entropy(model(torch.randn(5, 6)), torch.zeros(5, dtype=torch.long)).backward(create_graph=True)
        meter.step()
        model.zero_grad()
    assert len(pairs(scale)) == 2


def test_preconditioned_by_the_state_before_the_step():
    monitor, expected = accumulated(lambda p: torch.optim.Adam(p, lr=0.1))
    assert len(pairs(monitor)) == len(expected) - 1  # before the first step there is no state
    for pair, (small, big) in zip(pairs(monitor), expected[1:], strict=True):
        assert pair == pytest.approx(signal_and_noise(sum(small), sum(big), 4, 5), rel=1e-4)


def test_what_cannot_be_measured_is_refused():
    model = small_model()
    meter = sw.NoiseScale().watch_accumulation(model, 5)
    for _ in range(19):
        micro_batch(model)
        meter.step()
        model.zero_grad()
    micro_batch(model)
    with pytest.raises(UsageError, match="at least 2 micro batches in a step, got 1 in the last of 20 steps and never"):
        meter.step()
    with pytest.raises(UsageError, match="parameters that are trained, got none that requires a gradient"):
        sw.NoiseScale().watch_accumulation(small_model().requires_grad_(False), 5)
    with pytest.raises(UsageError, match="at least 2 groups of samples, got groups=1; split the batch"):
        sw.NoiseScale().observe(1.0, 1.0, groups=1, group_samples=8)
    with pytest.raises(UsageError, match="every must be at least 1 step, got 0"):
        sw.NoiseScale().watch_accumulation(model, 5, every=0)
    with pytest.raises(UsageError, match="needs an Adam-like optimizer"):
        sw.NoiseScale().watch_accumulation(model, 5, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="wrapped in DistributedDataParallel, got a Sequential"):
        sw.NoiseScale().watch_ddp(model, 5)


def test_an_epochs_last_step_of_one_micro_batch_is_left_out():
    model, scale = small_model(), sw.NoiseScale()
    meter = scale.watch_accumulation(model, 5, every=1)
    for parts in (1, 4, 4, 1, 0, 4) * 5:
        for _ in range(parts):
            micro_batch(model)
        meter.step()
        model.zero_grad()
    assert len(pairs(scale)) == 15
    assert scale.estimate().value is not None


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_is_dropped_leaves_nothing_behind(to_none):
    found = []
    for drops in (False, True):
        model, scale = small_model(), sw.NoiseScale()
        meter = scale.watch_accumulation(model, 5)
        for step in range(6):
            torch.manual_seed(step)
            if drops and step % 2:
                for _ in range(3):
                    micro_batch(model)
                model.zero_grad(set_to_none=to_none)
                if not to_none:
                    meter.discard()
                torch.manual_seed(step)
            for _ in range(4):
                micro_batch(model)
            meter.step()
            model.zero_grad(set_to_none=to_none)
        found.append(pairs(scale))
    assert found[0] == found[1]


def test_a_parameter_seen_only_in_a_dropped_step_is_not_counted():
    first, second, scale = nn.Linear(6, 3), nn.Linear(6, 3), sw.NoiseScale()
    meter = scale.watch_accumulation(nn.ModuleList([first, second]), 5, layers=True)
    for model in (second, first):
        for _ in range(2):
            micro_batch(model)
        if model is second:
            second.zero_grad()
    meter.step()
    assert pairs(scale.layers["1.weight"]) == [(0.0, 0.0)]
    assert pairs(scale.layers["0.weight"])[0][1] > 0


class Scaled(torch.optim.Optimizer):
    """Someone's own, with betas and eps, and another state than Adam's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"betas": (0.9, 0.99), "eps": 1e-8})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = torch.zeros_like(parameter)


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.SparseAdam, sw.optim.Muon, sw.optim.SOAP])
def test_optimizers_without_second_moments_are_refused(kind):
    model = small_model()
    with pytest.raises(UsageError, match=f"an exp_avg_sq\\), got a {kind.__name__}; leave optimizer= out"):
        sw.NoiseScale().watch_accumulation(model, 5, optimizer=kind(model.parameters(), lr=0.1))


def test_someones_own_optimizer_is_refused_as_soon_as_its_state_is_seen():
    model = small_model()
    optimizer = Scaled(model.parameters())
    meter = sw.NoiseScale().watch_accumulation(model, 5, optimizer=optimizer)
    optimizer.step()
    with pytest.raises(UsageError, match="got a Scaled"):
        micro_batch(model)
    meter.close()
    with pytest.raises(UsageError, match="got a Scaled"):
        sw.NoiseScale().watch_accumulation(small_model(), 5, optimizer=optimizer)


@pytest.mark.parametrize(
    "kind",
    [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, sw.optim.LAMB, sw.optim.ScheduleFree],
)
def test_optimizers_with_second_moments_are_measured(kind):
    model, scale = small_model(), sw.NoiseScale()
    optimizer = kind(model.parameters(), lr=0.001)
    meter = scale.watch_accumulation(model, 5, optimizer=optimizer)
    for _ in range(5):
        micro_batch(model)
        micro_batch(model)
        meter.step()
        optimizer.step()
        optimizer.zero_grad()
    assert len(pairs(scale)) == 4


def test_of_an_optimizer_of_some_parameters_those_are_measured():
    model, alone = small_model(), sw.NoiseScale()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
    both = [sw.NoiseScale(), alone]
    meters = [both[0].watch_accumulation(model, 5, optimizer=optimizer, layers=True),
              both[1].watch_accumulation(model[2], 5, optimizer=optimizer)]  # fmt: skip
    for _ in range(4):
        micro_batch(model)
        micro_batch(model)
        for meter in meters:
            meter.step()
        optimizer.step()
        model.zero_grad()
    assert [*both[0].layers] == ["2.weight", "2.bias"]
    assert np.allclose(pairs(both[0]), pairs(alone), rtol=1e-4)
    assert len(pairs(alone)) == 3
    with pytest.raises(UsageError, match="got a Adam that holds none of the 2 that are trained"):
        alone.watch_accumulation(model[0], 5, optimizer=optimizer)


def test_identical_micro_batches_are_not_called_workers():
    model, scale = small_model(), sw.NoiseScale()
    meter = scale.watch_accumulation(model, 5)
    for _ in range(3):
        for _ in range(2):
            torch.manual_seed(0)
            micro_batch(model)
        meter.step()
        model.zero_grad()
    assert scale.estimate().verdict.startswith("identical micro batches: ")


def test_the_preconditioner_is_damped_where_gradients_are_rare():
    """A coordinate with almost no second moment weighs ten times an average one, not ten thousand times."""
    second_moment = torch.cat([torch.full((99,), 4e-4), torch.tensor([1e-16])])
    factor = preconditioner(second_moment * (1 - 0.999**10), 10, 0.999, 1e-8)
    assert factor[0] ** 2 == pytest.approx(1 / 0.02, rel=1e-4)
    assert float(factor[-1] ** 2 / factor[0] ** 2) == pytest.approx(10, rel=0.02)
    assert torch.isfinite(preconditioner(torch.zeros(3), 1, 0.999, 1e-8)).all()


def test_preconditioned_is_the_plain_noise_scale_in_other_coordinates():
    """Adam in w is gradient descent in w ÷ √P: there the plain noise scale is the preconditioned one."""
    random = np.random.default_rng(9)
    second_moment = torch.from_numpy(random.uniform(0.5, 2.0, 30))
    factor = preconditioner(second_moment, 1e9, 0.999, 1e-8)
    x, y = torch.from_numpy(random.standard_normal((40, 30))), torch.from_numpy(random.standard_normal(40))
    weights = torch.zeros(30, dtype=torch.float64, requires_grad=True)
    turned = torch.zeros(30, dtype=torch.float64, requires_grad=True)  # w = √P·turned
    (gradient,) = torch.autograd.grad(((x @ weights - y) ** 2).mean(), weights)
    (other,) = torch.autograd.grad(((x @ (factor * turned) - y) ** 2).mean(), turned)
    torch.testing.assert_close(factor * gradient, other)
    torch.testing.assert_close(factor * other, gradient / (second_moment.sqrt() + 1e-8))  # the step, seen in w


def test_the_mean_of_estimates():
    one, two = NoiseEstimate(10.0, 8.0, 14.0, True), NoiseEstimate(20.0, 17.0, 23.0, True)
    mean = weighted_mean([one, two], [0.5, 0.5])
    assert (mean.value, mean.low, mean.high) == pytest.approx((15.0, 15 - math.sqrt(13) / 2, 17.5))
    unbounded = weighted_mean([one, NoiseEstimate(20.0, 17.0, None, False)], [0.5, 0.5])
    assert (unbounded.low, unbounded.high, unbounded.enough) == (12.5, None, False)
    assert weighted_mean([one, NoiseEstimate(None, None, None, False, problem="why")], [0.5, 0.5]).verdict == "why"


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What two processes have seen in DistributedDataParallel's communication hook."""
    import subprocess

    from conftest import environment

    out = tmp_path_factory.mktemp("noise") / "found"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, JOB, out], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]


def test_the_hook_leaves_ddp_what_it_was(watched):
    assert [one["same_weights"] for one in watched] == [True, True]


@pytest.mark.parametrize("kind", ["plain", "preconditioned", "accumulated"])
def test_the_hook_sees_local_and_averaged_gradients(watched, kind):
    for one in watched:
        seen, expected = one[kind]["seen"], one[kind]["expected"]
        expected = expected[1:] if kind == "preconditioned" else expected  # no state before the first step
        assert len(seen["all"]) == 2 * len(expected)
        for step, rows in enumerate(expected):
            whole = signal_and_noise(*(sum(column) for column in zip(*rows, strict=True)), 2, 12)
            assert seen["all"][2 * step : 2 * step + 2] == pytest.approx(whole, rel=1e-3)
            for layer, row in zip(seen["layers"].values(), rows, strict=True):
                assert layer[2 * step : 2 * step + 2] == pytest.approx(signal_and_noise(*row, 2, 12), rel=1e-2)


def test_of_an_optimizer_of_some_parameters_the_hook_sees_those(watched):
    for one in watched:
        seen, expected = one["head"]["seen"], one["head"]["expected"][1:]
        assert [*seen["layers"]] == ["4.weight", "4.bias"]
        assert len(seen["all"]) == 2 * len(expected)
        for step, rows in enumerate(expected):
            whole = signal_and_noise(*(sum(column) for column in zip(*rows[-2:], strict=True)), 2, 12)
            assert seen["all"][2 * step : 2 * step + 2] == pytest.approx(whole, rel=1e-3)


def test_the_hook_names_identical_workers(watched):
    assert [one["identical"]["value"] for one in watched] == [0.0, 0.0]
    assert all(one["identical"]["verdict"].startswith("identical workers") for one in watched)
