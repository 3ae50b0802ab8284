"""The engine against plain PyTorch loops written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import models
import scalewise as sw
from scalewise.engine.data.streams import SampleStream
from scalewise.engine.loop import Training
from scalewise.optim import OPTIMIZERS


def trained(task: sw.Task, recipe: sw.Recipe) -> tuple[dict[str, torch.Tensor], list[float]]:
    with Training(task, recipe, sw.Placement(device="cpu")) as training:
        losses = [record.loss for record in training.records() if isinstance(record, sw.Step)]
        return {name: value.clone() for name, value in training.strategy.model.tensors().items()}, losses


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("batch", [32, 49])
def test_one_worker_is_a_plain_loop_bit_for_bit(optimizer, batch, layout):
    task = sw.load_task("digits", ["bn=true"])
    recipe = sw.Recipe(worker_batch=batch, steps=60, optimizer=optimizer, lr=0.01, threads=1, seed=5, layout=layout)
    weights, losses = trained(task, recipe)

    format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    torch.manual_seed(5)
    model = task.model().to(memory_format=format)
    x, y = task.train
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if optimizer in adam:
        update = adam[optimizer](model.parameters(), lr=0.01, weight_decay=0.0)
    else:
        momentum = 0.0 if optimizer == "sgd" else 0.9
        update = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, nesterov=optimizer == "nesterov")
    stream = SampleStream(len(x), seed=5)
    plain = []
    for step in range(60):
        indices, _ = stream.take(step * batch, (step + 1) * batch)
        update.zero_grad()
        loss = F.cross_entropy(model(x[indices].to(memory_format=format)), y[indices])
        loss.backward()
        update.step()
        plain.append(loss.item())
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert losses == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "lr", "exact"),
    [
        ("muon", 0.005, True),
        ("soap", 0.003, True),
        ("schedule-free", 0.01, True),
        # norms are summed in chunks of the flat vector there, in chunks of the tensor here
        ("lars", 0.5, False),
        ("lamb", 0.01, False),
    ],
)
def test_one_worker_is_a_plain_loop_with_our_optimizers(optimizer, lr, exact):
    task = sw.load_task("digits", ["bn=true"])
    recipe = sw.Recipe(
        worker_batch=32, steps=30, optimizer=optimizer, lr=lr, weight_decay=0.01, trust_coefficient=0.02, threads=1
    )
    weights, losses = trained(task, recipe)
    torch.manual_seed(0)
    model = task.model()
    x, y = task.train
    update = OPTIMIZERS[optimizer](model.parameters(), recipe)
    stream = SampleStream(len(x), seed=0)
    plain = []
    for step in range(30):
        indices, _ = stream.take(step * 32, (step + 1) * 32)
        update.zero_grad()
        loss = F.cross_entropy(model(x[indices]), y[indices])
        loss.backward()
        update.step()
        plain.append(loss.item())
    assert losses == pytest.approx(plain, rel=1e-6 if exact else 1e-3)
    for name, value in model.state_dict().items():
        if exact:
            assert torch.equal(value, weights[name]), name
    assert plain[-1] < 0.5 * plain[0]


@pytest.mark.parametrize("adapt_vectors", [False, True])
@pytest.mark.parametrize(("optimizer", "lr"), [("lars", 0.5), ("lamb", 0.01)])
def test_layer_wise_updates_in_double_precision_are_those_of_a_plain_loop(optimizer, lr, adapt_vectors):
    task = models.double_mlp()
    recipe = sw.Recipe(
        worker_batch=20,
        steps=30,
        optimizer=optimizer,
        lr=lr,
        weight_decay=0.01,
        trust_coefficient=0.02,
        adapt_vectors=adapt_vectors,
        threads=1,
    )
    weights, _ = trained(task, recipe)
    torch.manual_seed(0)
    model = task.model()
    x, y = task.train
    update = OPTIMIZERS[optimizer](model.parameters(), recipe)
    stream = SampleStream(len(x), seed=0)
    for step in range(30):
        indices, _ = stream.take(step * 20, (step + 1) * 20)
        update.zero_grad()
        F.cross_entropy(model(x[indices]), y[indices]).backward()
        update.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_eight_workers_are_a_loop_over_eight_shards(micro_batch, clip_norm):
    task = models.double_mlp()
    recipe = sw.Recipe(
        workers=8, worker_batch=12, micro_batch=micro_batch, clip_norm=clip_norm, steps=30, lr=0.1, threads=1
    )
    weights, losses = trained(task, recipe)

    torch.manual_seed(0)
    model = task.model()
    x, y = task.train
    update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = SampleStream(len(x), seed=0)
    for step in range(30):
        update.zero_grad()
        total = 0.0
        for worker in range(8):
            start = step * 96 + worker * 12
            indices, _ = stream.take(start, start + 12)
            loss = F.cross_entropy(model(x[indices]), y[indices]) / 8
            loss.backward()
            total += loss.item()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        update.step()
        assert losses[step] == pytest.approx(total, rel=1e-10)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-9, atol=1e-12), name


def test_uneven_weights_are_averaged_over_the_global_batch_not_over_workers():
    """One step of `chars` in float64: the gradient is that of the loss over all characters at once."""
    task = sw.load_task("chars", ["width=16", "layers=1"])
    double = sw.Task(
        model=lambda: task.model().double(), train=task.train, test=task.test, step=task.step, metric="loss"
    )
    weights, losses = trained(double, sw.Recipe(workers=5, worker_batch=3, steps=1, optimizer="sgd", lr=1.0, threads=1))
    torch.manual_seed(0)
    model = double.model()
    indices, _ = SampleStream(len(task.train), seed=0).take(0, 15)
    counts = (task.train[indices] != -1).sum(1).tolist()
    assert len(set(counts)) > 1
    loss = task.step(model, task.train[indices])
    (loss.total / loss.weight).backward()
    assert losses[0] == pytest.approx((loss.total / loss.weight).item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter - parameter.grad, weights[name], rtol=1e-9, atol=1e-12), name


def test_ghost_groups_are_workers():
    """Ghost batch norm of one worker gives the loss and statistics of as many workers as it has groups."""
    task = sw.load_task("digits", ["bn=true"])
    options = {"steps": 10, "lr": 0.05, "threads": 1}
    one, losses_one = trained(task, sw.Recipe(worker_batch=32, batch_norm="ghost:8", **options))
    four, losses_four = trained(task, sw.Recipe(workers=4, worker_batch=8, **options))
    assert losses_one == pytest.approx(losses_four, rel=1e-4)
    for name, value in one.items():
        assert torch.allclose(value.float(), four[name].float(), rtol=1e-3, atol=1e-4), name


def test_the_table_of_optimizers_is_the_recipes_choice():
    choices = sw.Recipe.model_json_schema()["properties"]["optimizer"]["enum"]
    assert list(OPTIMIZERS) == choices


def test_noise_scale_agrees_with_per_sample_gradients():
    """At frozen weights, against torch.func's per-sample gradients over the whole training set."""
    task = sw.load_task("digits")
    recipe = sw.Recipe(workers=8, worker_batch=16, steps=400, optimizer="sgd", lr=0.0, threads=1)
    *_, result = sw.train(task, recipe, sw.Placement(device="cpu"))

    torch.manual_seed(0)
    model = task.model()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, x, y):
        output = torch.func.functional_call(model, parameters, (x[None],))
        return F.cross_entropy(output, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, *task.train)
    samples = torch.cat([value.flatten(1) for value in each.values()], 1).double()  # (sample, parameter)
    noise = samples.var(0, unbiased=True).sum()
    signal = (samples.mean(0) ** 2).sum()
    truth = float(noise / signal)
    assert result.noise_scale["value"] == pytest.approx(truth, rel=0.1)
    assert result.noise_scale["low"] <= truth <= result.noise_scale["high"]
    assert result.noise_scale["enough"]
