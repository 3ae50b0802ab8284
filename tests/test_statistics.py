"""Batch-norm statistics at evaluation: right for the present weights, and the training state untouched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.engine.loop import Training
from scalewise.tasks.digits import load


def slow_averages(momentum: float = 0.01) -> sw.Task:
    """A network whose running averages forget slowly, as Keras's do, on inputs far from the start values."""
    (x, y), (tx, ty) = load()
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48, momentum=momentum), nn.ReLU(), nn.Linear(48, 10)
    )
    return sw.Task(
        model=model,
        train=(10 * x + 5, y),
        test=(10 * tx + 5, ty),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
    )


def result(task: sw.Task, **fields: object) -> sw.Result:
    recipe = sw.Recipe(**({"workers": 8, "worker_batch": 16, "epochs": 3.0, "lr": 0.1, "threads": 1} | fields))
    return [*sw.train(task, recipe)][-1]


def test_few_steps_are_evaluated_with_recomputed_statistics_and_the_hash_stays():
    by_kind = {kind: result(slow_averages(), statistics=kind) for kind in ("auto", "recomputed", "running")}
    assert len({found.weights_sha256 for found in by_kind.values()}) == 1
    assert by_kind["auto"].test == by_kind["recomputed"].test
    assert by_kind["auto"].test["accuracy"] > 0.9
    assert by_kind["running"].test["accuracy"] < 0.7


def test_many_steps_are_evaluated_with_running_averages():
    recipe = {"epochs": 30.0, "workers": 1}  # 1,350 steps, of which the averages remember 10
    by_kind = {kind: result(slow_averages(momentum=0.1), statistics=kind, **recipe) for kind in ("auto", "running")}
    assert by_kind["auto"].test == by_kind["running"].test


def test_recomputed_statistics_are_the_mean_over_groups_of_the_training_shape():
    task = slow_averages()
    recipe = sw.Recipe(worker_batch=64, steps=5, lr=0.1, threads=1, statistics="recomputed")
    with Training(task, recipe, sw.Placement(device="cpu")) as training:
        *_, _ = training.records()
        model, stream = training.strategy.model.module, training.strategy.feed.stream
        hidden = [model[1](task.train[0][stream.take(64 * k, 64 * (k + 1))[0]].flatten(1)) for k in range(22)]
    means = torch.stack([group.mean(0) for group in hidden]).mean(0)
    variances = torch.stack([group.var(0) for group in hidden]).mean(0)
    assert len(task.train[1]) // 64 == 22
    torch.testing.assert_close(training.final["2.running_mean"], means)
    torch.testing.assert_close(training.final["2.running_var"], variances)


class Partly(nn.Module):
    """A frozen batch norm, one that only training uses, and one that evaluation uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.aside, self.used = nn.BatchNorm1d(64), nn.BatchNorm1d(64), nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 10)
        self.frozen.running_mean.fill_(4.0)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.frozen(x.flatten(1))
        if self.training:
            self.aside(x)
        return self.last(self.used(x))


def test_only_what_training_changes_and_evaluation_reaches_is_recomputed():
    recipe = sw.Recipe(worker_batch=64, steps=5, lr=0.1, threads=1, statistics="recomputed")
    task = dataclasses.replace(slow_averages(), model=Partly)
    with Training(task, recipe, sw.Placement(device="cpu")) as training:
        *_, _ = training.records()
        trained = training.strategy.model.tensors()
        assert torch.equal(training.final["frozen.running_mean"], torch.full((64,), 4.0))
        assert torch.equal(training.final["aside.running_mean"], trained["aside.running_mean"])
        assert training.final["aside.num_batches_tracked"] == 5
        assert not torch.equal(training.final["used.running_mean"], trained["used.running_mean"])
    assert [*sw.train(dataclasses.replace(task, model=FrozenOnly), recipe.replace(worker_batch=1))]


class FrozenOnly(Partly):
    def forward(self, x):
        return self.last(self.frozen(x.flatten(1)))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.aside.eval()
        self.used.eval()
        return self


def test_the_exported_model_scores_what_the_result_says(scalewise, tmp_path):
    task = ["--set", "bn=true", "--workers", "8", "--worker-batch", "32", "--epochs", "2", "--processes", "2"]
    found = scalewise("train", "digits", *task, "--out", tmp_path / "run", "--json", "--quiet").json
    built = sw.load_task("digits", ["bn=true"])
    model = built.model()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    model.eval()
    tx, ty = built.test
    assert found["test"]["accuracy"] == pytest.approx(sw.accuracy(model(tx), ty).item())
