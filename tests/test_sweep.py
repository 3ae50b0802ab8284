"""The critical batch measured by training: curves, rates, the sweep and the branches on digits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import signal

import numpy as np
import pytest
import torch

import scalewise as sw
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.engine.processes.signals import Stop
from scalewise.errors import Interrupted, RunFolderError, TargetMissed, UsageError
from scalewise.recipe import Recipe
from scalewise.runs.measure.critical import rates
from scalewise.runs.measure.critical.branch import (
    BranchReport,
    Plan,
    branch,
    largest_harmless,
    single,
    sure_bounds,
    tolerance,
)
from scalewise.runs.measure.critical.sweep import (
    MEDIAN_ERROR,
    SweepReport,
    at_global_batch,
    constant_rate,
    default_ladder,
    fitting_seeds,
    fitting_target,
    median_error,
    sweep,
    training_samples,
)
from scalewise.runs.measure.critical.trials import (
    Curve,
    Laboratory,
    Point,
    Trial,
    crossing,
    evaluation_steps,
    follow,
    stored,
)


def power_law(step: int) -> float:
    return 3.0 * step**-0.5


def test_a_crossing_is_found_between_evaluations():
    points = [Point(step, power_law(step)) for step in evaluation_steps(expected=400, last=800)]
    assert crossing(points, power_law(400)) == pytest.approx(400, rel=0.01)
    assert crossing(points, power_law(10_000)) is None


def test_noise_is_averaged_before_the_crossing():
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        noise = torch.randn(200, generator=generator).tolist()
        points = [Point(step, power_law(step) * (1 + 0.05 * noise[number]))
                  for number, step in enumerate(evaluation_steps(expected=400, last=1000))]  # fmt: skip
        found.append(crossing(points, power_law(400)))
    mean = math.exp(sum(math.log(steps) for steps in found) / len(found))
    assert mean == pytest.approx(400, rel=0.05)  # the first of the raw evaluations below it lies at 0.86 of that


def test_evaluations_are_dense_where_the_target_is_expected():
    steps = evaluation_steps(expected=1000, last=1500)
    assert steps[-1] == 1500
    assert len(steps) < 60
    assert all(later / earlier <= 1.06 for earlier, later in itertools.pairwise(steps) if earlier >= 250)


def test_the_rate_is_found_between_and_beyond_those_tried():
    def tried(rate: float) -> rates.Tried:  # least at 0.3
        steps = 100 * math.exp(math.log(rate / 0.3) ** 2) if rate < 0.9 else None
        return rates.judged([steps, steps], budget=300)

    for suggested in (0.03, 0.1, 0.2, 0.5):
        found = {rate: tried(rate) for rate in rates.first_rates(suggested)}
        found |= {rate: tried(rate) for rate in rates.next_rates(found)}
        assert len(found) == 6
        assert rates.chosen(found) == pytest.approx(0.3, rel=0.05)
        assert min(found) < rates.chosen(found) < max(found)  # one beyond would not be better


def test_a_rate_at_the_edge_of_what_is_stable_is_not_chosen():
    steps = {0.1: 80.0, 0.2: 60.0, 0.283: 55.0, 0.4: 52.0}
    found = {rate: rates.judged([value, value], budget=150) for rate, value in steps.items()}
    found[0.566] = rates.judged([52.0, None], budget=150)  # half of the runs fail
    found[0.8] = rates.judged([None, None], budget=150)
    assert rates.fastest(found) == 0.4
    assert 0.25 < rates.chosen(found) < 0.4
    assert rates.chosen({0.1: rates.judged([None], 50)}) is None


def test_larger_global_batches_are_more_workers_of_the_same_batch():
    base = constant_rate(Recipe(worker_batch=32, schedule="cosine", warmup_epochs=1.0, workers=4, lr_rule="linear"))
    assert (base.workers, base.schedule, base.warmup_epochs, base.lr_rule) == (1, "constant", 0.0, "none")
    assert at_global_batch(base, 128).workers == 4
    assert at_global_batch(base, 16).worker_batch == 16
    digits = sw.load_task("digits")
    assert default_ladder(digits, digits.recipe) == [8, 16, 32, 64, 128]
    normalized = sw.load_task("digits", ["bn=true"])
    assert default_ladder(normalized, normalized.recipe)[0] == 32
    assert training_samples(digits) == 1437 - 143


def quick(folder, recipe=None, **changes) -> SweepReport:
    """A sweep of digits that takes seconds."""
    task = sw.load_task("digits")
    settings = {"target": 0.6, "seeds": 1, "most_seeds": 1, "tuning_seeds": 1, "global_batches": [8, 16, 24, 32]}
    return sweep(task, recipe or task.recipe, jobs=1, folder=folder, **(settings | changes))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    lines: list[str] = []
    return quick(folder, notify=lines.append), folder, lines


def test_a_sweep_measures_steps_and_fits_the_law(swept):
    report, _, lines = swept
    assert [rung.global_batch for rung in report.rungs] == [8, 16, 24, 32]
    medians = [rung.median_steps for rung in report.rungs]
    assert medians[0] > medians[1] > medians[-1]
    samples = [steps * rung.global_batch for steps, rung in zip(medians, report.rungs, strict=True)]
    assert samples[-1] > samples[0]
    for rung in report.rungs:
        assert len(rung.tried) == 6  # the same budget for all
        assert rung.global_batch == rung.workers * rung.worker_batch
        assert rung.worker_batch == min(32, rung.global_batch)
    assert report.critical.method == "sweep"
    assert report.critical.low <= report.critical.value
    assert [row.global_batch for row in report.held_out] == [16, 24]
    assert json.loads(json.dumps(report.to_json()))["target_loss"] == 0.6
    assert any("global batch 32" in line for line in lines)


def test_a_repeated_sweep_reads_its_trials(swept, monkeypatch):
    report, folder, _ = swept
    monkeypatch.setattr(Training, "records", None)  # nothing is trained
    assert quick(folder) == report


def test_seeds_are_added_until_the_median_is_known(swept, tmp_path):
    report, folder, _ = swept
    shutil.copytree(folder, tmp_path / "more")
    more = quick(tmp_path / "more", seeds=2, most_seeds=7, global_batches=[8, 16, 24])
    first, before = more.rungs[0], report.rungs[0]
    assert (first.lr, first.steps[0]) == (before.lr, before.steps[0])  # what was trained stays
    for rung in more.rungs:
        assert len(rung.steps) == 7 or (2 <= len(rung.steps) < 7 and rung.median_error <= MEDIAN_ERROR)
    assert any(len(rung.steps) > 2 for rung in more.rungs)
    poor = [rung for rung in more.rungs if rung.median_error > 0.05]
    assert len([note for note in more.notes if "--most-seeds" in note]) == len(poor)


@pytest.mark.parametrize("scatter", [0.05, 0.1, 0.2])
def test_the_error_of_a_median_is_that_of_repeated_experiments(scatter):
    generator = np.random.Generator(np.random.PCG64(0))
    draws = 40 * np.exp(scatter * generator.standard_normal((4000, 31)))
    seen = np.log(np.median(draws, axis=1)).std()
    said = np.mean([median_error(list(row)) for row in draws])
    assert said == pytest.approx(seen, rel=0.05)


def test_runs_that_did_not_arrive_count_in_the_error():
    steps = [100.0 + number for number in range(8)]
    assert median_error([*steps, *[None] * 7]) == math.inf  # one more and the median is infinite
    assert median_error([*steps, None]) > median_error(steps)
    assert fitting_seeds([*steps, *[None] * 7]) == 30


@pytest.mark.parametrize("shift", [0.0, 20_000.0, -3.0])
def test_a_constant_in_the_loss_does_not_move_the_target_beyond_the_start(shift):
    points = tuple(Point(step, shift + 2.3 * step**-0.5) for step in range(1, 400))
    target = fitting_target(Curve(points, "budget"))
    assert target - shift == pytest.approx(2.3 - 0.9 * (2.3 - 2.3 / 20), abs=0.05)


def test_a_worker_that_learns_nothing_is_said(tmp_path):
    task = sw.load_task("digits")
    with pytest.raises(TargetMissed, match="must learn something at its own learning rate"):
        sweep(task, task.recipe.replace(epochs=0.2, lr=1e-12), jobs=1, folder=tmp_path)


def test_added_seeds_bring_the_error_to_where_it_should_be():
    generator = np.random.Generator(np.random.PCG64(0))
    for scatter, expected in ((0.02, 5), (0.1, 28), (0.2, 88)):  # (1.25 · scatter ÷ 0.03)², and more for luck
        counts = []
        for _ in range(200):
            steps = list(40 * np.exp(scatter * generator.standard_normal(5)))
            while (wanted := fitting_seeds(steps)) > len(steps):
                steps += list(40 * np.exp(scatter * generator.standard_normal(wanted - len(steps))))
            assert median_error(steps) <= MEDIAN_ERROR
            counts.append(len(steps))
        assert np.median(counts) == pytest.approx(expected, rel=0.15)
        assert np.quantile(counts, 0.02) >= expected / 3  # hardly one is stopped by luck


def test_a_folder_of_another_recipe_is_refused(swept):
    _, folder, _ = swept
    with pytest.raises(RunFolderError, match="use a new folder"):
        quick(folder, sw.load_task("digits").recipe.replace(momentum=0.5))


def test_a_target_never_reached_says_the_best_loss(tmp_path):
    short = sw.load_task("digits").recipe.replace(epochs=0.5)
    with pytest.raises(TargetMissed, match=r"0\.001 .* best loss of any trial was [0-9.]+") as caught:
        quick(tmp_path, short, target=0.001, global_batches=[64, 128, 256])
    assert caught.value.exit_code == 3


def test_a_target_above_the_start_is_refused(tmp_path):
    task = sw.load_task("digits")
    with pytest.raises(UsageError, match="must be below the validation loss at the start"):
        sweep(task, task.recipe, jobs=1, folder=tmp_path, target=5.0)


@pytest.mark.parametrize("batches", [[32, 64], [32, 64, 100], [0, 32, 64]])
def test_a_ladder_that_cannot_be_is_refused(tmp_path, batches):
    task = sw.load_task("digits")
    with pytest.raises(UsageError):
        sweep(task, task.recipe, jobs=1, folder=tmp_path, global_batches=batches)


def trial(**changes) -> Trial:
    recipe = constant_rate(sw.load_task("digits").recipe).replace(workers=2, steps=40)
    return Trial("some", recipe, evaluation_steps(20, 40), 40, **changes)


def test_an_interrupted_trial_goes_on_to_the_same_curve(tmp_path):
    task = sw.load_task("digits")
    (tmp_path / "whole").mkdir()
    whole = follow(task, trial(), tmp_path / "whole", Stop())
    (tmp_path / "parts").mkdir()
    for _ in range(5):  # one step each
        with pytest.raises(Interrupted):
            follow(task, trial(), tmp_path / "parts", Stop(signal.SIGTERM))
    assert stored(trial(), tmp_path / "parts") is None
    assert follow(task, trial(), tmp_path / "parts", Stop()) == whole
    assert stored(trial(), tmp_path / "parts") == whole


def test_processes_find_what_one_finds(tmp_path):
    task = sw.load_task("digits")
    trials = [
        dataclasses.replace(trial(), name=f"t{seed}", recipe=trial().recipe.replace(seed=seed)) for seed in (1, 2)
    ]
    with Laboratory(task, tmp_path / "here", 1) as here:
        alone = here.curves(trials)
    with Laboratory(task, tmp_path / "pool", 2) as pool:
        assert pool.curves(trials) == alone
    assert alone[0] != alone[1]


def test_a_rate_that_diverges_is_a_finding(tmp_path):
    task = sw.load_task("digits")
    wild = dataclasses.replace(trial(), recipe=trial().recipe.replace(lr=1e30))
    (tmp_path / "t").mkdir()
    assert follow(task, wild, tmp_path / "t", Stop()).ended == "diverged"


@pytest.fixture(scope="module")
def branched(tmp_path_factory) -> tuple[BranchReport, Plan]:
    task = sw.load_task("digits")
    recipe = task.recipe.replace(epochs=4.0)
    report = branch(task, recipe, jobs=1, folder=tmp_path_factory.mktemp("branch"), seeds=1)
    return report, Plan.of(single(recipe), training_samples(task))


def test_branches_begin_at_three_points_and_see_the_same_samples(branched):
    report, plan = branched
    assert [stage.name for stage in report.stages] == ["start", "middle", "end"]
    for stage in report.stages:
        assert stage.samples == stage.step * report.worker_batch
        assert set(stage.losses) == set(plan.counts)
        assert stage.critical.low <= stage.harmless * report.worker_batch
        for workers in plan.counts:
            one = plan.branch(stage.samples, workers, 0)
            assert one.last * workers * report.worker_batch == stage.samples + plan.length
    assert report.critical.method == "branch"
    assert json.loads(json.dumps(report.to_json()))["stages"][0]["losses"][0]["workers"] == 1


def test_the_branch_of_one_worker_is_the_run_itself(branched):
    report, plan = branched
    task = sw.load_task("digits")
    stage = report.stages[1]
    one = plan.branch(stage.samples, 1, 0)
    losses = []
    with Training(task, plan.recipe, Placement(), pause_every=1, hold_out=True) as training:
        for record in training.records():
            if isinstance(record, sw.Step) and record.step in one.evaluations:
                losses.append(training.validate()["loss"])
            if training.progress.step == one.last:
                break
    assert stage.losses[1] == pytest.approx(sum(losses) / 3, rel=1e-12)


def test_the_largest_harmless_number_of_workers():
    assert largest_harmless({1: 1.5, 2: 1.505, 4: 1.52, 8: 1.6}) == 2
    assert largest_harmless({1: 1.5, 2: 1.4, 4: 1.409, 8: 1.42}) == 4
    assert largest_harmless({1: 0.5, 2: None}) == 1
    assert largest_harmless({1: 0.5, 2: 0.5, 4: 0.5}) == 4


def test_bounds_of_branches_hold_what_seeds_do():
    random = np.random.default_rng(0)

    def branches(scatter: float, seeds: int) -> dict[int, list[float] | None]:
        rises = {1: 0.0, 2: 0.001, 4: 0.004, 8: 0.05, 16: 0.4}
        return {
            workers: list(2.0 + rise + scatter * random.standard_normal(seeds)) for workers, rise in rises.items()
        } | {32: None}

    assert sure_bounds(branches(1e-5, 5)) == (4, 8)
    low, high = sure_bounds(branches(0.06, 3))  # a spread of six times the tolerance
    assert low == 1
    assert high in (16, 32)
    assert sure_bounds({1: [2.0], 2: [2.005], 4: [2.1]}) == (2, 4)  # of one seed what was seen
    assert sure_bounds({1: [2.0], 2: [1.9]}) == (2, None)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-9])
def test_harm_is_a_share_of_a_small_loss_whatever_its_scale(scale):
    losses = {workers: scale * loss for workers, loss in {1: 0.8, 2: 0.805, 4: 0.82, 8: 1.3}.items()}
    assert tolerance(losses) == pytest.approx(0.008 * scale)
    assert largest_harmless(losses) == 2


def test_a_loss_of_one_or_more_may_rise_by_the_papers_hundredth():
    assert tolerance({1: 3.1, 2: 3.0, 4: None}) == 0.01
    assert tolerance({1: 0.0, 2: 1.0}) == 0
    assert tolerance({1: None}) == 0.01


def test_branches_need_room(tmp_path):
    task = sw.load_task("digits")
    with pytest.raises(UsageError, match="64 steps or more"):
        branch(task, task.recipe.replace(epochs=0.5), folder=tmp_path)
