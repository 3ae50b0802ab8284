"""`scalewise tune` as a person or a script meets it, and its search without any training."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import scalewise as sw
from scalewise.engine.candidates import OWN
from scalewise.errors import RunFolderError, TargetMissed, UsageError
from scalewise.present import terminal
from scalewise.present.live_compare import TuneView
from scalewise.present.page import page
from scalewise.present.stored import Stored
from scalewise.present.stories.tune import tuning_story
from scalewise.recipe import Recipe
from scalewise.runs.compare.comparison import Metric
from scalewise.runs.compare.jobs import Failure, Job, Outcome, Progress
from scalewise.runs.tune.search import Allowance, Search, chosen_optimizers, recipe_at, starts
from scalewise.runs.tune.tune import TuneRequest
from test_resume import kill_tree, start, wait_for

KEYS = {"recipe", "steps", "samples", "speedup_steps", "single", "not_inferior", "trials", "command"}
TASK = """
    import torch, scalewise as sw
    from torch.nn import functional as F

    def task(samples: int = 400) -> sw.Task:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples + 200, 6, generator=generator)
        y = (x[:, :3].sum(1) > 0).long()
        return sw.Task(
            model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
            train=(x[200:], y[200:]), test=(x[:200], y[:200]), loss=F.cross_entropy, metrics={"accuracy": sw.accuracy},
            recipe=sw.Recipe(worker_batch=8, epochs=2.0, optimizer="sgd", lr=0.003),
        )
"""
FLAGS = ["--workers", "4", "--budget", "4x", "--seeds", "3", "--candidates", "muon,own"]


def write_task(folder: Path) -> None:
    (folder / "mine.py").write_text(textwrap.dedent(TASK))


def without_place(document: dict) -> dict:
    return {name: value for name, value in document.items() if name != "command"}


def test_the_json_the_recipe_the_page_and_the_same_result_after_a_kill_with_other_processes(scalewise, tmp_path):
    write_task(tmp_path)
    outcome = scalewise("tune", "mine.py", *FLAGS, "--jobs", 1, "--out", "a", "--json")
    found = outcome.json
    assert outcome.code == 0, outcome.stderr
    assert set(found) == KEYS
    assert set(found["not_inferior"]) == {"difference", "low", "high"}
    assert found["not_inferior"]["low"] >= -0.005
    assert found["single"]["steps"] == 100
    assert found["steps"] < 100
    assert found["speedup_steps"] == 100 / found["steps"]
    assert found["samples"] == found["steps"] * 32
    assert {trial["optimizer"] for trial in found["trials"]} <= {"muon", "sgd"}
    assert [trial["outcome"] for trial in found["trials"]].count("proved") == 1
    assert sum(trial["spent"] for trial in found["trials"]) <= 4 * 800
    assert found["command"] == "scalewise train mine.py --recipe a/recipe.json"
    assert "In how few steps do 4 workers learn mine" in outcome.stderr
    assert "not inferior" in " ".join(outcome.stderr.split())
    assert "one worker, " + found["recipe"]["optimizer"] in outcome.stderr

    trained = scalewise(*found["command"].split()[1:], "--processes", 1, "--json").json
    assert (trained["steps"], trained["workers"]) == (found["steps"], 4)
    stored = json.loads((tmp_path / "a" / f"proof-{proved(found)}-4w-seed0" / "result.json").read_text())
    assert stored["weights_sha256"] == trained["weights_sha256"]
    shown = page([tmp_path / "a"])
    assert "Steps against samples" in shown
    assert "Validation accuracy by rate" in shown

    process = start(tmp_path, "tune", "mine.py", *FLAGS, "--jobs", "2", "--out", "b")
    wait_for(lambda: bool([*(tmp_path / "b").glob("trial-*/result.json")]), process)
    kill_tree(process)
    assert not (tmp_path / "b" / "tune.json").exists()
    again = scalewise("tune", "mine.py", "--jobs", 2, "--out", "b", "--resume", "auto", "--json")
    assert "already done" in again.stderr
    assert without_place(again.json) == without_place(found)


def test_compare_has_a_row_for_a_tuned_recipe(tmp_path):
    file = tmp_path / "recipe.json"
    hopeless().recipe.replace(workers=2, optimizer="muon", steps=3, lr=0.04).save(file)
    found = sw.compare(hopeless(), workers=2, rows="muon", seeds=1, tuned=file, out=tmp_path / "table").to_json()[
        "rows"
    ]
    assert [(row["name"], row["optimizer"], row["steps"]) for row in found] == [
        ("muon", "muon", 15),
        ("tuned", "muon", 3),
    ]


def proved(found: dict) -> str:
    return next(trial["name"] for trial in found["trials"] if trial["outcome"] == "proved")


def hopeless() -> sw.Task:
    """Labels without any rule: what is learned says nothing about test data, so no difference is ever proved."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(140, 4, generator=generator), torch.randint(2, (140,), generator=generator)
    return sw.Task(
        model=lambda: torch.nn.Linear(4, 2), train=(x[20:], y[20:]), test=(x[:20], y[:20]),
        loss=functional.cross_entropy, metrics={"accuracy": sw.accuracy}, name="hopeless",
        recipe=sw.Recipe(worker_batch=4, epochs=1.0, optimizer="sgd", lr=0.5),
    )  # fmt: skip


def test_what_cannot_be_proved_is_said_and_leaves_no_recipe(tmp_path):
    found = sw.tune(hopeless(), workers=[2, 3], budget="6x", seeds=2, candidates="own", out=tmp_path / "a")
    document = found.to_json()
    assert set(document) == KEYS | {"rows"}
    assert [row["workers"] for row in document["rows"]] == [2, 3]
    assert document["recipe"]["workers"] == 3
    assert document["command"] is None
    assert not (tmp_path / "a" / "recipe.json").exists()
    with pytest.raises(TargetMissed, match=r"no recipe for .*3 workers was proved.*--budget") as missed:
        found.check_proved()
    assert missed.value.exit_code == 3
    shown = terminal.text(tuning_story(Stored(found.document())), width=100)
    assert "No recipe was proved as good as one worker" in shown
    spent = sum(trial["spent"] for row in document["rows"] for trial in row["trials"])
    assert 0 < spent <= 6 * document["single"]["samples"]

    more = sw.tune(hopeless(), workers="2,3", budget="12x", seeds=3, candidates="own", resume=tmp_path / "a").to_json()
    before = [{trial["name"] for trial in row["trials"]} for row in document["rows"]]
    after = [{trial["name"] for trial in row["trials"]} for row in more["rows"]]
    assert all(
        len(first & second) >= 1 and len(second) > len(first) for first, second in zip(before, after, strict=True)
    )
    assert len(more["single"]["test"]["values"]) == 3
    with pytest.raises(RunFolderError, match="only budget and seeds may change"):
        sw.tune(hopeless(), workers=8, candidates="own", resume=tmp_path / "a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0.3x"], ["--budget 0.3x is too small for one trial with 8 workers", "give at least 0.9x"]),
        (["--budget", "soon"], ["--budget must be a multiple", "20x", "30min", "'soon'"]),
        (["--budget=-3x"], ["--budget must be a multiple"]),
        (["--workers", "1,8"], ["--workers must be at least 2", "1,8"]),
        (["--workers", "many"], ["--workers needs a count"]),
        (["--seeds", "1"], ["--seeds must be at least 2", "got 1"]),
        (["--seed=-1"], ["--seed must be at least 0"]),
        (["--candidates", "muon,magic"], ["--candidates needs names out of own", "'magic'"]),
        (["--set", "samples=60"], ["tune needs validation data", "a tenth of 60 training samples"]),
        (["--resume", "nowhere"], ["nowhere must be the folder of a search"]),
        (["--out", "used"], ["--out used must be a new or empty folder"]),
        (["--out", "locked/a"], ["locked is no writable folder"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(scalewise_here, tmp_path, arguments, words):
    write_task(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o555)
    outcome = scalewise_here("tune", "mine.py", *arguments, "--quiet")
    assert outcome.code == 2, outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr.strip().splitlines()) == 1, outcome.stderr
    for word in words:
        assert word in outcome.stderr
    assert not [*tmp_path.glob("runs/*")]


def test_without_optuna_the_line_says_how_to_install_it(scalewise_here, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = scalewise_here("tune", "digits")
    assert (outcome.code, outcome.stderr) == (
        2,
        "scalewise: optuna is needed and not installed; run: pip install 'scalewise[tune]'\n",
    )


def test_tune_does_not_take_part_in_a_torchrun_job(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="without torchrun"):
        TuneRequest("digits")


BASE = Recipe(worker_batch=32, epochs=10.0, optimizer="momentum", lr=0.02, threads=1)
SAMPLES = 1294, 1437
REFERENCE = {1000: 0.95, 1001: 0.93, 1002: 0.94}
NAMES = ["muon", "momentum"]


class Landscape:
    """Instead of training: Muon needs 45 steps near a rate of 0.06, anything else 200; the seed adds a little."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.now = 0.0  # a second for 1,000 samples

    def __call__(self, title: str, jobs: list[Job]) -> list[Outcome]:
        self.jobs += jobs
        return [self._outcome(job) for job in jobs]

    def _outcome(self, job: Job) -> Outcome:
        recipe = job.line.plan.recipe
        steps = recipe.steps or 1
        result = {"samples": steps * recipe.global_batch}
        self.now += result["samples"] / 1000
        if recipe.lr > 0.5:
            return Outcome(job, recipe, None, Failure("must stay finite", 1, True), [])
        needed = 45 * (1 + abs(recipe.lr - 0.06) * 5) if recipe.optimizer == "muon" else 200
        value = 0.945 - max(0.0, needed - steps) / 300 + (job.seed - 1001) / 1000
        return Outcome(job, recipe, result | {"validation": {"accuracy": value}}, None, [])


def search(budget: float = 30.0, seed: int = 0, **allowance: float) -> tuple[Search, Landscape]:
    train = Landscape()
    limit = Allowance(samples=budget * 14_368, **allowance, clock=lambda: train.now)
    found = Search(BASE, 8, SAMPLES, NAMES, REFERENCE, Metric("accuracy", True), limit, seed)
    found.run(train)
    return found, train


@pytest.mark.parametrize("budget", [1.0, 3.0, 10.0, 30.0])
def test_the_search_keeps_to_its_budget_and_repeats(budget):
    first, trained = search(budget)
    second, again = search(budget)
    assert [job.name for job in trained.jobs] == [job.name for job in again.jobs]
    assert [trial.point for trial in first.trials] == [trial.point for trial in second.trials]
    assert 0 < first.allowance.spent <= budget * 14_368
    longer, _ = search(2 * budget)
    assert [trial.point for trial in longer.trials][:1] == [trial.point for trial in first.trials][:1]


def test_the_search_finds_fewer_steps_than_what_auto_would_try():
    found, trained = search()
    best = found.best()
    assert best is not None
    assert best.recipe.optimizer == "muon"
    assert best.recipe.steps <= 50
    tried = [trial for trial in found.trials if len(trial.values) == 3]
    assert all(found.behind(trial) <= 2 for trial in tried)  # nobody trains what is far behind on all seeds
    assert found.ranked()[0] is best
    assert {job.seed for job in trained.jobs} == set(REFERENCE)


def test_a_time_budget_starts_nothing_that_would_end_too_late():
    found, trained = search(math.inf, seconds=60.0, speed=1000.0)  # a run of 50 steps takes 13 s
    assert 40 < trained.now <= 60
    assert found.trials
    none, _ = search(math.inf, seconds=5.0, speed=1000.0)
    assert none.trials == []


@pytest.mark.parametrize("fields", [{"schedule": "growth"}, {"steps": 60}, {"lr_rule": "linear", "schedule": "step"}])
def test_any_recipe_of_one_worker_can_be_searched(fields):
    base = BASE.replace(**fields)
    for workers in (2, 32):
        found = Search(base, workers, SAMPLES, NAMES, REFERENCE, Metric("accuracy", True), Allowance(samples=60_000), 0)
        found.run(Landscape())
        assert found.trials
        assert all(trial.recipe.lr_rule == "none" and trial.recipe.schedule != "growth" for trial in found.trials)
        assert max(trial.point.share for trial in found.trials) < 20


def test_trials_start_from_what_auto_would_try():
    points = starts(NAMES, BASE, 8, 1437)
    assert [(point.optimizer, round(point.share, 2)) for point in points] == [
        ("muon", 1.0), ("muon", 1.0), ("momentum", 1.0), ("muon", 1.14),
    ]  # fmt: skip
    first, gentle, own, longer = (recipe_at(point, BASE, 8, 1437) for point in points)
    assert (first.lr, gentle.lr) == (0.08, 0.0376)
    assert (own.lr, own.lr_rule, own.steps, longer.steps) == (0.16, "none", 56, 64)
    assert first.warmup_epochs == pytest.approx(0.1 * 56 * 256 / 1437, rel=1e-4)
    assert first.weight_decay == pytest.approx(0.3 / (0.08 * 0.5 * 56), rel=0.01)
    assert chosen_optimizers(None, BASE, True) == ["muon", "momentum", "lars", "adamw"]
    assert chosen_optimizers(None, BASE.replace(optimizer="adamw"), False) == ["adamw", "lamb"]
    assert chosen_optimizers([OWN, "momentum", "lamb"], BASE, True) == ["momentum", "lamb"]


def test_while_it_runs_the_newest_trials_and_the_time_left_are_shown():
    _, trained = search(10.0)
    now = [0.0]
    view = TuneView(False, Metric("accuracy", True), 100_000, lambda: now[0])
    job = trained.jobs[0]
    trial = {
        "number": 1,
        "optimizer": "muon",
        "lr": 0.04,
        "steps": 56,
        "validation": 0.95,
        "seeds": 1,
        "outcome": "worse",
    }
    view.begin("search, 8 workers", [])
    now[0] = 10.0
    done = {"samples": 20_000, "validation": {"accuracy": 0.95}, "steps": 50, "seconds": 3.0}
    view.show(Outcome(job, None, done, None, []), [Stored(trial)])
    view.show(Progress(job, 5, 50), [Stored(trial)])
    with view.console.capture() as shown:
        view.console.print(view._screen())
    text = shown.get()
    assert "search, 8 workers; about 40.0 s left" in text
    assert f"{job.line.name}, 8 workers, seed 1000 (10 %)" in text
    assert "muon" in text
