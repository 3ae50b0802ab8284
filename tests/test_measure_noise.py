from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models
import scalewise as sw
import scalewise.runs.measure.noise as measured_noise
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.errors import TaskError
from scalewise.runs.measure.frozen import GroupGradients, PooledNoise, estimate, preconditioners
from scalewise.runs.measure.noise import looked_at, measure_noise
from scalewise.stats.noise_scale import NoiseScale

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from noise_truth import per_sample

CPU = sw.Placement(device="cpu")


def gaussian(random, population, dimensions, scale):
    """Samples whose noise scale is about `scale`."""
    data = torch.from_numpy(random.standard_normal((population, dimensions)) * math.sqrt(scale / dimensions))
    return data + 1 / math.sqrt(dimensions)


def noise_scale(data):
    return float(data.var(0).sum() / (data.mean(0) ** 2).sum())


def pooled(random, data, groups, samples):
    """Groups drawn without replacement."""
    found = PooledNoise(samples, len(data))
    chosen = torch.from_numpy(random.permutation(len(data))[: groups * samples])
    for group in data[chosen].view(groups, samples, -1).mean(1):
        found.add([group])
    return estimate([found.table()])


@pytest.mark.parametrize(
    ("groups", "dimensions", "scale", "population"),
    [(64, 5, 100.0, 4096), (64, 200, 1000.0, 4096), (128, 20, 2000.0, 1024), (64, 20, 5.0, 100_000)],
)
def test_pooled_groups_cover_the_populations_noise_scale(groups, dimensions, scale, population):
    random = np.random.default_rng(0)
    data = gaussian(random, population, dimensions, scale)
    truth = noise_scale(data)
    trials, covered = 300, 0
    for _ in range(trials):
        one = pooled(random, data, groups, 8)
        covered += one.low <= truth <= (one.high or math.inf)
    assert covered / trials >= 0.92


def test_a_whole_pass_knows_the_gradient():
    """Of 1,024 samples whose noise scale is 20 times that: 1,024 of 8,192 such samples say little, all of them all."""
    random = np.random.default_rng(1)
    many, few = gaussian(random, 8192, 50, 20_000.0), gaussian(random, 1024, 50, 20_000.0)
    assert not pooled(random, many, 128, 8).enough
    whole = pooled(random, few, 128, 8)
    assert whole.enough
    assert whole.value == pytest.approx(noise_scale(few), rel=0.1)


def test_what_is_drawn_anew_in_every_pass_is_not_exhausted_by_one():
    """Of 192 samples, two passes: half of the noise is another one whenever a sample is seen."""
    random = np.random.default_rng(5)
    data = gaussian(random, 192, 40, 300.0)
    truth = 2 * noise_scale(data)
    deviation = data.std(0)
    trials, covered, enough = 300, 0, 0

    def seen(samples):
        return (samples + deviation * torch.from_numpy(random.standard_normal(samples.shape))).mean(0)

    for _ in range(trials):
        found = PooledNoise(12, len(data))
        for order in (random.permutation(192), random.permutation(192)):
            for group in data[torch.from_numpy(order)].split(12):
                found.add([seen(group)])
        for group in data.split(12):
            found.add_pair([seen(group)], [seen(group)], 1)
        one = estimate([found.table()])
        covered += one.low <= truth <= (one.high or math.inf)
        enough += one.enough
    assert covered / trials >= 0.92
    assert enough < trials


def small_task(augment=None, dropout=0.0, batch_norm=False):
    """192 samples and a model whose gradients are drawn anew in every pass."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(192, 20, generator=generator)
    y = (x[:, :3] + 0.3 * torch.randn(192, 3, generator=generator)).argmax(1)
    norm = [nn.BatchNorm1d(64)] if batch_norm else []

    def model():
        return nn.Sequential(nn.Linear(20, 64), *norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 3))

    return sw.Task(model=model, train=(x, y), test=(x, y), loss=F.cross_entropy, augment=augment,
                   recipe=sw.Recipe(worker_batch=12, steps=240, lr=0.05, threads=1))  # fmt: skip


def noisy(batch, keys):
    generator = torch.Generator().manual_seed(int(keys.sum()) & 0x7FFFFFFF)
    return batch[0] + 1.5 * torch.randn(batch[0].shape, generator=generator), batch[1]


def over_draws(training, draws):
    """The noise scale over samples and whatever is drawn anew for each of them."""
    module = training.strategy.model.module
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(module, weights, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="different")
    total, squares, count = 0, 0, 0
    for draw in range(draws):
        torch.manual_seed(draw)
        x, y = training.task.train
        x = x if training.task.augment is None else x + 1.5 * torch.randn(x.shape)
        found = torch.cat([one.flatten(1) for one in each(parameters, x, y).values()], 1).double()
        total, squares, count = total + found.sum(0), squares + found.square().sum(), count + len(found)
    mean = total / count
    noise = (squares - count * mean @ mean) / (count - 1)
    return float(noise / (mean @ mean - noise / count))


@pytest.mark.parametrize("kind", [{"dropout": 0.5}, {"augment": noisy}])
def test_dropout_and_augmentation_on_few_samples(kind):
    task = small_task(**kind)
    with Training(task, task.recipe, CPU, alone=True) as training:
        records = training.records()
        while training.progress.step < 240:
            next(records)
        found = estimate([looked_at(training, points=1).table()])
        truth = over_draws(training, draws=200)
    assert found.low <= truth <= (found.high or math.inf)
    assert found.value == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "pairs"), [({}, 0), ({"dropout": 0.1}, 16), ({"augment": noisy}, 16), ({"batch_norm": True}, 2)]
)
def test_samples_are_seen_twice_where_something_is_drawn_anew(kind, pairs):
    task = small_task(**kind)
    with Training(task, task.recipe, CPU, alone=True) as training:
        found = [*GroupGradients(training, 12, key=1).pairs()]
    assert len(found) == pairs
    for first, second, groups in found:
        assert groups == 16 // pairs
        assert not all(torch.equal(*both) for both in zip(first, second, strict=True))


def look(task, recipe, steps, groups=2 * 89, size=16):
    """Pooled groups at a frozen checkpoint, steps of eight of them, and what per-sample gradients say."""
    with Training(task, recipe, CPU, alone=True) as training:
        records = training.records()
        while training.progress.step < steps:
            next(records)
        factors = preconditioners(training)
        before = sha256(training.strategy.model.tensors())
        found = PooledNoise(size, len(training.samples), factors)
        gradients = [*GroupGradients(training, size, key=1).take(0, groups)]
        for gradient in gradients:
            found.add(gradient)
        assert sha256(training.strategy.model.tensors()) == before
        module = training.strategy.model.module
        truths = [
            per_sample(task, module, training.samples, one) for one in ([None] if factors is None else [None, factors])
        ]
    scale = NoiseScale(population=len(training.samples))
    for start in range(0, groups - 7, 8):
        chosen = gradients[start : start + 8]
        small = np.mean([sum(float(g.double().square().sum()) for g in one) for one in chosen])
        big = sum(float(torch.stack(parts).double().mean(0).square().sum()) for parts in zip(*chosen, strict=True))
        scale.observe(float(small), big, 8, size)
    return found, scale.estimate(), truths


@pytest.mark.parametrize("steps", [0, 100])
def test_within_a_tenth_of_per_sample_gradients(steps):
    task = sw.load_task("digits")
    found, by_steps, (truth,) = look(task, task.recipe.replace(threads=1), steps)
    pooled_estimate = estimate([found.table()])
    assert pooled_estimate.value == pytest.approx(truth.noise_scale, rel=0.1)
    assert pooled_estimate.low <= truth.noise_scale <= pooled_estimate.high
    assert by_steps.low <= truth.noise_scale <= by_steps.high
    layers = [estimate([found.table()], [number]).value for number in range(len(truth.signal))]
    assert layers == pytest.approx((truth.noise / truth.signal).tolist(), rel=0.2)


def test_preconditioned_within_a_tenth_of_per_sample_gradients():
    task = sw.load_task("mlp")
    found, _, (plain, preconditioned) = look(task, task.recipe.replace(threads=1), 100)
    assert estimate([found.table()]).value == pytest.approx(plain.noise_scale, rel=0.1)
    assert estimate([found.preconditioned_table()]).value == pytest.approx(preconditioned.noise_scale, rel=0.1)
    assert preconditioned.noise_scale != pytest.approx(plain.noise_scale, rel=0.1)


def test_preconditioners_are_the_optimizers_own_in_any_memory_layout():
    """The state of a flat optimizer lies in memory order; by parameter it must be what torch's Adam has."""
    task = sw.load_task("digits")
    found = []
    for layout in ("contiguous", "channels_last"):
        recipe = sw.Recipe(worker_batch=32, steps=5, optimizer="adam", lr=0.001, layout=layout, threads=1)
        with Training(task, recipe, CPU) as training:
            assert preconditioners(training) is None  # before the first step
            [*training.records()]
            found.append(preconditioners(training))
            shapes = [parameter.shape for parameter in training.strategy.model.parameters.values()]
    assert [factor.shape for factor in found[1]] == shapes
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other.contiguous(), rtol=1e-3, atol=0)


def test_looking_leaves_no_trace_in_the_training():
    task = sw.load_task("digits", ["bn=true", "dropout=0.2"])
    recipe = task.recipe.replace(steps=12, threads=1)
    *_, plain = sw.train(task, recipe, CPU)
    with Training(task, recipe, CPU) as training:
        records = training.records()
        while training.progress.step < 6:
            next(records)
        gradients = GroupGradients(training, 32, key=0)
        assert len([*gradients.take(0, 3)]) == 3
        assert len([*gradients.pairs()]) == 2
        *_, looked_at = records
    assert looked_at.weights_sha256 == plain.weights_sha256


@pytest.fixture(scope="module")
def report():
    lines = []
    task = sw.load_task("mlp")
    recipe = task.recipe.replace(workers=8, lr_rule="sqrt", threads=1)
    return measure_noise(task, recipe.replace(steps=120), layers=True, device="cpu", notify=lines.append), lines


def test_the_report_has_an_average_and_stages(report):
    found, lines = report
    assert [(stage.name, stage.step) for stage in found.stages] == [
        ("start", 0), ("quarter", 30), ("middle", 60), ("three quarters", 90), ("end", 114),
    ]  # fmt: skip
    assert len(lines) == 5
    assert found.used is found.preconditioned
    assert found.stages[0].preconditioned is None  # the optimizer has not moved yet
    assert found.averaged == ("quarter", "middle", "three quarters", "end")
    for average, values in (
        (found.estimate, [stage.estimate.value for stage in found.stages[1:]]),
        (found.preconditioned, [stage.preconditioned.value for stage in found.stages[1:]]),
    ):
        assert average.value == pytest.approx(np.average(values, weights=[30, 60, 54, 24]))
    assert found.used.verdict == "enough"
    assert found.estimate.low < found.estimate.value < found.estimate.high < 2 * found.estimate.low


def test_a_stage_is_the_ratio_of_means_over_its_points():
    """Two points with the same noise and a signal of 1 and 9: 5 on average, not the mean of the ratios."""
    random = np.random.default_rng(4)
    tables = []
    for size in (1.0, 3.0):
        data = gaussian(random, 4096, 20, 100.0) - 1 / math.sqrt(20) * (1 - size)
        found = PooledNoise(8, len(data))
        for group in data.view(512, 8, 20).mean(1):
            found.add([group])
        tables.append(found.table())
    stage = estimate(tables)
    assert stage.value == pytest.approx(100 / 5, rel=0.1)
    assert stage.high < 1.3 * stage.low  # that the signal moves is no error


def test_the_report_has_layers_on_request(report):
    found, _ = report
    assert [layer.name for layer in found.layers] == [f"{n}.{k}" for n in (1, 3, 5) for k in ("weight", "bias")]
    assert all(layer.estimate.low is not None for layer in found.layers)
    assert {layer.to_json()["gradients"] for layer in found.layers} == {"plain"}


def test_the_report_as_json(report):
    document = report[0].to_json()
    assert set(document["noise_scale"]) == {"value", "low", "high", "enough"}
    assert document["noise_scale"] == document["preconditioned"] != document["plain"]
    assert document["verdict"] == "enough"
    assert [stage["averaged"] for stage in document["stages"]] == [False, True, True, True, True]
    assert [stage["verdict"] for stage in document["stages"]] == ["enough"] * 5


def test_the_report_is_the_same_again():
    task = sw.load_task("linear")
    first, second = (measure_noise(task, task.recipe.replace(threads=1, steps=8), device="cpu") for _ in range(2))
    assert first == second
    assert first.preconditioned is None
    assert first.used is first.estimate
    assert not first.layers


def test_batch_norm_is_measured_in_groups_of_the_recipe():
    task = sw.load_task("digits", ["bn=true"])
    found = measure_noise(task, task.recipe.replace(threads=1, steps=2), device="cpu")
    assert found.group_samples == task.recipe.worker_batch
    assert [stage.name for stage in found.stages] == ["start", "end"]


def test_data_without_noise_is_named():
    task = models.double_mlp()
    same = tuple(part[:1].expand(64, *part.shape[1:]) for part in task.train)
    found = measure_noise(sw.Task(model=task.model, train=same, test=task.test, loss=task.loss),
                          sw.Recipe(worker_batch=8, steps=4, threads=1), device="cpu")  # fmt: skip
    assert found.used.verdict == "no noise: every sample's gradient agrees"
    assert found.estimate.value is None


def hinge(output, target):
    return F.relu(1 - output.flatten() * target).mean()


def test_a_stage_without_a_gradient_is_left_out_of_the_average():
    """Two classes far apart: once the margin is reached the loss is exactly 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(600, 5, generator=generator)
    y = torch.sign(x[:, 0])
    x[:, 0] += 4 * y
    task = sw.Task(model=lambda: nn.Linear(5, 1), train=(x, y), test=(x, y), loss=hinge)
    lines = []
    found = measure_noise(task, sw.Recipe(worker_batch=16, steps=400, lr=0.1, threads=1), device="cpu",
                          notify=lines.append)  # fmt: skip
    assert found.stages[-1].estimate.verdict == "no gradient: it is 0 for every sample"
    assert lines[-1].endswith("noise scale: no gradient: it is 0 for every sample")
    assert found.averaged == tuple(stage.name for stage in found.stages if stage.estimate.value is not None)
    assert "start" in found.averaged
    assert "end" not in found.averaged
    assert found.estimate.value is not None
    assert found.used.verdict == "enough"


def test_what_is_not_enough_is_told_in_samples_not_in_steps_of_the_training(monkeypatch):
    """Noise around 0, trained on all of it at once: the gradient all but ends, and its noise does not."""
    for name, samples in (("FIRST", 256), ("MOST", 512), ("LAST", 1024)):
        monkeypatch.setattr(measured_noise, f"{name}_SAMPLES", samples)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20_000, 30, generator=generator), torch.randn(20_000, 1, generator=generator)
    task = sw.Task(model=lambda: nn.Linear(30, 1), train=(x, y), test=(x[:9], y[:9]), loss=F.mse_loss)
    found = measure_noise(task, sw.Recipe(worker_batch=20_000, steps=40, lr=0.3, threads=1), device="cpu")
    assert not found.estimate.enough
    assert re.fullmatch(
        r"not enough: it would take (about [\d,]+|far) more samples at each point; go by the lower end, or train to "
        r"see \(--verify sweep\)",
        found.used.verdict,
    )
    assert "steps" not in found.stages[-1].estimate.verdict
    assert max(stage.samples for stage in found.stages) == 4 * 1024  # it has looked as long as that may help


def test_too_few_samples_are_refused():
    task = sw.load_task("digits", ["bn=true"])
    with pytest.raises(TaskError, match="at least 4 groups of samples, got 1437 training samples in groups of 512"):
        measure_noise(task, task.recipe.replace(worker_batch=512, threads=1, steps=2), device="cpu")


def test_a_scalar_parameter_has_noise_too():
    pooled = PooledNoise(4, 10_000)
    draw = torch.Generator().manual_seed(0)
    for _ in range(400):
        pooled.add([1 + torch.randn((), generator=draw)])
    assert estimate([pooled.table()]).value == pytest.approx(4, rel=0.3)  # trΣ = 4 · 1 over |G|² = 1
