"""The rows of the table, their statistics and their drawing, without training anything."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from scalewise.errors import Failed, RecipeError, UsageError
from scalewise.present import terminal
from scalewise.present.stored import Stored, parsed
from scalewise.present.stories.compare import comparison_story, rows_table
from scalewise.recipe import Recipe
from scalewise.runs.compare.comparison import Comparison, Metric, Remaining, curves, error_curve, grid, tuned
from scalewise.runs.compare.jobs import Failure, Job, Outcome, Progress
from scalewise.runs.compare.rows import ROWS, Facts, Line, NothingToChange, RowPlan, chosen_rows, chosen_workers, lines
from scalewise.stats.interval import paired_difference, spread
from test_views import rendered

ACCURACY = Metric("accuracy", True)
BITS = Metric("bits_per_character", False)


def facts(has_batch_norm: bool = False, takes_bn: bool = True, settings: tuple[str, ...] = (), **recipe) -> Facts:
    fields = {"worker_batch": 64, "epochs": 10.0, "optimizer": "momentum", "lr": 0.02, "threads": 1}
    return Facts(Recipe(**(fields | recipe)), settings, 1000, has_batch_norm, takes_bn)


def test_single_is_the_base_and_naive_differs_in_the_workers_alone():
    known = facts(lr_rule="linear", warmup_epochs=0.5)
    assert ROWS["single"](known, 8).recipe == known.base.replace(workers=1)
    plan = ROWS["naive"](known, 8)
    assert plan.recipe.model_dump() == known.base.model_dump() | {"workers": 8}
    assert plan.mode == "plain"


def test_batch_norm_is_added_where_the_task_can_have_it():
    plan = ROWS["batch-norm"](facts(settings=("bn=false", "dropout=0.2")), 8)
    assert plan.settings == ("dropout=0.2", "bn=true")
    assert plan.recipe == ROWS["naive"](facts(), 8).recipe


@pytest.mark.parametrize(("rows", "group"), [(512, 32), (48, 24), (100, 25), (34, 17)])
def test_batch_norm_that_is_there_gets_ghost_groups(rows, group):
    plan = ROWS["batch-norm"](facts(has_batch_norm=True, worker_batch=rows), 8)
    assert plan.recipe.batch_norm == f"ghost:{group}"
    assert plan.settings == ()


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (facts(takes_bn=False), "no batch norm"),
        (facts(has_batch_norm=True, worker_batch=32), "over 32 samples"),
        (facts(has_batch_norm=True, worker_batch=37), "over 37 samples"),
        (facts(has_batch_norm=True, worker_batch=64, micro_batch=16), "over 16 samples"),
        (facts(has_batch_norm=True, batch_norm="ghost:16"), "ghost:16 already"),
    ],
)
def test_a_row_without_anything_to_change_is_left_out_with_the_reason(known, reason):
    with pytest.raises(NothingToChange, match=reason):
        ROWS["batch-norm"](known, 8)
    found, skipped = lines(["single", "batch-norm", "lr-scaled"], [8], known, asked=True)
    assert [line.name for line in found] == ["single", "lr-scaled"]
    assert [row.name for row in skipped] == ["batch-norm"]
    assert found[1].plan.recipe.batch_norm == known.base.batch_norm


@pytest.mark.parametrize(
    ("recipe", "names", "same"),
    [
        ({"lr_rule": "linear", "warmup_epochs": 1.0}, ["naive", "lr-scaled", "warm-up"], {"warm-up": "naive"}),
        ({"lr_rule": "linear"}, ["naive", "lr-scaled", "warm-up"], {"lr-scaled": "naive"}),
        ({"optimizer": "lamb"}, ["lr-scaled", "warm-up", "lamb"], {"lamb": "warm-up"}),
        ({"optimizer": "lars", "lr_rule": "sqrt"}, ["warm-up", "lars"], {"lars": "warm-up"}),
        ({"lr_rule": "adascale"}, ["naive", "lr-scaled", "adascale"], {"adascale": "naive"}),
    ],
)
def test_a_row_that_would_repeat_another_is_left_out(recipe, names, same):
    found, skipped = lines(names, [4, 8], facts(takes_bn=False, **recipe), asked=True)
    assert {row.name: row.reason.rpartition(" ")[2] for row in skipped} == same
    assert [line.plan.recipe.lr_rule for line in found if line.name == "lr-scaled"].count("adascale") == 0


def test_rows_build_on_one_another():
    scaled = ROWS["lr-scaled"](facts(), 8)
    assert (scaled.recipe.lr_rule, scaled.recipe.warmup_epochs, scaled.settings) == ("linear", 0.0, ("bn=true",))
    assert ROWS["lr-scaled"](facts(optimizer="adam"), 8).recipe.lr_rule == "sqrt"
    warm = ROWS["warm-up"](facts(), 8)
    assert (warm.recipe.lr_rule, warm.recipe.warmup_epochs, warm.settings) == ("linear", 1.0, ("bn=true",))
    assert ROWS["warm-up"](facts(warmup_epochs=0.3), 8).recipe.warmup_epochs == 0.3
    assert ROWS["lr-scaled"](facts(lr_rule="sqrt"), 8).recipe.lr_rule == "sqrt"


def test_auto_starts_from_the_task_as_it_is():
    plan = ROWS["auto"](facts(), 8)
    assert (plan.mode, plan.settings, plan.recipe) == ("auto", (), facts().base.replace(workers=8))


def test_muon_takes_the_samples_of_single():
    plan = ROWS["muon"](facts(), 8)
    recipe = plan.recipe
    assert (recipe.optimizer, recipe.schedule, recipe.epochs, recipe.lr_rule) == ("muon", "cosine", 10.0, "none")
    assert recipe.warmup_epochs == pytest.approx(1.0, rel=0.05)
    assert recipe.total_steps(1000) == round(facts().base.total_steps(1000) / 8)
    assert plan.what == f"Muon with warm-up and a cosine, learning rate {recipe.lr:g}"


def test_a_tuned_recipe_is_a_row_at_its_own_number_of_workers():
    with pytest.raises(RecipeError, match="row tuned: no recipe was given; add --tuned FILE"):
        lines(["single", "tuned"], [8], facts(), asked=True)
    found = facts().base.replace(workers=8, optimizer="muon", lr=0.05, steps=12)
    known = dataclasses.replace(facts(threads=2), tuned=found)
    rows_found, skipped = lines(["naive", "tuned"], [4, 8], known, asked=False)
    assert [line.key for line in rows_found] == [("naive", 4), ("naive", 8), ("tuned", 8)]
    assert rows_found[-1].plan.recipe == found.replace(threads=2)
    assert not skipped
    _, skipped = lines(["naive", "tuned"], [4], known, asked=False)
    assert [(row.name, row.reason) for row in skipped] == [("tuned", "its recipe is for 8 workers")]
    assert chosen_rows(None, several=True, has_tuned=True) == ["naive", "auto", "tuned"]


def test_rows_and_workers_are_taken_in_order():
    assert chosen_rows(None, several=False) == [
        "single", "naive", "batch-norm", "lr-scaled", "warm-up", "lars", "lamb", "adascale", "auto",
    ]  # fmt: skip
    assert chosen_rows(None, several=True) == ["naive", "auto"]
    assert chosen_rows("auto,single,auto", several=False) == ["auto", "single"]
    assert chosen_workers("8") == [8]
    found, _ = lines(["single", "naive"], [2, 4], facts(), asked=True)
    assert [line.key for line in found] == [("single", 1), ("naive", 2), ("naive", 4)]


@pytest.mark.parametrize("text", ["single,naiv", "", ","])
def test_an_unknown_row_is_refused_with_the_list(text):
    with pytest.raises(UsageError, match="single, naive, batch-norm, lr-scaled, warm-up, lars, lamb, adascale, auto"):
        chosen_rows(text, several=False)


@pytest.mark.parametrize("text", ["0", "8,,4", "-1", "2,x", "", "1.5"])
def test_a_bad_list_of_workers_is_refused(text):
    with pytest.raises(UsageError, match="--workers needs a count of at least 1"):
        chosen_workers(text)


def test_a_recipe_that_cannot_be_is_left_out_unless_it_was_asked_for(monkeypatch):
    def impossible(known: Facts, workers: int) -> RowPlan:
        return RowPlan(known.base.replace(optimizer="magic"), (), "")

    monkeypatch.setitem(ROWS, "lamb", impossible)
    found, skipped = lines(["single", "lamb"], [8], facts(), asked=False)
    assert ([line.name for line in found], skipped[0].name) == (["single"], "lamb")
    assert "magic" in skipped[0].reason
    with pytest.raises(RecipeError, match="row lamb: optimizer must be"):
        lines(["single", "lamb"], [8], facts(), asked=True)


def test_spread():
    found = spread([2.0, 4.0, 4.0, 6.0])
    assert found.mean == 4.0
    assert found.std == pytest.approx(math.sqrt(8 / 3))
    assert (spread([5.0]).mean, spread([5.0]).std) == (5.0, None)
    assert (spread([]).mean, spread([]).std) == (None, None)


def test_paired_differences_by_hand():
    # differences 1, 2, 3: mean 2, deviation 1, t(0.975; 2) = 4.30265 (table), half = 4.30265 ÷ √3 = 2.48414
    found = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2.0, -0.48414, 4.48414), abs=1e-5)
    assert not found.excludes(0)
    # differences 1, 1.5, 2, 1.5, 1.5: mean 1.5, deviation √0.125, t(0.975; 4) = 2.77645, half = 0.43900
    steady = paired_difference(dict(enumerate([2, 3.5, 5, 5.5, 6.5])), dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0])))
    assert steady is not None
    assert (steady.value, steady.low, steady.high) == pytest.approx((1.5, 1.06100, 1.93900), abs=1e-5)
    assert steady.excludes(0)


def test_equal_differences_of_a_coarse_metric_prove_nothing():
    # accuracies on 20 samples: they can only differ by 0.05, and two seeds say little of the rest
    tie = paired_difference({0: 0.90, 1: 0.95}, {0: 0.95, 1: 1.0})
    assert tie is not None
    half = 12.7062 * 0.05 / math.sqrt(12) / math.sqrt(2)
    assert (tie.value, tie.low, tie.high) == pytest.approx((-0.05, -0.05 - half, -0.05 + half), abs=1e-4)
    assert not tie.excludes(0)


def test_differences_are_paired_by_seed_and_need_two():
    assert paired_difference({0: 1.0, 5: 2.0}, {0: 1.0, 1: 2.0}) is None
    assert paired_difference({}, {}) is None
    both = paired_difference({2: 1.0, 1: 5.0, 9: 100.0}, {1: 4.0, 2: 0.5, 8: 0.0})
    assert both is not None
    assert both.value == 0.75


def result(test: float, metric: str = "accuracy", **changes) -> dict:
    numbers = {"loss": 0.5, metric: test}
    return {
        "lr": {"base": 0.02, "peak": 0.16}, "steps": 56, "samples": 14336, "samples_per_second": 20304.2,
        "seconds": 2.0,
        "test": numbers, "train": {"loss": 0.4, metric: test + 0.01}, "validation": None,
        "derived": [],
    } | changes  # fmt: skip


def outcomes(line: Line, values: list[float | None], metric: str = "accuracy", **changes) -> dict[int, Outcome]:
    """One outcome a seed; None diverged."""
    found = {}
    for seed, value in enumerate(values):
        job = Job(line, seed)
        failure = Failure("the loss must stay finite, got nan at step 3", 1, True) if value is None else None
        numbers = None if value is None else result(value, metric, **changes)
        curve = [(1.0, 0.5, None), (2.0, 0.25 * seed, None)]
        found[seed] = Outcome(job, line.plan.recipe, numbers, failure, curve)
    return found


def compared(found: list[Line], ended: dict, metric: Metric) -> Comparison:
    return Comparison(found, [], metric, seeds=5, outcomes=ended)


def table(metric: Metric = ACCURACY, **values: list[float | None]) -> tuple[list[Line], dict]:
    found, _ = lines([name.replace("_", "-") for name in values], [8], facts(), asked=True)
    ended = {line.key: outcomes(line, values[line.name.replace("-", "_")], metric.name) for line in found}
    return found, ended


def test_rows_are_compared_with_single_and_failures_left_out():
    found, ended = table(
        single=[0.97, 0.98, 0.975], naive=[0.91, 0.90, 0.92], lr_scaled=[0.97, None, 0.98], warm_up=[None, None, None]
    )
    single, naive, scaled, warm = compared(found, ended, ACCURACY).rows()
    assert (single.difference, single.beats_noise) == (None, None)
    assert naive.beats_noise is True
    assert naive.difference is not None
    assert naive.difference.value == pytest.approx(-0.065)
    assert (scaled.seeds, scaled.failed[0][0], scaled.diverged) == ([0, 2], 1, False)
    assert scaled.test.values == [0.97, 0.98]
    assert (warm.diverged, warm.test.mean, warm.steps, warm.beats_noise) == (True, None, None, None)
    json = compared(found, ended, ACCURACY).document()
    assert json["rows"][3]["test"] == {"mean": None, "std": None, "values": []}
    assert json["rows"][3]["failed"][2] == {"seed": 2, "reason": "the loss must stay finite, got nan at step 3"}
    assert "curve" not in json


def test_without_single_or_with_one_seed_nothing_is_said_on_noise():
    found, ended = table(naive=[0.91, 0.90], auto=[0.98, 0.97])
    assert [row.beats_noise for row in compared(found, ended, ACCURACY).rows()] == [None, None]
    found, ended = table(single=[0.98], naive=[0.90])
    assert [row.beats_noise for row in compared(found, ended, ACCURACY).rows()] == [None, None]


def test_curves_are_means_over_seeds_that_have_a_result():
    found, ended = table(single=[0.9, 0.9, None])
    assert curves(found, ended) == [
        {"name": "single", "workers": 1, "epoch": [1.0, 2.0], "train": [0.5, 0.125], "validation": None}
    ]


def test_error_against_global_batch():
    found, _ = lines(["naive"], [1, 2], facts(), asked=True)
    ended = {line.key: outcomes(line, [0.9, 0.8]) for line in found}
    ((name, points),) = (row.values() for row in error_curve(compared(found, ended, ACCURACY).rows(), ACCURACY))
    assert name == "naive"
    assert [(point["workers"], point["global_batch"]) for point in points] == [(1, 64), (2, 128)]
    assert points[0]["error"] == pytest.approx(0.15)
    assert [row.difference is None for row in compared(found, ended, ACCURACY).rows()] == [
        True,
        False,
    ]  # naive with 1 is single
    assert compared(found, ended, ACCURACY).document()["curve"][0]["points"][1]["global_batch"] == 128


def test_the_grid_of_learning_rates():
    assert grid(1) == [1.0]
    assert grid(2) == pytest.approx([1.0, 3.1623], rel=1e-4)
    assert grid(5) == pytest.approx([0.1, 0.31623, 1.0, 3.1623, 10.0], rel=1e-4)
    line = lines(["naive"], [8], facts(), asked=True)[0][0]
    assert [job.name for job in Comparison([line], [], ACCURACY, seeds=5, budget=3).trial_jobs()] == [
        "tune-naive-8w-x0.316",
        "tune-naive-8w-x1",
        "tune-naive-8w-x3.16",
    ]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        (ACCURACY, {0.1: 0.7, 1.0: 0.8, 10.0: 0.9}, 10.0),
        (BITS, {0.1: 0.7, 1.0: 0.8, 10.0: 0.9}, 0.1),
        (ACCURACY, {0.1: 0.9, 1.0: 0.9, 10.0: 0.9}, 1.0),
        (ACCURACY, {0.1: 0.2, 1.0: None, 10.0: None}, 0.1),
        (ACCURACY, {0.1: None, 1.0: None}, 1.0),
    ],
)
def test_the_best_learning_rate_is_chosen_on_validation_data(metric, values, best):
    line = lines(["naive"], [8], facts(), asked=True)[0][0]
    ended = {
        multiple: outcomes(line, [None if value is None else 1 - value], metric.name, validation={metric.name: value})[
            0
        ]
        for multiple, value in values.items()
    }
    assert tuned(line, ended, metric).multiple == best


def test_what_ends_a_comparison_and_what_does_not():
    found, ended = table(single=[0.9, None])
    job = Job(found[0], 0)
    killed = Outcome(job, None, None, Failure("process 1 was killed by SIGKILL", 1, False), [])
    mistake = Outcome(job, None, None, Failure("labels must be", 2, False), [])
    comparison = Comparison(found, [], ACCURACY, 2)
    comparison.take(ended["single", 1][1])  # diverged: a finding
    with pytest.raises(Failed, match="single, 1 worker, seed 0: process 1 was killed"):
        comparison.take(killed)  # before any result: it would meet them all
    comparison.take(ended["single", 1][0])
    comparison.take(killed)
    assert [failure.diverged for failure in comparison.failures()] == [True, False]
    with pytest.raises(Failed) as raised:
        comparison.take(mistake)
    assert raised.value.exit_code == 2


def test_the_time_that_is_left():
    now = 100.0
    found, _ = lines(["single", "naive"], [8], facts(), asked=True)
    jobs = [Job(line, seed) for seed in range(2) for line in found]
    remaining = Remaining(jobs, 2, clock=lambda: now)
    assert remaining.seconds() is None
    remaining.observe(Progress(jobs[0], 10, 110))
    assert remaining.seconds() is None
    now = 105.0
    remaining.observe(Progress(jobs[0], 60, 110))  # 5 of 10 seconds; three more like it wait
    assert remaining.seconds() == pytest.approx((5 + 3 * 10) / 2)
    for job in jobs[:2]:
        remaining.observe(Outcome(job, None, result(0.9), None, []))
    assert remaining.seconds() == pytest.approx((2 + 2) / 2)
    remaining.observe(Outcome(jobs[2], None, None, Failure("", 1, True), []))
    remaining.observe(Outcome(jobs[3], None, result(0.9), None, [], stored=True))
    assert remaining.seconds() == 0.0


def story(found: list[Line], ended: dict, metric: Metric = ACCURACY, seeds: int = 3):
    content = {"task": "digits", "workers": [8], "seeds": [*range(seeds)], "jobs": 2, "seconds": 75.0}
    return comparison_story(parsed(json.dumps(content | compared(found, ended, metric).document()).encode()))


def sample() -> tuple[list[Line], dict]:
    return table(single=[0.97, 0.98, 0.975], naive=[0.91, 0.90, 0.92], lr_scaled=[0.97, None, 0.98], warm_up=[None] * 3)


def test_the_story_at_a_fixed_width():
    assert terminal.text(story(*sample()), 108) == GOLDEN
    narrow = terminal.text(story(*sample()), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert "samples  " in narrow
    assert "global" not in narrow


def test_the_live_table_counts_the_seeds_that_have_ended():
    found, ended = sample()
    stored = [Stored(row.to_json()) for row in compared(found, ended, ACCURACY).rows()]
    live = rows_table(stored, "accuracy", several=False, higher=True, seeds=5)
    assert [line.split()[-1] for line in rendered(terminal.table_view(live, 100), 100).splitlines()[2:]] == ["3/5"] * 4


def test_without_several_seeds_or_a_reference_the_story_says_what_is_missing():
    found, ended = table(single=[0.97], naive=[0.91])
    told = story(found, ended, seeds=1)
    assert told.answer == "One seed says nothing about noise: give --seeds 2 or more."
    assert "against single" not in terminal.text(told)
    found, ended = table(naive=[0.91, 0.9], auto=[0.91, 0.9])
    assert story(found, ended, seeds=2).answer == "There is nothing to compare with: add single to --rows."


def test_lower_is_better_where_the_metric_says_so():
    found, ended = table(BITS, single=[2.4, 2.5, 2.45], naive=[2.6, 2.72, 2.66], auto=[2.2, 2.31, 2.25])
    told = story(found, ended, BITS)
    assert told.answer == ("Worse than one worker, beyond seed noise: naive (+0.21). Better: auto (−0.197).")
    against = [cell for row in told.sections[0].blocks[1].rows for cell in row[-1:]]
    assert [(cell.text, cell.tone) for cell in against[1:]] == [
        ("+0.21 (+0.185 to +0.235)", "bad"),
        ("−0.197 (−0.211 to −0.182)", "good"),
    ]
    assert "2.45 ± 0.05" in terminal.text(told, 100)


def test_error_against_global_batch_is_drawn():
    found, _ = lines(["naive", "auto"], [1, 2, 4], facts(), asked=True)
    errors = {
        ("naive", 1): 0.1,
        ("naive", 2): 0.2,
        ("naive", 4): 0.5,
        ("auto", 1): 0.1,
        ("auto", 2): 0.12,
        ("auto", 4): 0.3,
    }
    ended = {line.key: outcomes(line, [1 - errors[line.key]]) for line in found}
    told = story(found, ended)
    (section,) = [section for section in told.sections if section.title == "Test error against global batch"]
    assert rendered(terminal.section_view(section, 100), 100) == CHART


GOLDEN = """\
How much do 8 workers cost on digits, and which remedy brings it back?
Worse than one worker, beyond seed noise: naive (−6.50 points). Cannot be told from one worker: lr-scaled.

task  digits
rows  4  3 seeds each
time  1 min 15 s  2 runs at a time

The remedies
           global  peak                                                          against single, in
row         batch    LR  steps  samples   test accuracy    train  samples/s                  points
single         64  0.16     56   14,336  97.50 ± 0.50 %  98.50 %     20,304
naive         512  0.16     56   14,336  91.00 ± 1.00 %  92.00 %     20,304  −6.50 (−9.79 to −3.21)
lr-scaled     512  0.16     56   14,336  97.50 ± 0.71 %  98.50 %     20,304  +0.25 (−2.93 to +3.43)
warm-up       512  0.16      –        –        diverged        –          –
± standard deviation over seeds; against single: mean difference by seed and its 95 % interval
lr-scaled has no result with seed 1: the loss must stay finite, got nan at step 3
warm-up has no result with seed 0: the loss must stay finite, got nan at step 3
warm-up has no result with seed 1: the loss must stay finite, got nan at step 3
warm-up has no result with seed 2: the loss must stay finite, got nan at step 3"""
CHART = """\
Test error against global batch
 50.00 % │                                                     ●
         │
         │
         │
 30.00 % │                                                     ○
         │
         │                            ●
         │
 10.00 % │   ○                        ○
         └──────────────────────────────────────────────────────────
            64                       128                      256
           ● naive   ○ auto"""
