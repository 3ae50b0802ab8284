from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import scalewise as sw
from conftest import real_data
from scalewise.errors import TaskError
from scalewise.tasks import BUILT_IN, cifar
from scalewise.tasks.sources import find
from scalewise.tasks.task import Loss


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "images"])  # it has tests/test_images.py
def test_every_built_in_task_takes_a_step(name):
    source = BUILT_IN[name].published()
    if source is not None and find(source, real_data()) is None:
        pytest.skip(f"no data files of {name} here")
    task = sw.load_task(name, data=real_data() if source else None)
    assert task.name == name
    task = dataclasses.replace(task, test=tree_map(lambda part: part[:64], task.test))
    recipe = task.recipe.replace(workers=2, worker_batch=16, steps=1, threads=1)
    *_, result = sw.train(task, recipe, sw.Placement(device="cpu"))
    assert task.metric in result.test


def multiply_adds(model: torch.nn.Module, image: torch.Tensor) -> int:
    """Of the convolutions and dense layers, for one image."""
    counts = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        per_output = module.weight[0].numel()
        counts.append(per_output * output[0].numel())

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_hook(count)
    model.eval()(image[None])
    return sum(counts)


@pytest.mark.parametrize(("bn", "trainable"), [(False, 482_442), (True, 486_410)])
def test_the_lectures_network(bn, trainable):
    model = cifar.residual(bn)
    assert sum(p.numel() for p in model.parameters()) == trainable
    assert multiply_adds(model, torch.zeros(3, 32, 32, dtype=torch.uint8)) == pytest.approx(12.1e6, rel=0.005)
    first = model[1]
    limit = (6 / (7 * 7 * 3 + 7 * 7 * 64)) ** 0.5  # Glorot and Bengio 2010, uniform
    assert 0.98 * limit < first.weight.abs().max() <= limit
    assert not first.bias.any()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == (9 if bn else 0)
    assert all((norm.eps, norm.momentum) == (1e-3, 0.01) for norm in norms)


def test_the_small_cifar_network_is_small():
    assert multiply_adds(cifar.small(), torch.zeros(3, 32, 32, dtype=torch.uint8)) <= 5e6


def test_real_images_are_read_as_published(data):
    (x, y), (tx, ty) = sw.load_task("cifar10", data=data).train, sw.load_task("cifar10", data=data).test
    assert (x.shape, x.dtype, tx.shape) == ((50_000, 3, 32, 32), torch.uint8, (10_000, 3, 32, 32))
    assert torch.bincount(y).tolist() == [5000] * 10
    assert torch.bincount(ty).tolist() == [1000] * 10
    assert (x.float().mean((0, 2, 3)) / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    fashion = sw.load_task("fashion-mnist", data=data)
    assert fashion.train[0].shape == (60_000, 1, 28, 28)
    assert torch.bincount(fashion.train[1]).tolist() == [6000] * 10
    assert float(fashion.train[0].float().mean() / 255) == pytest.approx(0.2860, abs=1e-4)


def test_digits_are_all_there():
    task = sw.load_task("digits")
    (x, y), (tx, ty) = task.train, task.test
    assert (len(x), len(tx)) == (1437, 360)
    counts = torch.bincount(torch.cat([y, ty]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as the data set's authors give them
    assert (x.min(), x.max()) == (0, 1)
    assert sum(p.numel() for p in task.model().parameters()) == 9930


def test_chars_pieces_hold_every_character_once():
    task = sw.load_task("chars")
    targets = sum(int((part[:, 1:] != -1).sum()) for part in (task.train, task.test))
    assert 140_000 < targets < 150_000
    assert len({int((row != -1).sum()) for row in task.train}) > 30  # samples are of many lengths


def test_chars_cannot_see_the_future():
    model = sw.load_task("chars").model().eval()
    text = torch.randint(60, (1, 20))
    changed = text.clone()
    changed[0, 12:] = 0
    assert torch.allclose(model(text)[0, :12], model(changed)[0, :12], atol=1e-5)


def test_tasks_lists_what_is_built_in(scalewise):
    listed = json.loads(scalewise("tasks", "--json").stdout)["tasks"]
    assert [task["name"] for task in listed] == list(BUILT_IN)
    assert "digits" in scalewise("tasks").stderr


def test_a_task_needs_exactly_one_of_loss_and_step():
    parts = {"model": torch.nn.Identity, "train": (), "test": ()}
    with pytest.raises(TaskError, match="got neither"):
        sw.Task(**parts)
    with pytest.raises(TaskError, match="got both"):
        sw.Task(**parts, loss=F.cross_entropy, step=lambda model, batch: Loss(torch.zeros(()), 1))


X, Y = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
GOOD = {"model": lambda: torch.nn.Linear(3, 2), "train": (X, Y), "test": (X, Y)}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"step": lambda model, batch: model(batch[0]).sum()}, "must return scalewise.Loss"),
        ({"step": lambda model, batch: sw.Loss(model(batch[0]).sum(0), 8)}, "one number"),
        ({"loss": F.cross_entropy, "train": (X, Y, Y)}, "two parts"),
        ({"loss": F.cross_entropy, "model": torch.nn.Linear(3, 2)}, "must be a function"),
        ({"loss": F.cross_entropy, "model": lambda: "a model"}, "it made a str"),
        ({"loss": F.cross_entropy, "model": lambda: torch.nn.SyncBatchNorm(3)}, "SyncBatchNorm"),
        ({"loss": F.cross_entropy, "buffers": {"none": "mean"}}, "does not have"),
    ],
)
def test_tasks_that_cannot_be_trained_say_why(parts, words):
    with pytest.raises(TaskError, match=words):
        list(sw.train(sw.Task(**(GOOD | parts)), sw.Recipe(worker_batch=4, steps=1, threads=1)))


def test_a_metric_may_be_a_plain_number():
    task = sw.Task(**GOOD, loss=F.cross_entropy, metrics={"three": lambda output, target: 3.0})
    *_, result = sw.train(task, sw.Recipe(worker_batch=4, steps=1, threads=1))
    assert result.test["three"] == 3.0


@pytest.mark.parametrize(
    ("task", "setting", "words"),
    [("digits", "dropout=2", "dropout"), ("mlp", "hidden=0", "hidden"), ("chars", "width=63", "width")],
)
def test_settings_of_built_in_tasks_are_checked(task, setting, words):
    with pytest.raises(TaskError, match=words):
        sw.load_task(task, [setting])


def test_settings_may_be_optional_and_annotations_unknown(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nimport scalewise as sw\n"
        "if TYPE_CHECKING:\n    from nowhere import Thing\n"
        "def optional(width: int | None = None):\n    assert width in (8, None)\n    return sw.load_task('linear')\n"
        "def task(width=4, thing: Thing = None):\n    assert width == 8\n    return sw.load_task('linear')\n"
    )
    assert sw.load_task(str(path), ["width=8"]).name == "linear"
    module = __import__("sys").modules["scalewise_task_mine"]
    assert sw.load_task(f"{module.__name__}:optional", ["width=8"]).name == "linear"
    assert sw.load_task(f"{module.__name__}:optional", ["width=none"]).name == "linear"


def each(output, target):
    return F.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("functions", [{"loss": each}, {"loss": F.cross_entropy, "metrics": {"surprise": each}}])
def test_losses_and_metrics_must_be_means(functions):
    x, y = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
    task = sw.Task(model=lambda: torch.nn.Linear(3, 2), train=(x, y), test=(x, y), **functions)
    with pytest.raises(TaskError, match=r"must return one number, its mean over samples, got shape \(4,\)"):
        list(sw.train(task, sw.Recipe(worker_batch=4, steps=1)))


@pytest.mark.parametrize("loss", [{"weight": torch.tensor([1.0, 9.0])}, {"ignore_index": 1}], ids=str)
def test_class_weights_are_averaged_over_the_global_batch(loss):
    """Whole batches whose shares of the rare class differ: a mean of workers' means would be another number."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 3, generator=generator), (torch.rand(96, generator=generator) < 0.2).long()
    model = lambda: torch.nn.Linear(3, 2)  # noqa: E731
    task = sw.Task(model=model, train=(x, y), test=(x, y), loss=torch.nn.CrossEntropyLoss(**loss))
    runs = [
        [*sw.train(task, sw.Recipe(workers=workers, worker_batch=96 // workers, steps=3, lr=0.5, threads=1))]
        for workers in (1, 4, 8)
    ]
    losses = [[record.loss for record in run if isinstance(record, sw.Step)] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert runs[2][-1].test["loss"] == pytest.approx(runs[0][-1].test["loss"], rel=1e-5)


def test_a_loss_that_is_a_sum_is_refused():
    with pytest.raises(TaskError, match="must be a mean over samples, got one with reduction='sum'"):
        sw.Task(**GOOD, loss=torch.nn.CrossEntropyLoss(reduction="sum"))


def test_the_loss_as_the_metric_that_counts_is_better_when_lower():
    assert not sw.Task(**GOOD, loss=F.cross_entropy, metrics={"accuracy": sw.accuracy}, metric="loss").higher_is_better
    assert sw.Task(**GOOD, loss=F.cross_entropy, metrics={"accuracy": sw.accuracy}).higher_is_better


def test_accuracy_of_one_logit_and_of_many():
    assert sw.accuracy(torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0])) == 0.5
    assert sw.accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 0, 0])) == pytest.approx(
        2 / 3
    )
