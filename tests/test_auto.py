"""`--recipe auto`: what it derives, from what, and that it counts what it spent."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.engine.auto import MOST_TRIAL_STEPS, Auto, _looked_up, _rank, carried, complete, share_of_trial
from scalewise.engine.candidates import (
    BOLD,
    CARRIES,
    GENTLE,
    MUON_LADDER,
    UNKNOWN,
    Found,
    best_rate,
    budget,
    candidate,
    intensity,
)
from scalewise.engine.placement import Placement
from scalewise.recipe import Recipe, Search, Trial, adapts, resolve
from scalewise.records import Epoch
from scalewise.runs.request import load_subject
from scalewise.runs.run import Course
from scalewise.runs.train import Request, _RaceFile

PILOT = Search(noise_scale=128.0, steps=16, samples=4096, seconds=1.0)
NO_RACE, RACE = Auto(search=0), Auto(search=0.04)
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
import scalewise as sw
def task(samples: int = 6000, lr: float = 0.01, optimizer: str = "momentum") -> sw.Task:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples + 1000, 12, generator=generator)
    score = torch.relu(x @ torch.randn(12, 16, generator=generator) / 4) @ torch.randn(16, 3, generator=generator)
    y = (score + 0.5 * torch.randn(samples + 1000, 3, generator=generator)).argmax(1)
    return sw.Task(
        model=lambda: nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3)),
        train=(x[1000:], y[1000:]), test=(x[:1000], y[:1000]), loss=F.cross_entropy, metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=16, epochs=3.0, optimizer=optimizer, lr=lr),
    )
"""


@pytest.fixture
def race_task(tmp_path):
    """A task whose single worker takes 1,125 steps: enough for a race of four trials."""
    (tmp_path / "mine.py").write_text(TASK)
    return "mine.py"


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
    noisy = Search(noise_scale=100_000.0, steps=16, samples=4096, seconds=1.0)
    _, derived = resolve(Recipe(worker_batch=32), {"workers": 8}, "auto", 2, 1000, noisy)
    assert "more than this task can use" not in derived[1].reason
    unknown = Search(noise_scale=None, steps=16, samples=4096, seconds=1.0)
    _, derived = resolve(Recipe(worker_batch=32, epochs=10.0), {"workers": 8}, "auto", 2, 1000, unknown)
    assert derived[1].value == 10_000 + unknown.samples
    assert "grows" not in derived[1].reason  # there is no more to gain


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"workers": 8}, True),
        ({"workers": 1}, False),
        ({"workers": 8, "lr_rule": "linear"}, False),
        ({"workers": 8, "steps": 5}, False),
        ({"workers": 8, "schedule": "growth"}, False),
    ],
)
def test_when_auto_searches(given, expected):
    assert adapts(Recipe(**given)) is expected


def test_the_pilot_depends_on_task_recipe_and_seed_alone():
    task = sw.load_task("mlp")
    found = [
        complete(task, task.recipe, {"workers": 4, "seed": seed}, "auto", Placement("cpu"), NO_RACE)
        for seed in (1, 1, 2)
    ]
    scales = [pilot.noise_scale for _, _, pilot in found]
    assert scales[0] == scales[1] != scales[2]
    assert found[0][0] == found[1][0]


def test_the_price_counts_what_is_held_out():
    task = sw.load_task("digits")
    given = {"workers": 4, "epochs": 2.0}

    def price(**more):
        known = Search(noise_scale=128.0, steps=16, samples=4096, seconds=1.0)
        _, derived, _ = complete(task, task.recipe, given | more, "auto", Placement("cpu"), NO_RACE, known)
        return next(value.value for value in derived if value.field == "samples") - known.samples

    assert price(patience=3) == pytest.approx(price() * (1437 - 143) / 1437, rel=1e-3)


def steps_of(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def test_without_a_race_auto_follows_the_noise_and_names_its_pilot(scalewise, tmp_path):
    flags = ["--workers", 8, "--epochs", 4, "--processes", 1, "--search", 0, "--json"]
    single = scalewise("train", "mlp", "--epochs", 4, "--json", "--quiet").json
    outcome = scalewise("train", "mlp", *flags, "--out", "run", "--checkpoint-steps", 10)
    result = outcome.json
    pilot = json.loads((tmp_path / "run" / "recipe.json").read_text())["search"]
    steps = steps_of(tmp_path / "run")
    assert result["steps"] == len(steps)
    assert result["samples"] == steps[-1]["samples"]
    assert result["search"] == {name: pilot[name] for name in ("steps", "samples", "seconds")}
    assert [value["field"] for value in result["derived"]] == ["lr_rule", "samples", "threads"]
    assert "auto  lr_rule = adascale" in outcome.stderr
    assert result["test"]["accuracy"] > single["test"]["accuracy"] - 0.02
    resumed = scalewise("train", "mlp", "--resume", "run", "--processes", 1, "--json", "--quiet").json
    assert (resumed["steps"], resumed["weights_sha256"]) == (result["steps"], result["weights_sha256"])


def test_the_race_is_the_default_and_reaches_one_workers_accuracy_in_a_quarter_of_the_steps(
    scalewise, tmp_path, race_task
):
    single = scalewise("train", race_task, "--threads", 1, "--json", "--quiet").json
    flags = ["--workers", 8, "--json"]
    runs = {
        processes: scalewise("train", race_task, *flags, "--processes", processes, "--out", f"run-{processes}")
        for processes in (1, 2, 3)
    }
    result = runs[1].json
    assert {run.json["weights_sha256"] for run in runs.values()} == {result["weights_sha256"]}
    assert result["steps"] == len(steps_of(tmp_path / "run-1"))
    assert result["steps"] + result["search"]["steps"] <= single["steps"] / 4
    assert result["test"]["accuracy"] > single["test"]["accuracy"] - 0.005
    assert result["optimizer"] == "muon"
    stored = json.loads((tmp_path / "run-1" / "recipe.json").read_text())
    trials = stored["search"]["trials"]
    assert [trial["name"] for trial in trials] == ["muon", "muon", "muon", "momentum"]
    assert [trial["steps"] for trial in trials] == [20, 10, 10, 10]
    assert [trial["halfway"] is None for trial in trials] == [False, True, True, True]
    assert sum(trial["steps"] for trial in trials) == result["search"]["steps"] <= 0.05 * single["steps"]
    assert stored["recipe"]["optimizer"] == "muon"
    assert "race  loss on held-out data after 10 steps" in runs[1].stderr
    price = next(value for value in result["derived"] if value["field"] == "samples")
    assert price["value"] == result["samples"]
    assert not [*tmp_path.glob("*.race.json")]
    assert scalewise("doctor", "run-1", "--json").json["findings"] == []


def test_more_processes_than_trials_have_workers_derive_the_same():
    task = sw.load_task("mlp")
    given = {"workers": 16, "epochs": 8.0}
    found = [
        complete(task, task.recipe, given, "auto", Placement("cpu"), processes=processes)[0] for processes in (1, 16)
    ]
    assert found[0] == found[1]


def random_labels(share):
    """A task of which a share of the labels is random: the rest can be learned, they can only be memorized."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3000, 20, generator=generator)
    y = (x @ torch.randn(20, 5, generator=generator)).argmax(1)
    y = torch.where(torch.rand(3000, generator=generator) < share, torch.randint(5, (3000,), generator=generator), y)
    return sw.Task(
        model=lambda: nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 5)),
        train=(x, y),
        test=(x[:100], y[:100]),
        loss=F.cross_entropy,
        recipe=Recipe(worker_batch=16, epochs=8.0, optimizer="adam", lr=0.003, threads=1),
    )


def test_what_would_be_memorized_is_trained_gently():
    def found(share):
        task = random_labels(share)
        recipe, _, search = complete(task, task.recipe, {"workers": 8}, "auto", Placement("cpu"))
        return recipe, search

    clean, search = found(0.0)
    noisy, noisy_search = found(0.5)
    assert carried(search.trials[0]) > 0.5 > carried(noisy_search.trials[0])
    assert clean.epochs > noisy.epochs
    assert noisy.weight_decay * noisy.lr * noisy.total_steps(3000) > clean.weight_decay * clean.lr * clean.total_steps(
        3000
    )


def test_what_carries_over_is_the_fall_on_held_out_data_by_that_on_training_data():
    def longer(train, held_out):
        return Trial("muon", 0.1, 8, 1000, 1.0, held_out, train, halfway=(1.1, 1.0))

    assert carried(longer(0.5, 0.9)) == pytest.approx(0.4)
    assert carried(longer(0.5, 1.2)) == pytest.approx(-0.2)
    assert carried(longer(1.0, 1.1)) == carried(longer(1.2, 1.4)) == 1.0
    assert carried(longer(None, None)) == UNKNOWN


def test_rows_that_are_looked_up_do_not_count_as_memorized():
    def task(*layers):
        return dataclasses.replace(random_labels(0.5), model=lambda: nn.Sequential(*layers))

    assert _looked_up(task(nn.Linear(20, 4), nn.BatchNorm1d(4))) == 0
    assert _looked_up(task(nn.Embedding(12, 5), nn.Linear(5, 4, bias=False))) == pytest.approx(60 / 80)


def test_the_best_rate_is_that_of_a_parabola_within_reach_of_what_was_tried():
    def losses(best):
        return {rate: 1 + math.log2(rate / best) ** 2 for rate in MUON_LADDER[:3]}

    for best in (0.022, 0.03, 0.045, 0.09):
        assert best_rate(losses(best)) == pytest.approx(best)
    assert best_rate(losses(10.0)) == best_rate({0.03: 1.0, 0.06: 0.9, 0.12: 0.7}) == pytest.approx(0.06 * 2**0.7)
    assert best_rate(losses(1e-4)) == best_rate({0.03: 0.7, 0.06: 0.9, 0.12: 1.0}) == pytest.approx(0.06 / 2**1.5)
    assert best_rate({0.06: math.inf, 0.12: math.inf, 0.03: 2.0}) == 0.03


def test_the_race_goes_to_the_side_of_the_better_rate(monkeypatch):
    task = sw.load_task("mlp")

    def tried(best):
        def run(self, name, steps, rate=None):
            loss = 1 + abs(math.log2((rate or 0.4) / best))
            return Trial(name, rate or 0.4, steps, 100, 0.1, loss, loss, (loss, loss) if steps > self.steps else None)

        monkeypatch.setattr("scalewise.engine.auto._Race.run", run)
        recipe, _, search = complete(task, task.recipe, {"workers": 8, "epochs": 40.0}, "auto", Placement("cpu"), RACE)
        return [trial.lr for trial in search.trials if trial.name == "muon"], recipe.lr

    slow, slow_rate = tried(0.03)
    fast, fast_rate = tried(0.2)
    assert (slow, fast) == ([0.06, 0.12, 0.03], [0.06, 0.12, 0.24])
    assert slow_rate < fast_rate


def test_intensity_goes_from_gentle_to_bold():
    low, high = CARRIES
    found = [intensity(share) for share in (-1.0, low, 0.4, 0.6, high, 2.0)]
    assert (found[0], found[1], found[-2], found[-1]) == (GENTLE, GENTLE, BOLD, BOLD)
    assert [one.decay for one in found] == sorted((one.decay for one in found), reverse=True)
    for workers in (8, 32, 128):
        assert [one.times(workers) for one in found] == sorted(one.times(workers) for one in found)


@pytest.mark.parametrize("flags", [["--search", "0.06"], ["--search", "0.06", "--candidates", "own,lamb,adamw"]])
def test_what_the_race_chooses_among_can_be_set(scalewise, race_task, flags):
    assert scalewise("train", race_task, "--workers", 8, *flags, "--epochs", 2, "--processes", 1, "--json").code == 0


def test_given_fields_win(scalewise, race_task):
    flags = ["--workers", 8, "--processes", 1, "--epochs", 2, "--search", 0.06, "--json", "--quiet"]
    adam = scalewise("train", race_task, *flags, "--optimizer", "adam").json
    assert (adam["optimizer"], adam["derived"][1]["value"]) == ("adam", "adascale")
    rate = scalewise("train", race_task, *flags, "--lr", "0.02").json
    assert (rate["optimizer"], rate["lr"]["base"]) == ("momentum", 0.02)
    muon = scalewise("train", race_task, *flags, "--optimizer", "muon", "--lr", "0.03", "--schedule", "linear").json
    assert muon["lr"] == {"base": 0.03, "peak": 0.03}
    assert muon["search"]["steps"] > 0  # for how long to train


def test_a_stopped_race_continues_with_what_it_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    task, recipe = sw.load_task("mine.py"), sw.Recipe(workers=8)
    whole = sw.fit(task, recipe, folder="whole", search=0.04)
    import scalewise.engine.auto as auto

    run, ran = auto._Race.run, []

    def stops_after_one(self, name, steps, rate=None):
        ran.append(name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(self, name, steps, rate)

    monkeypatch.setattr(auto._Race, "run", stops_after_one)
    with pytest.raises(KeyboardInterrupt):
        sw.fit(task, recipe, folder="stopped", search=0.04)
    assert (tmp_path / "stopped.race.json").is_file()
    resumed = sw.fit(task, recipe, folder="stopped", search=0.04)
    assert len(ran) == 5  # the first trial was not run again
    assert resumed.weights_sha256 == whole.weights_sha256
    assert not (tmp_path / "stopped.race.json").exists()


def test_trials_of_other_data_are_not_continued_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    task = sw.load_task("mine.py")
    other = dataclasses.replace(task, train=(task.train[0] + 1, task.train[1]))
    files = [
        _RaceFile(Request(one, folder=tmp_path / "run"), load_subject(one, None, None), one.recipe)
        for one in (task, task, other)
    ]
    files[0].write([Trial("muon", 0.1, 8, 1000, 1.0, 0.5, 0.4)])
    assert [file.read() is None for file in files] == [False, False, True]


def test_a_candidate_that_diverges_is_dropped():
    torch.manual_seed(0)
    x = torch.randn(4000, 4) * 1e4
    task = sw.Task(
        model=lambda: nn.Linear(4, 1),
        train=(x, x.sum(1, keepdim=True)),
        test=(x[:10], x[:10].sum(1, keepdim=True)),
        loss=F.mse_loss,
        recipe=Recipe(worker_batch=8, epochs=4.0, optimizer="sgd", lr=0.1, threads=1),
    )
    recipe, _, search = complete(task, task.recipe, {"workers": 8}, "auto", Placement("cpu"), RACE)
    losses = {trial.name: trial.loss for trial in search.trials}
    assert losses["sgd"] is None
    assert recipe.optimizer == "muon"


def test_a_model_without_matrices_keeps_its_optimizer():
    task = sw.Task(
        model=lambda: nn.BatchNorm1d(3),
        train=(torch.randn(400, 3), torch.randn(400, 3)),
        test=(torch.randn(8, 3), torch.randn(8, 3)),
        loss=F.mse_loss,
        recipe=Recipe(worker_batch=8, epochs=2.0, threads=1),
    )
    recipe, _, search = complete(task, task.recipe, {"workers": 4}, "auto", Placement("cpu"), RACE)
    assert (recipe.optimizer, recipe.lr_rule, search.trials) == ("momentum", "adascale", ())


def test_frozen_matrices_leave_muon_out():
    def model():
        found = nn.Linear(20, 5)
        found.weight.requires_grad_(False)
        return found

    task = dataclasses.replace(random_labels(0.0), model=model)
    recipe, _, search = complete(task, task.recipe, {"workers": 4}, "auto", Placement("cpu"))
    assert (recipe.optimizer, recipe.lr_rule, search.trials) == ("adam", "adascale", ())


def test_two_samples_are_too_few_to_judge_by():
    task = random_labels(0.0)
    few = dataclasses.replace(task, train=(task.train[0][:2], task.train[1][:2]))
    given = {"workers": 2, "epochs": 1000.0, "worker_batch": 1}
    recipe, _, search = complete(few, few.recipe, given, "auto", Placement("cpu"))
    assert (recipe.lr_rule, search.trials) == ("adascale", ())


def test_sharded_matrices_leave_muon_out():
    task = sw.load_task("mlp")
    recipe, _, _ = complete(task, task.recipe, {"workers": 4}, "auto", Placement("cpu", shard_optimizer=True), RACE)
    assert recipe.optimizer == task.recipe.optimizer


def test_the_budget_grows_slower_than_the_workers():
    single = Recipe(worker_batch=32, epochs=10.0)

    def times_fewer(carried):
        found = [budget(single.replace(workers=n), 10_000, False, carried) for n in (2, 8, 32)]
        return [round(one.single_steps / one.steps, 1) for one in found]

    assert times_fewer(CARRIES[0]) == [2.0, 8.0, 23.7]
    assert times_fewer(1.0) == [2.0, 6.2, 10.7]
    assert budget(single.replace(workers=1000), 10_000, False, CARRIES[0]).steps == 40
    assert budget(single.replace(workers=10_000), 10_000, False, 1.0).steps == 100
    assert budget(single.replace(workers=8), 10_000, True, 0.3).steps == 391


def test_a_trial_has_no_weight_decay_so_that_it_shows_what_is_memorized():
    base = Recipe(worker_batch=32, optimizer="adamw", lr=0.002, weight_decay=0.1)
    assert candidate("muon", base, {"workers": 8}, 10_000, 16).fields["weight_decay"] == 0
    assert "weight_decay" not in candidate("muon", base, {"workers": 8, "weight_decay": 0.2}, 10_000, 16).fields


def test_muon_is_chosen_unless_another_is_far_ahead_in_a_short_trial():
    trials = [Trial(name, 0.1, 8, 1000, 1.0, loss, loss) for name, loss in (("muon", 0.5), ("adam", 0.2), ("sgd", 0.1))]
    assert [trial.name for trial in sorted(trials, key=lambda one: _rank(one, 8))] == ["sgd", "muon", "adam"]
    assert _rank(Trial("muon", 0.1, 8, 1000, 1.0, None, None), 8) == math.inf
    assert _rank(Trial("adam", 0.1, 16, 1000, 1.0, None, None, halfway=(0.4, 0.3)), 8) == 0.4


def test_muons_weight_decay_sums_to_the_same_over_any_training():
    for steps in (50, 2000):
        base = Recipe(worker_batch=32, optimizer="adam", lr=0.002)
        fields = candidate("muon", base, {"workers": 8}, 10_000, steps, Found(CARRIES[0])).fields
        assert fields["weight_decay"] * fields["lr"] * 0.5 * steps == pytest.approx(GENTLE.decay, rel=0.01)


def test_fixed_epochs_keep_the_samples_of_one_worker(scalewise):
    flags = ["--workers", 8, "--epochs", 2, "--epochs-fixed", "--processes", 1, "--json", "--quiet"]
    result = scalewise("train", "mlp", *flags).json
    assert result["epochs"] == pytest.approx(2.0, abs=0.1)
    assert [value["field"] for value in result["derived"]] == ["lr_rule", "warmup_epochs", "threads"]
    assert result["derived"][0]["value"] == "sqrt"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--search", "0.001"], ["--search 0.001", "each needs 8", "raise it to"]),
        (["--search", "2"], ["from 0 to 1", "got 2"]),
        (["--search", "0.1", "--candidates", "muon,addam"], ["muon", "got 'addam'"]),
    ],
)
def test_a_race_that_cannot_be_is_refused(scalewise_here, flags, words):
    outcome = scalewise_here("train", "digits", "--workers", 8, "--processes", 1, *flags)
    assert outcome.code == 2
    for word in words:
        assert word in outcome.stderr.replace("\n", " ")


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


def test_a_trial_is_short_however_long_the_training():
    assert share_of_trial(100_000_000, 5, 0.03) == MOST_TRIAL_STEPS
    assert [share_of_trial(single, 5, None) for single in (2500, 1000, 449)] == [15, 10, 8]
    assert share_of_trial(390, 5, None) == 0  # a tenth of one worker's steps would not suffice


def test_a_run_that_does_worse_than_its_trials_says_so():
    said: list[str] = []
    trial = Trial("muon", 0.1, 8, 1000, 1.0, 0.5, 0.4)
    course = Course(Search(8, 1000, 1.0, trials=(trial,)), said.append)

    def epoch(validation):
        return Epoch(1, 1.0, 100, 0.1, {"loss": 0.3}, {"loss": validation}, False, 1.0, 100.0)

    for loss in (0.6, 0.4, 0.41):
        course.observe(epoch(loss))
    assert said == []
    course.observe(epoch(0.43))
    assert "risen from 0.4 to 0.43" in said[0]
    assert "--patience" in said[0]
    course.end(0.5)
    assert len(said) == 1
    course.end(0.51)
    assert "ended at 0.51, above the 0.5" in said[1]
    silent: list[str] = []
    pilot = Course(Search(8, 1000, 1.0, noise_scale=10.0), silent.append)
    pilot.observe(epoch(9.0))
    pilot.end(9.0)
    assert silent == []


def test_no_rate_is_used_that_the_race_has_not_tried():
    base = Recipe(worker_batch=32, optimizer="momentum", lr=0.05)
    for workers in (4, 8, 32, 128):
        fields = candidate("momentum", base, {"workers": workers}, 10_000, 100, 0.9).fields
        recipe = base.replace(workers=workers).replace(**fields)
        assert recipe.lr * recipe.lr_factor == pytest.approx(0.05 * min(workers, 8))
    fields = candidate("lamb", base, {"workers": 32}, 10_000, 100, 0.9).fields
    assert (fields["lr"], fields["lr_rule"]) == (pytest.approx(0.01 * 8**0.5, rel=0.01), "none")


def test_the_same_call_resumes_a_raced_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    task, recipe = sw.load_task("mine.py"), sw.Recipe(workers=8, epochs=2.0)
    whole = sw.fit(task, recipe, folder="whole", search=0.06)

    def breaks_off(record):
        if record.step == 40:
            raise RuntimeError("broken off")

    with pytest.raises(Exception, match="broken off"):
        sw.fit(task, recipe, folder="part", search=0.06, checkpoint_steps=10, on_record=breaks_off)
    resumed = sw.fit(task, recipe, folder="part", resume="auto", notify=lambda line: None)
    assert (resumed.steps, resumed.weights_sha256) == (whole.steps, whole.weights_sha256)


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_continues_a_stopped_race(scalewise, tmp_path, race_task, broken, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--workers", 8, "--search", 0.04, "--processes", 1, "--json", "--quiet", "--out", "run"]
    task = sw.load_task(race_task)
    request = Request(task, given={"workers": 8}, auto=Auto(search=0.04), folder=tmp_path / "run")
    first = {
        "name": "muon",
        "lr": 0.08,
        "steps": 11,
        "samples": 1408,
        "seconds": 12345.0,
        "loss": 0.9,
        "train_loss": 0.8,
    }
    first |= {"loss": "none"} if broken else {}
    file = _RaceFile(dataclasses.replace(request, folder=Path("run")), load_subject(task, None, None), task.recipe)
    file._path.write_text(json.dumps({"key": file._key, "trials": [first]}))
    result = scalewise("train", race_task, *flags)
    assert result.code == 0
    trials = json.loads((tmp_path / "run" / "recipe.json").read_text())["search"]["trials"]
    assert (trials[0]["seconds"] == 12345.0) is not broken
    assert not file._path.exists()


def test_a_race_that_nobody_finishes_is_counted_all_the_same():
    task = random_labels(0.0)

    class NothingToEvaluate(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.training else math.nan)

    broken = dataclasses.replace(task, model=lambda: NothingToEvaluate(nn.Linear(20, 5)))
    recipe, _, search = complete(broken, broken.recipe, {"workers": 8}, "auto", Placement("cpu"))
    assert recipe.lr_rule == "adascale"
    assert len(search.trials) == 4
    assert search.steps > sum(trial.steps for trial in search.trials) > 0
