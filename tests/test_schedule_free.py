"""Schedule-free in the engine: training has y, evaluation and export x, and neither disturbs the other."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import scalewise as sw
from scalewise.engine.data.streams import SampleStream
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.nn.batch_norm import averaging_layers

FIELDS = {"worker_batch": 32, "steps": 30, "optimizer": "schedule-free", "lr": 0.01, "weight_decay": 0.1, "threads": 1}
CPU = sw.Placement(device="cpu")


def accuracy(model: torch.nn.Module, task: sw.Task) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(task.test[0]).argmax(1) == task.test[1]).double().mean())


def test_what_is_evaluated_and_kept_is_x_of_a_plain_loop():
    task = sw.load_task("digits")
    with Training(task, sw.Recipe(**FIELDS), CPU) as training:
        *_, result = training.records()
        trained = {name: value.clone() for name, value in training.strategy.model.tensors().items()}
    torch.manual_seed(0)
    model, (x, y) = task.model(), task.train
    optimizer = sw.optim.ScheduleFree(model.parameters(), lr=0.01, weight_decay=0.1)
    stream = SampleStream(len(x), seed=0)
    for step in range(30):
        indices, _ = stream.take(step * 32, (step + 1) * 32)
        optimizer.zero_grad()
        F.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    assert sha256(trained) == sha256(model.state_dict()) == result.weights_sha256
    optimizer.eval()
    assert sha256(training.final) == sha256(model.state_dict()) != result.weights_sha256
    assert result.test["accuracy"] == accuracy(model, task)


def test_an_evaluation_leaves_no_trace_in_the_training():
    task = sw.load_task("digits", ["bn=true"])

    def after(looks: bool) -> str:
        with Training(task, sw.Recipe(workers=2, **FIELDS), CPU, hold_out=True) as training:
            for _ in range(6):
                training.take_step()
                if looks:
                    training.validate()
            assert training.progress.step == 6
            return sha256(training.strategy.model.tensors())

    assert after(looks=True) == after(looks=False)


def test_batch_norm_statistics_are_those_of_x():
    """Also when running averages are old enough to be trusted: they are those of y."""
    task = sw.load_task("digits", ["bn=true"])
    recipe = sw.Recipe(**FIELDS | {"steps": 320, "lr": 0.05})
    with Training(task, recipe, CPU) as training:
        *_, result = training.records()
        model = training.strategy.model.module
    assert all(320 * (norm.momentum or 0) > 30 for norm in averaging_layers(model))  # `--statistics auto` trusts them
    kept = dict(model.named_buffers())
    assert any(not torch.equal(kept[name], training.final[name]) for name in kept if name.endswith("running_var"))
    model.load_state_dict(training.final)
    assert result.test["accuracy"] == accuracy(model, task)


def test_the_best_weights_are_x_and_are_exported(scalewise, tmp_path):
    flags = ["--optimizer", "schedule-free", "--lr", 0.3, "--epochs", 8, "--patience", 2, "--threads", 1]
    result = scalewise("train", "mlp", *flags, "--out", "run", "--json", "--quiet").json
    exported = load_file(tmp_path / "run" / "model.safetensors")
    assert sha256(exported) == result["best_sha256"] != result["weights_sha256"]
    task = sw.load_task("mlp")
    model = task.model()
    model.load_state_dict(exported)
    assert result["test"]["accuracy"] == accuracy(model, task)


def test_a_resumed_run_evaluates_the_same(scalewise):
    task = ["train", "digits", "--set", "bn=true", "--quiet"]
    flags = ["--optimizer", "schedule-free", "--workers", 2, "--recipe", "plain"]
    whole = scalewise(*task, *flags, "--steps", 9, "--json", "--out", "whole").json
    assert scalewise(*task, *flags, "--steps", 4, "--out", "part").code == 0
    resumed = scalewise(*task, "--resume", "part", "--steps", 9, "--processes", 1, "--json").json
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["test"] == whole["test"]
