"""`--recipe auto`: what it derives, from what, and that it counts what it spent."""

from __future__ import annotations

import json

import pytest

import scalewise as sw
from scalewise.engine.auto import complete
from scalewise.recipe import Pilot, Recipe, adapts, resolve

PILOT = Pilot(noise_scale=128.0, steps=16, samples=4096, seconds=1.0)


def test_a_measured_noise_scale_becomes_adascale_and_a_price():
    recipe, derived = resolve(Recipe(worker_batch=32, epochs=10.0), {"workers": 8}, "auto", 2, 1000, PILOT)
    rule, price, threads = derived
    assert recipe.lr_rule == rule.value == "adascale"
    gain = (128 / 32 + 1) / (128 / 256 + 1)
    assert f"worth {gain:.1f} steps" in rule.reason
    assert price.value == round(10 * 1000 * 8 / gain) + PILOT.samples
    assert "more than this task can use at the start" in price.reason
    grown = (8 * 128 / 32 + 1) / (8 * 128 / 256 + 1)
    assert f"if the noise stays as it is, {8 / grown + 0.4096:.1f} times if it grows 8-fold" in price.reason
    assert "half up to about 6 workers" in price.reason
    assert (threads.field, threads.value) == ("threads", 1)


def test_workers_that_the_task_can_use_are_not_called_too_many():
    noisy = Pilot(noise_scale=100_000.0, steps=16, samples=4096, seconds=1.0)
    _, derived = resolve(Recipe(worker_batch=32), {"workers": 8}, "auto", 2, 1000, noisy)
    assert "more than this task can use" not in derived[1].reason
    unknown = Pilot(noise_scale=None, steps=16, samples=4096, seconds=1.0)
    _, derived = resolve(Recipe(worker_batch=32, epochs=10.0), {"workers": 8}, "auto", 2, 1000, unknown)
    assert derived[1].value == 10_000 + unknown.samples
    assert "grows" not in derived[1].reason  # there is no more to gain


@pytest.mark.parametrize(
    ("given", "fixed", "expected"),
    [
        ({"workers": 8}, False, True),
        ({"workers": 1}, False, False),
        ({"workers": 8, "lr_rule": "linear"}, False, False),
        ({"workers": 8, "steps": 5}, False, False),
        ({"workers": 8, "schedule": "growth"}, False, False),
        ({"workers": 8}, True, False),
    ],
)
def test_when_auto_measures(given, fixed, expected):
    assert adapts(Recipe(**given), fixed) is expected


def test_the_pilot_depends_on_task_recipe_and_seed_alone():
    task = sw.load_task("mlp")
    found = [complete(task, task.recipe, {"workers": 4, "seed": seed}, "auto", "cpu") for seed in (1, 1, 2)]
    scales = [pilot.noise_scale for _, _, pilot in found]
    assert scales[0] == scales[1] != scales[2]
    assert found[0][0] == found[1][0]


def test_the_price_counts_what_is_held_out():
    task = sw.load_task("digits")
    given = {"workers": 4, "epochs": 2.0}

    def price(**more):
        known = Pilot(noise_scale=128.0, steps=16, samples=4096, seconds=1.0)
        _, derived, _ = complete(task, task.recipe, given | more, "auto", "cpu", known=known)
        return next(value.value for value in derived if value.field == "samples") - known.samples

    assert price(patience=3) == pytest.approx(price() * (1437 - 143) / 1437, rel=1e-3)


def test_auto_is_as_good_as_one_worker_and_counts_its_pilot(scalewise, tmp_path):
    flags = ["--workers", 8, "--epochs", 4, "--processes", 1, "--json"]
    single = scalewise("train", "mlp", "--epochs", 4, "--json", "--quiet").json
    outcome = scalewise("train", "mlp", *flags, "--out", "run", "--checkpoint-steps", 10)
    result = outcome.json
    pilot = json.loads((tmp_path / "run" / "recipe.json").read_text())["pilot"]
    steps = [line for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
             if line["kind"] == "step"]  # fmt: skip
    assert result["steps"] == len(steps) + pilot["steps"]
    assert result["samples"] == steps[-1]["samples"] + pilot["samples"]
    assert [value["field"] for value in result["derived"]] == ["lr_rule", "samples", "threads"]
    assert "auto  lr_rule = adascale" in outcome.stderr
    assert result["test"]["accuracy"] > single["test"]["accuracy"] - 0.02
    resumed = scalewise("train", "mlp", "--resume", "run", "--processes", 1, "--json", "--quiet").json
    assert (resumed["steps"], resumed["weights_sha256"]) == (result["steps"], result["weights_sha256"])


def test_fixed_epochs_keep_the_samples_of_one_worker(scalewise):
    flags = ["--workers", 8, "--epochs", 2, "--epochs-fixed", "--processes", 1, "--json", "--quiet"]
    result = scalewise("train", "mlp", *flags).json
    assert result["epochs"] == pytest.approx(2.0, abs=0.1)
    assert [value["field"] for value in result["derived"]] == ["lr_rule", "warmup_epochs", "threads"]
    assert result["derived"][0]["value"] == "sqrt"


def test_fixed_epochs_and_adascale_contradict_each_other(scalewise_here):
    outcome = scalewise_here("train", "mlp", "--workers", 8, "--epochs-fixed", "--lr-rule", "adascale")
    assert outcome.code == 2
    assert "--epochs-fixed and --lr-rule adascale cannot be combined" in outcome.stderr


def test_adascale_asked_for_has_no_warm_up_of_its_own():
    recipe, derived = resolve(Recipe(), {"workers": 8, "lr_rule": "adascale"}, "auto", 2, 1000)
    assert (recipe.warmup_epochs, [value.field for value in derived]) == (0.0, ["threads"])


def test_an_error_in_the_pilot_is_said_like_any_other(scalewise, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch, scalewise as sw\nfrom torch import nn\n"
        "def loss(output, target):\n    raise ValueError('mine')\n"
        "def task():\n    x = torch.rand(64, 3)\n"
        "    return sw.Task(model=lambda: nn.Linear(3, 2), train=(x, x), test=(x, x), loss=loss)\n"
    )
    outcome = scalewise("train", "mine.py", "--workers", 2)
    assert outcome.code == 1
    assert "ValueError: mine" in outcome.stderr
    assert "scalewise/" not in outcome.stderr
    assert not (tmp_path / "runs").exists()
