"""The screen of a measurement, rendered at a fixed width and compared as text."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from scalewise.cli import measure_view as view
from scalewise.present.stored import Stored
from scalewise.present.stories.measure import answer, critical_section, memory_section
from scalewise.recipe import Recipe
from scalewise.runs.measure.critical.branch import BranchReport, Stage
from scalewise.runs.measure.critical.rates import Tried
from scalewise.runs.measure.critical.sweep import Rung, SweepReport
from scalewise.runs.measure.measurement import Measurement, Minimum
from scalewise.runs.measure.memory.largest import MemoryReport, Part
from scalewise.runs.measure.minima.landscape import Line, LinePoint
from scalewise.runs.measure.minima.sharpness import Sharpness, SharpnessReport
from scalewise.runs.measure.noise import LayerNoise, NoiseReport, StageNoise
from scalewise.runs.measure.throughput import ThroughputReport
from scalewise.stats.critical_batch import CriticalBatch, fit_law, held_out_one_by_one
from scalewise.stats.noise_scale import NoiseEstimate
from scalewise.stats.timing import Knee, Rate
from test_views import rendered

NOISE = NoiseEstimate(1300.0, 1050.0, 1700.0, enough=True)


def noise(average: NoiseEstimate = NOISE, preconditioned: NoiseEstimate | None = None) -> NoiseReport:
    stages = tuple(
        StageNoise(name, step, 2048, NoiseEstimate(value, value * 0.8, value * 1.3, True), preconditioned)
        for name, step, value in (("start", 0, 400.0), ("middle", 500, 1200.0), ("end", 1000, 2400.0))
    )
    return NoiseReport(average, preconditioned, stages, (), 1000, 16)


def memory(**changes: object) -> MemoryReport:
    values = {
        "largest_worker_batch": 2048, "limited_by": "memory", "device": "cpu", "budget_bytes": 4_000_000_000,
        "budget_source": "given", "processes": 1, "process_bytes": 4_000_000_000, "counts": "all",
        "baseline_bytes": 300_000_000, "bytes_per_sample": 1_600_000.0,
        "parts": (Part("weights", 1_000_000), Part("activations", 3_200_000_000)),
        "predicted_peak_bytes": 3_400_000_000, "measured_peak_bytes": 3_500_000_000,
        "smallest_that_does_not_fit": 2100, "trials": (),
    }  # fmt: skip
    return MemoryReport(**(values | changes))


def throughput(knee: int = 256) -> ThroughputReport:
    rows = tuple(Rate(batch, speed, speed * 0.9, speed * 1.1, 9) for batch, speed in ((128, 500.0), (256, 1000.0)))
    return ThroughputReport(rows, knee, Knee(knee, knee, knee), 256, rows, 2e6, 1e11, 0.02, "cpu", 2)


def measurement(**changes: object) -> Measurement:
    parts = {"noise": noise(), "memory": memory(), "throughput": throughput()}
    return Measurement("digits", Recipe(workers=8, worker_batch=128), **(parts | changes))


def test_the_sentence_says_what_to_act_on():
    branches = BranchReport(
        128, 4096, 3, [Stage("start", 10, 1280, 0.1, {8: 0.5}, 8, CriticalBatch(900.0, 450.0, 1800.0, "branch"))]
    )
    assert view.sentence(measurement(verified=branches)) == (
        "noise scale 1,300 (1,050–1,700); critical batch ≈ 900 by branch; at 8 × 128 each sample is worth 47 %; "
        "largest worker batch that fits 2,048; best throughput from 256, the largest tried"
    )
    assert view.sentence(measurement(throughput=throughput(knee=128))).endswith("best throughput from 128")
    doubling, wide = (dataclasses.replace(throughput(128), knee_interval=Knee(128, low, 256)) for low in (128, 64))
    assert view.sentence(measurement(throughput=doubling)).endswith("best throughput from 128")
    assert view.sentence(measurement(throughput=wide)).endswith("best throughput from 128 (64–256)")
    assert "all 1,437 training samples fit at once" in view.sentence(
        measurement(memory=memory(largest_worker_batch=1437, limited_by="data"))
    )


def test_a_noise_scale_that_is_not_enough_says_what_is_missing():
    unknown = NoiseEstimate(900.0, 300.0, None, enough=False, more_steps=40)
    shown = rendered(view.screen(measurement(noise=noise(unknown)), 90))
    assert "noise scale 900 (300–∞); critical batch ≈ 900" in shown
    assert "noise scale: not enough: about 40 more steps" in shown
    nothing = NoiseEstimate(None, None, None, enough=False, problem="the workers' gradients are identical")
    shown = rendered(view.screen(measurement(noise=noise(nothing)), 90))
    assert "noise scale not known; largest worker batch" in shown
    assert "noise scale: the workers' gradients are identical" in shown
    assert "what more workers bring" not in shown


def test_tables():
    assert rendered(view.noise_table(noise(preconditioned=NOISE))) == (
        "noise scale over training\n"
        "          step       samples (95 %)       preconditioned\n"
        "start        0        400 (320–520)  1,300 (1,050–1,700)\n"
        "middle     500    1,200 (960–1,560)  1,300 (1,050–1,700)\n"
        "end      1,000  2,400 (1,920–3,120)  1,300 (1,050–1,700)\n"
        "average         1,300 (1,050–1,700)  1,300 (1,050–1,700)"
    )
    assert rendered(view.efficiency_table(measurement().efficiencies[2:4], own=8)) == (
        "what more workers bring\n"
        "workers  global batch    sample worth   steps  samples\n"
        "4                 512  72 % (67–77 %)  × 0.32    × 1.3\n"
        "8               1,024  56 % (51–62 %)   × 0.2    × 1.6"
    )
    assert rendered(view.throughput_table(throughput())) == (
        "throughput of one worker, cpu, 2 threads\n"
        "worker batch  samples/s                            inference\n"
        "128                 500  ████████████                    500\n"
        "256               1,000  ████████████████████████      1,000"
    )
    assert rendered(view.memory_lines(memory())) == (
        "memory at worker batch 2,048\n"
        "300 MB before training, weights 1 MB, activations 3.2 GB\n"
        "peak 3.7 GB predicted, 3.8 GB measured, of 4 GB (given)"
    )


def test_memory_that_leaves_loaders_out_says_so():
    read = memory(loaders=2)
    assert "largest worker batch that fits 2,048 with --loaders 0;" in view.sentence(measurement(memory=read))
    assert rendered(view.memory_lines(read), width=130).splitlines()[-1] == (
        "with --loaders 0; the 2 loader processes that training has by default come on top, with the batches they read "
        "ahead"
    )
    lead = memory_section(Stored(json.loads(json.dumps(measurement(memory=read).to_json())))).lead
    assert lead.endswith("With --loaders 0: 2 loader processes come on top.")


def test_tables_stand_side_by_side_where_there_is_room():
    narrow, wide = (rendered(view.screen(measurement(), width), width).splitlines() for width in (80, 110))
    assert any(line.startswith("noise scale over training  ") and "what more workers bring" in line for line in wide)
    assert "noise scale over training" in narrow
    assert "what more workers bring" in narrow
    assert not any("…" in line for line in [*narrow, *wide])
    assert max(len(narrow), len(wide)) <= 40  # one screen


def test_the_layers_that_are_shown_are_the_noisiest():
    layers = tuple(LayerNoise(f"layer{n}", NoiseEstimate(n + 1.0, n + 0.5, n + 2.0, True)) for n in range(20))
    adam = rendered(view.layers_table(NoiseReport(NOISE, NOISE, (), layers, 10, 16)))
    assert adam.startswith("noise scale by layer, of plain gradients")
    shown = rendered(view.layers_table(NoiseReport(NOISE, None, (), layers, 10, 16)))
    assert "the 12 largest of 20" in shown
    assert "layer19" in shown
    assert "layer3 " not in shown


@pytest.mark.parametrize(("critical", "word"), [(200, "they disagree"), (1400, "they agree")])
def test_cheap_and_direct_are_shown_together(critical, word):
    steps = {batch: 50 * (1 + critical / batch) * (1.02 if batch == 128 else 1) for batch in (32, 64, 128, 256, 512)}
    rungs = [
        Rung(batch, 1, batch, 0.1, {0.1: Tried(count, 1, 1)}, [0.9 * count, count, 1.1 * count])
        for batch, count in steps.items()
    ]
    law = fit_law(steps.items())
    report = SweepReport(0.123, 3, rungs, law, held_out_one_by_one([*steps.items()]), ["a doubt about one of them"])
    found = measurement(verified=report)
    shown = rendered(view.screen(found, 90), width=90)
    assert "steps to validation loss 0.123, median of seeds and its standard error" in shown
    (row,) = [line.split() for line in shown.splitlines() if re.match(r"\s*128 ", line) and "±" in line]
    assert row[2] == "3"
    assert row[4:6] == ["±", "7%"]  # 1.25 · 0.1 ÷ √3
    assert row[-2] == "(-2%)"  # without it the others lie on the law
    assert f"cheap and direct: {word}" in shown
    assert "a doubt about one of them" in shown
    assert f"critical batch ≈ {view.rough(law.critical.value)} by sweep;" in " ".join(shown.split())
    document = found.to_json()
    assert document["critical_batch"]["method"] == "sweep"
    assert document["verified"]["critical_batch"] == document["critical_batch"]
    assert document["verified"]["cheap"]["method"] == "noise scale"
    assert document["verified"]["agreement"].startswith(word)


def checked(direct: CriticalBatch, value: float = 159.0) -> Measurement:
    """A noise scale, with what branches or a sweep found beside it."""
    estimate = NoiseEstimate(value, 0.9 * value, 1.1 * value, enough=True)
    stage = Stage("start", 10, 1280, 0.1, {1: 0.5, 8: 0.5}, 8, direct)
    report = BranchReport(32, 4096, 3, [stage])
    if direct.method == "sweep":
        law = dataclasses.replace(fit_law([(8, 100.0), (16, 80.0), (32, 70.0)]), critical=direct)
        report = SweepReport(0.5, 1, [], law, [], [])
    recipe = Recipe(workers=8, worker_batch=32)
    return Measurement("digits", recipe, noise=noise(estimate), verified=report)


def test_a_lower_bound_found_by_training_wins_over_a_noise_scale_below_it():
    found = checked(CriticalBatch(None, 1024.0, None, "branch"))
    assert view.sentence(found) == (
        "noise scale 159 (143–175); critical batch at least 1,024 by branch; at 8 × 32 each sample is worth "
        "at least 80 %"
    )
    document = found.to_json()
    assert document["critical_batch"] == {"value": None, "low": 1024.0, "high": None, "method": "branch"}
    assert "trust the branch" in document["verified"]["agreement"]
    (own,) = [row for row in document["efficiency"] if row["workers"] == 8]
    assert (own["worth"], own["low"], own["high"], own["steps"]) == (None, 0.8, 1.0, None)
    shown = rendered(view.efficiency_table(found.efficiencies, own=8)).splitlines()
    assert shown[5].split() == ["8", "256", "at", "least", "80", "%", "?", "?"]
    page = Stored(document)
    assert answer(page) == (
        "Up to at least 32 workers of 32 each sample is worth at least half: the critical batch by branch is at least "
        "1,024. At 8 workers it is worth at least 80 %."
    )
    assert critical_section(page).blocks == (document["verified"]["agreement"].capitalize() + ".",)


def test_a_noise_scale_above_the_lower_bound_is_gone_by_and_named():
    found = checked(CriticalBatch(None, 1024.0, None, "branch"), value=1300.0)
    assert "critical batch ≈ 1,300 by noise scale (branch: at least 1,024); at 8" in view.sentence(found)
    assert found.to_json()["critical_batch"]["method"] == "noise scale"


def test_a_sweep_that_bounds_nothing_leaves_the_noise_scale_to_go_by():
    found = checked(CriticalBatch(13.0, 0.0, None, "sweep"))
    assert "critical batch ≈ 159 by noise scale (not bounded by the sweep); at 8" in view.sentence(found)
    assert found.to_json()["critical_batch"]["method"] == "noise scale"


def test_a_sweep_whose_steps_do_not_fall_gives_an_upper_bound():
    found = checked(CriticalBatch(0.0, 0.0, 32.0, "sweep"))
    assert "critical batch at most 32 by sweep; at 8 × 32 each sample is worth at most 11 %" in view.sentence(found)


def test_branches_show_the_tolerance_and_losses_that_differ_by_it():
    losses = {1: 0.001234, 2: 0.001239, 4: 0.00195}
    stage = Stage("start", 10, 1280, 0.1, losses, 2, CriticalBatch(256.0, 256.0, 512.0, "branch"))
    shown = rendered(view.branch_table(BranchReport(128, 4096, 3, [stage])))
    assert shown == (
        "validation loss after 4,096 more samples with k workers\n"
        "from   step         1         2         4  tolerance    critical batch\n"
        "start    10  0.001234  0.001239  0.001950    1.2e-05  256 (256 to 512)"
    )


def test_a_critical_batch_that_could_not_be_measured_directly_is_not_hidden():
    found = measurement(missed="validation loss 0.1 must be reached at 3 global batches or more, it was at 0 of 8")
    assert "could not be measured by training: validation loss 0.1" in " ".join(
        rendered(view.screen(found, 120), width=120).split()
    )
    assert found.critical.method == "noise scale"


def test_minima():
    point = {alpha: {"loss": 0.1 + (alpha - 0.5) ** 2} for alpha in (-1.0, 0.0, 0.5, 1.0, 2.0)}
    line = Line(64, 3.5, 0.25, tuple(LinePoint(alpha, loss, {"loss": float("inf")}) for alpha, loss in point.items()))
    assert rendered(view.line_view(line, None)) == (
        "between the two runs\n"
        " train loss  -1 █▄▁▄█ 2  0.1 to 2.35\n"
        " test loss   -1 █████ 2  nowhere finite\n"
        "distance 3.5, barrier 0.25 (0: they lie in one basin)"
    )
    rows = (Sharpness(1e-3, 12.5, 0.5), Sharpness(5e-4, 3.25, 0.2))
    minimum = Minimum("runs/a", *(SharpnessReport(0.1, 64, 10, space, 10, rows) for space in (None, 5)))
    minima = measurement(noise=None, memory=None, throughput=None, line=line, sharpness=(minimum, minimum))
    assert view.sentence(minima) == "loss barrier between the runs 0.25; sharpness 12.5 %, 12.5 % (ε 0.001)"
    shown = rendered(view.sharpness_table([minimum]), width=100)
    assert shown.splitlines()[-1].split() == ["runs/a", "0.1", *(2 * ["12.5", "%", "3.25", "%"])]


def test_a_sharpness_that_is_undefined_says_so():
    rows = (Sharpness(1e-3, 12.5, 0.5), Sharpness(5e-4, 3.25, 0.2))
    known, undefined = (
        Minimum("runs/a", *(SharpnessReport(loss, 64, 10, space, 10, found) for space in (None, 5)))
        for loss, found in ((0.1, rows), (-2.0, ()))
    )
    both = measurement(
        noise=None, memory=None, throughput=None, sharpness=(undefined, known), seconds={"sharpness": 1.0}
    )
    assert view.sentence(both) == "sharpness undefined, 12.5 % (ε 0.001)"
    shown = rendered(view.screen(both, 110), width=110)
    assert ["runs/a", "-2", "undefined"] in [line.split() for line in shown.splitlines()]
    assert "undefined where 1 + loss is not above 0" in " ".join(shown.split())
    alone = rendered(view.sharpness_table([undefined]))
    assert alone.splitlines()[-1].split()[:2] == ["runs/a", "-2"]
