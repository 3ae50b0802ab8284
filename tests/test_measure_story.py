"""The story of a measurement, rendered at a fixed width and compared as text."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from scalewise.present import terminal
from scalewise.present.stored import Stored, parsed
from scalewise.present.stories import measure as stories
from scalewise.present.stories.critical import critical_section
from scalewise.present.stories.measure import answer, measurement_story, memory_section
from scalewise.present.words import rough
from scalewise.recipe import Recipe
from scalewise.runs.measure.critical.branch import BranchReport, Stage
from scalewise.runs.measure.critical.rates import Tried
from scalewise.runs.measure.critical.sweep import Rung, SweepReport
from scalewise.runs.measure.measure import Measurement, Minimum
from scalewise.runs.measure.memory.largest import MemoryReport, Part
from scalewise.runs.measure.minima import Line, LinePoint, Sharpness, SharpnessReport
from scalewise.runs.measure.noise import LayerNoise, NoiseReport, StageNoise
from scalewise.runs.measure.throughput import ThroughputReport
from scalewise.stats.critical_batch import CriticalBatch
from scalewise.stats.noise_scale import NoiseEstimate
from scalewise.stats.steps_law import fit_law, held_out_one_by_one
from scalewise.stats.timing import Knee, Rate
from test_views import rendered

NOISE = NoiseEstimate(1300.0, 1050.0, 1700.0, enough=True)


def noise(average: NoiseEstimate = NOISE, preconditioned: NoiseEstimate | None = None) -> NoiseReport:
    """With three stages of their own, or of an average that is given."""
    stages = tuple(
        StageNoise(
            name,
            step,
            2048,
            NoiseEstimate(value, value * 0.8, value * 1.3, True) if average is NOISE else average,
            preconditioned,
        )
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


def stored(found: Measurement) -> Stored:
    return parsed(json.dumps(found.to_json()).encode())


def shown(found: Measurement, width: int = 90) -> str:
    return terminal.text(measurement_story(stored(found)), width)


def facts(found: Measurement) -> dict[str, str]:
    return {fact.name: f"{fact.value} {fact.note}".strip() for fact in measurement_story(stored(found)).facts}


def section(make, found: Measurement, width: int = 90) -> str:
    return rendered(terminal.section_view(make(stored(found)), width), width)


def test_the_answer_says_what_to_act_on():
    branches = BranchReport(
        128, 4096, 3, [Stage("start", 10, 1280, 0.1, {8: 0.5}, 8, CriticalBatch(900.0, 450.0, 1800.0, "branch"))]
    )
    assert answer(stored(measurement(verified=branches))) == (
        "Up to 7 workers of 128 each sample is worth at least half: the critical batch by branch is 900. At 8 workers "
        "it is worth 47 %. The largest worker batch that fits is 2,048."
    )
    assert facts(measurement(verified=branches)) == {
        "noise scale": "1,300 samples 95 %: 1,050 to 1,700",
        "critical batch": "900 samples 95 %: 450 to 1,800, by branch",
        "largest worker batch": "2,048 limited by memory",
        "fastest from worker batch": "256 the largest tried",
        "of the device's best": "2 % of its fastest matrix product",
    }
    doubling, wide = (dataclasses.replace(throughput(128), knee_interval=Knee(128, low, 256)) for low in (128, 64))
    assert facts(measurement(throughput=doubling))["fastest from worker batch"] == "128"
    assert facts(measurement(throughput=wide))["fastest from worker batch"] == "128 64 to 256"
    everything = measurement(memory=memory(largest_worker_batch=1437, limited_by="data"))
    assert answer(stored(everything)).endswith("All 1,437 training samples fit at once.")


def test_a_noise_scale_that_is_not_enough_says_what_is_missing():
    unknown = NoiseEstimate(900.0, 300.0, None, enough=False, more_steps=40)
    drawn = shown(measurement(noise=noise(unknown)))
    assert "noise scale                900 samples  95 %: 300 to ∞" in drawn
    assert "the critical batch by noise scale is 900." in " ".join(drawn.split())
    assert "noise scale: not enough: about 40 more steps" in drawn
    nothing = NoiseEstimate(None, None, None, enough=False, problem="the workers' gradients are identical")
    drawn = shown(measurement(noise=noise(nothing)))
    assert "The noise scale is not known. The largest worker batch" in drawn
    assert "noise scale: the workers' gradients are identical" in drawn
    assert "What more workers bring" not in drawn


def test_tables():
    assert section(stories.noise_section, measurement(noise=noise(preconditioned=NOISE))) == (
        "Noise scale over training\n"
        "          step      noise scale (95 %)   preconditioned (95 %)\n"
        "start        0        400 (320 to 520)  1,300 (1,050 to 1,700)\n"
        "middle     500    1,200 (960 to 1,560)  1,300 (1,050 to 1,700)\n"
        "end      1,000  2,400 (1,920 to 3,120)  1,300 (1,050 to 1,700)\n"
        "average         1,300 (1,050 to 1,700)  1,300 (1,050 to 1,700)"
    )
    lines = section(stories.efficiency_section, measurement()).splitlines()
    assert lines[:3] + lines[5:7] == [
        "What more workers bring",
        "         global",
        "workers   batch  worth of a sample    steps  samples",
        "4           512  64 % (15 to 95 %)  × 0.341   × 1.36",
        "8         1,024   47 % (8 to 90 %)  × 0.231   × 1.85",
    ]
    assert section(stories.throughput_section, measurement()) == (
        "Throughput of one worker, cpu, 2 threads\n"
        "worker\n"
        "batch   samples/s                            inference\n"
        "128           500  ████████████                    500\n"
        "256         1,000  ████████████████████████      1,000"
    )
    assert section(memory_section, measurement()) == (
        "Memory at worker batch 2,048\n"
        "300 MB before training, weights 1 MB, activations 3.2 GB\n"
        "Peak 3.7 GB predicted, 3.8 GB measured, of 4 GB (given)."
    )


def test_memory_that_leaves_loaders_out_says_so():
    read = measurement(memory=memory(loaders=2))
    assert answer(stored(read)).endswith("The largest worker batch that fits is 2,048 with --loaders 0.")
    assert section(memory_section, read, width=130).splitlines()[-1] == (
        "With --loaders 0: the 2 loader processes that training has by default come on top, with what they read ahead."
    )


def test_tables_stand_side_by_side_where_there_is_room():
    narrow, wide = (shown(measurement(), width).splitlines() for width in (80, 110))
    assert any(line.startswith("Noise scale over training  ") and "What more workers bring" in line for line in wide)
    assert "Noise scale over training" in narrow
    assert "What more workers bring" in narrow
    assert not any("…" in line for line in [*narrow, *wide])
    assert max(len(narrow), len(wide)) <= 45  # one screen


def test_the_layers_that_are_shown_are_the_noisiest():
    layers = tuple(LayerNoise(f"layer{n}", NoiseEstimate(n + 1.0, n + 0.5, n + 2.0, True)) for n in range(20))
    adam = section(stories.layers_section, measurement(noise=NoiseReport(NOISE, NOISE, (), layers, 10, 16)))
    assert adam.startswith("Noise scale by layer, of plain gradients")
    drawn = section(stories.layers_section, measurement(noise=NoiseReport(NOISE, None, (), layers, 10, 16)))
    assert "the 12 largest of 20" in drawn
    assert "layer19" in drawn
    assert "layer3 " not in drawn


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
    drawn = shown(found)
    assert "Steps to validation loss 0.123:" in drawn
    assert "median over seeds ± its standard error" in drawn
    (row,) = [line.split() for line in drawn.splitlines() if re.match(r"\s*128 ", line) and "±" in line]
    assert row[2] == "3"
    assert row[4:7] == ["±", "7", "%"]  # 1.25 · 0.1 ÷ √3
    assert row[-4:-1] == ["(−2", "%", "off)"]  # without it the others lie on the law
    assert f"Cheap and direct: {word}" in drawn
    assert "a doubt about one of them" in drawn
    assert f"the critical batch by sweep is {rough(law.critical.value)}." in " ".join(drawn.split())
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
        law = fit_law([(8, 100.0), (16, 80.0), (32, 40.0)])
        law.critical, law.at_level = direct, lambda level: direct
        report = SweepReport(0.5, 1, [], law, [], [])
    recipe = Recipe(workers=8, worker_batch=32)
    return Measurement("digits", recipe, noise=noise(estimate), verified=report)


def test_a_lower_bound_found_by_training_wins_over_a_noise_scale_below_it():
    found = checked(CriticalBatch(None, 1024.0, None, "branch"))
    document = found.to_json()
    assert document["critical_batch"] == {"value": None, "low": 1024.0, "high": None, "method": "branch"}
    assert "trust the branch" in document["verified"]["agreement"]
    (own,) = [row for row in document["efficiency"] if row["workers"] == 8]
    assert (own["worth"], own["low"], own["high"], own["steps"]) == (None, 0.8, 1.0, None)
    drawn = section(stories.efficiency_section, found).splitlines()
    assert drawn[7].split() == ["8", "256", "at", "least", "80", "%", "–", "–"]
    page = Stored(document)
    assert answer(page) == (
        "Up to at least 32 workers of 32 each sample is worth at least half: the critical batch by branch is at least "
        "1,024. At 8 workers it is worth at least 80 %."
    )
    assert critical_section(page).blocks[-1].text == f"Cheap and direct: {document['verified']['agreement']}."


def test_a_noise_scale_above_the_lower_bound_is_gone_by_and_named():
    found = checked(CriticalBatch(None, 1024.0, None, "branch"), value=1300.0)
    assert "the critical batch by noise scale is 1,300 (branch: at least 1,024). At 8" in answer(stored(found))
    assert found.to_json()["critical_batch"]["method"] == "noise scale"


def test_a_sweep_that_bounds_nothing_is_taken_together_with_the_noise_scale():
    found = checked(CriticalBatch(13.0, 0.0, None, "sweep"))
    assert "the critical batch by sweep and noise scale is 108 (not bounded by the sweep). At 8" in answer(
        stored(found)
    )
    critical = found.to_json()["critical_batch"]
    assert critical["method"] == "sweep and noise scale"
    assert 159 / 10 < critical["low"] < critical["high"] < 159 * 10  # no wider than what the noise scale predicts


def test_a_sweep_whose_steps_do_not_fall_gives_an_upper_bound():
    found = checked(CriticalBatch(0.0, 0.0, 32.0, "sweep"))
    assert answer(stored(found)) == (
        "Hardly beyond one worker of 32: the critical batch by sweep is at most 32. At 8 workers it is worth at most "
        "11 %."
    )


def test_branches_show_the_tolerance_and_losses_that_differ_by_it():
    losses = {1: 0.001234, 2: 0.001239, 4: 0.00195}
    stage = Stage("start", 10, 1280, 0.1, losses, 2, CriticalBatch(256.0, 256.0, 512.0, "branch"))
    found = Measurement("digits", Recipe(workers=8), noise=noise(), verified=BranchReport(128, 4096, 3, [stage]))
    assert "\n".join(section(critical_section, found).splitlines()[1:4]) == (
        "Validation loss after 4,096 more samples with k workers:\n"
        "from   step         1         2         4  tolerance    critical batch\n"
        "start    10  0.001234  0.001239  0.001950    1.2e-05  256 (256 to 512)"
    )


def test_a_critical_batch_that_could_not_be_measured_directly_is_not_hidden():
    found = measurement(missed="validation loss 0.1 must be reached at 3 global batches or more, it was at 0 of 8")
    assert "validation loss 0.1 must be reached at 3 global batches" in shown(found, 120)
    assert found.critical.method == "noise scale"


def test_minima():
    point = {alpha: {"loss": 0.1 + (alpha - 0.5) ** 2} for alpha in (-1.0, 0.0, 0.5, 1.0, 2.0)}
    line = Line(64, 3.5, 0.25, tuple(LinePoint(alpha, loss, {"loss": float("inf")}) for alpha, loss in point.items()))
    rows = (Sharpness(1e-3, 12.5, 0.5), Sharpness(5e-4, 3.25, 0.2))
    minimum = Minimum("runs/a", *(SharpnessReport(0.1, 64, 10, space, 10, rows) for space in (None, 5)))
    minima = measurement(noise=None, memory=None, throughput=None, line=line, sharpness=(minimum, minimum))
    assert answer(stored(minima)) == (
        "The loss barrier between the runs is 0.25. Sharpness 12.5 % and 12.5 % (ε 0.001)."
    )
    assert section(stories.between_section, minima) == (
        "Between the two runs, from −1 to 2\n"
        "train loss  █▄▁▄█     0.1 to 2.35\n"
        "test loss   █████  nowhere finite\n"
        "Distance 3.5, barrier 0.25 (0: they lie in one basin)."
    )
    drawn = section(stories.sharpness_section, minima, width=100)
    assert drawn.splitlines()[-1].split() == ["runs/a", "0.1", *(2 * ["12.5", "%", "3.25", "%"])]


def test_a_sharpness_that_is_undefined_says_so():
    rows = (Sharpness(1e-3, 12.5, 0.5), Sharpness(5e-4, 3.25, 0.2))
    known, undefined = (
        Minimum("runs/a", *(SharpnessReport(loss, 64, 10, space, 10, found) for space in (None, 5)))
        for loss, found in ((0.1, rows), (-2.0, ()))
    )
    both = measurement(
        noise=None, memory=None, throughput=None, sharpness=(undefined, known), seconds={"sharpness": 1.0}
    )
    assert answer(stored(both)) == "Sharpness undefined and 12.5 % (ε 0.001)."
    drawn = shown(both, 110)
    assert ["runs/a", "-2", "undefined"] in [line.split() for line in drawn.splitlines()]
    assert "undefined where 1 + loss is not above 0" in " ".join(drawn.split())
    alone = section(stories.sharpness_section, dataclasses.replace(both, sharpness=(undefined,)))
    assert alone.splitlines()[-1].split() == ["runs/a", "-2", "undefined"]
