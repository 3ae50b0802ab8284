from __future__ import annotations

import json

import pytest

from scalewise.errors import RecipeError
from scalewise.recipe import Recipe, differing_fields, resolve


def test_global_batch_and_steps():
    recipe = Recipe(workers=8, worker_batch=512, epochs=12.0)
    assert recipe.global_batch == 4096
    assert recipe.total_steps(50_000) == round(12 * 50_000 / 4096) == 146
    assert recipe.replace(steps=7).total_steps(50_000) == 7
    assert Recipe(workers=8, worker_batch=512, epochs=0.001).total_steps(10) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, ["workers", "greater than or equal to 1", "got 0", "--workers"]),
        ({"worker_batch": 32, "micro_batch": 5}, ["micro_batch", "divide", "5", "32"]),
        ({"worker_batch": 32, "batch_norm": "ghost:5"}, ["ghost", "divide", "32"]),
        ({"batch_norm": "gost:8"}, ["batch_norm", "gost:8"]),
        ({"optimizer": "adm"}, ["optimizer", "'sgd'", "adm"]),
        ({"lr": -1.0}, ["lr", "greater than or equal to 0", "-1.0"]),
        ({"lr": float("nan")}, ["lr", "finite"]),
        ({"workers": "8"}, ["workers", "integer"]),
        ({"worker": 8}, ["worker", "unknown recipe field"]),
        ({"seed": -1}, ["seed"]),
    ],
)
def test_mistakes_are_one_line(fields, words):
    with pytest.raises(RecipeError) as caught:
        Recipe(**fields)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        Recipe().workers = 3


def test_round_trip(tmp_path):
    recipe = Recipe(workers=3, clip_norm=1.0, batch_norm="ghost:8", epochs=2.5)
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "workers": 2,\n  "worker_bach": 8\n}', ["line 3", "worker_bach", "unknown"]),
        ('{\n  "workers": "two"\n}', ["line 2", "workers", "two"]),
        ('{"workers": 2,', ["line 1"]),
        ("[1, 2]", ["object", "list"]),
    ],
)
def test_a_bad_file_names_the_line(tmp_path, text, words):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(path)
    for word in words:
        assert word in str(caught.value)


def test_integers_are_floats_in_files(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"epochs": 3}))
    assert Recipe.load(path).epochs == 3.0


def test_auto_scales_by_the_optimizers_rule():
    recipe, derived = resolve(Recipe(optimizer="momentum"), {"workers": 8}, "auto", cores=4)
    assert (recipe.lr_rule, recipe.threads, recipe.lr_factor) == ("linear", 1, 8.0)
    assert [value.field for value in derived] == ["lr_rule", "warmup_epochs", "threads"]
    assert all(value.reason for value in derived)
    assert resolve(Recipe(optimizer="adam"), {"workers": 8}, "auto", cores=4)[0].lr_rule == "sqrt"
    assert resolve(Recipe(optimizer="lamb"), {"workers": 8}, "auto", cores=4)[0].lr_rule == "sqrt"
    assert resolve(Recipe(optimizer="lars"), {"workers": 8}, "auto", cores=4)[0].lr_rule == "linear"


def test_what_was_given_wins():
    recipe, derived = resolve(Recipe(), {"workers": 8, "lr_rule": "none", "threads": 2}, "auto", cores=4)
    assert (recipe.lr_rule, recipe.warmup_epochs, recipe.threads, derived) == ("none", 0.0, 2, [])
    task_says_so = Recipe(lr_rule="sqrt")
    assert resolve(task_says_so, {"workers": 8}, "auto", cores=4)[0].lr_rule == "sqrt"


def test_plain_changes_the_workers_only():
    recipe, _ = resolve(Recipe(), {"workers": 8}, "plain", cores=4)
    assert recipe.model_dump() == Recipe().model_dump() | {"workers": 8, "threads": 1}
    assert resolve(Recipe(), {}, "auto", cores=4)[0].threads == 4


def test_what_may_change_on_resume():
    stored = Recipe(workers=2, threads=1)
    assert differing_fields(stored, stored.replace(epochs=9.0, steps=4, patience=2, target=0.5)) == []
    assert differing_fields(stored, stored.replace(lr=0.9, seed=3)) == ["lr", "seed"]


@pytest.mark.parametrize(
    ("given", "lr"),
    [
        ({"optimizer": "lamb"}, 0.01),
        ({"optimizer": "soap"}, 0.003),
        ({"optimizer": "schedule-free"}, 0.005),
        ({"optimizer": "lamb", "lr": 0.5}, 0.5),
        ({"optimizer": "nesterov"}, 0.05),
        ({"optimizer": "sgd"}, 0.5),
        ({"optimizer": "momentum"}, 0.05),
    ],
)
def test_an_optimizer_that_was_asked_for_gets_a_rate_of_its_own(given, lr):
    base = Recipe(optimizer="momentum", lr=0.05, threads=1)
    recipe, derived = resolve(base, given, "auto", 2)
    assert recipe.lr == lr
    assert [value.field for value in derived] == ([] if given.get("lr") or given["optimizer"] == "momentum" else ["lr"])
    assert resolve(base, given, "plain", 2)[0].lr == given.get("lr", 0.05)
