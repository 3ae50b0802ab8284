"""The plan: its model by reference, its choice by brute force, its inputs from records, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from scalewise.engine.candidates import CARRIES, UNKNOWN, budget, intensity
from scalewise.errors import UsageError
from scalewise.plan import hardware, model
from scalewise.plan.assemble import Metric, _compute, assemble, missing
from scalewise.plan.document import Plan, Wish, choose, rows_with_ends
from scalewise.plan.hardware import Hardware, Link, save_link
from scalewise.plan.jobs import Job, command, job_file
from scalewise.plan.model import Inputs
from scalewise.plan.records import Known, TaskFacts, read_records
from scalewise.present.stored import Stored
from scalewise.present.stories.plan import planning_story
from scalewise.recipe import Recipe
from scalewise.runs.measure import measure as measuring
from scalewise.runs.measure.critical.sweep import sweep
from scalewise.stats import gain as adascale
from scalewise.stats.critical_batch import NOISE_FACTOR, CriticalBatch, efficiency_of, from_noise
from scalewise.stats.interval import Interval
from scalewise.stats.steps_law import fit_law, to_go_by

INPUTS = Inputs(
    worker_batch=32,
    single_steps=449,
    single_low=449,
    single_high=449,
    critical_batch=100.0,
    critical_low=60.0,
    critical_high=150.0,
    lr=0.02,
    lr_power=1.0,
    step_seconds=0.002,
    sample_seconds=0.0001,
    parameter_bytes=4_000_000,
    latency_seconds=1e-4,
    bytes_per_second=1e9,
    overlap=1.0,
    price_per_hour=3.6,
    accuracy=0.97,
    measured_global_batch=64,
)
FACTS = TaskFacts("digits", "digits", (), 1437, 39_720, "accuracy", True)
OWN = Recipe(worker_batch=32, epochs=10.0, optimizer="momentum", lr=0.02)


def test_a_row_by_hand():
    """Four workers: gain (1 + 100/32) ÷ (1 + 100/128); compute 5.2 ms; communication 6 × 0.1 + 1.5 × 4 = 6.6 ms."""
    found = model.row(INPUTS, 4)
    gain = 4.125 / 1.78125
    assert found.steps == math.ceil(449 / gain) == 194
    assert found.samples == 194 * 128
    assert found.lr == pytest.approx(0.02 * gain)
    assert found.step_seconds == pytest.approx(0.0052 + 0.0066)
    assert found.seconds == pytest.approx(194 * 0.0118)
    assert found.cost == pytest.approx(4 * 194 * 0.0118 / 1000)
    assert found.efficiency == pytest.approx(449 * 0.0052 / (4 * 194 * 0.0118))
    assert (found.limit, found.extrapolated) == ("link", True)
    assert model.row(INPUTS, 2).extrapolated is False


@pytest.mark.parametrize("workers", [1, 3, 8, 1024])
def test_the_gain_is_adascales_and_the_law_is_measures(workers):
    assert model.gain_of(INPUTS, workers) == pytest.approx(adascale.gain(100.0, 1.0, workers, 32))
    ratio = efficiency_of(CriticalBatch(100.0, None, None, "sweep"), 32, workers).steps
    assert 1 / model.gain_of(INPUTS, workers) == pytest.approx(ratio)
    assert model.gain_of(dataclasses.replace(INPUTS, critical_batch=None), workers) == workers


def test_the_rate_of_adaptive_optimizers_grows_with_the_root_of_the_gain():
    row = model.row(dataclasses.replace(INPUTS, lr_power=0.5), 4)
    assert row.lr == pytest.approx(0.02 * math.sqrt(row.gain))


def test_rows_of_a_race_take_autos_budget_and_its_race():
    raced = dataclasses.replace(model.raced(INPUTS, intensity(UNKNOWN)), race_steps=40)
    for workers in (2, 8, 32):
        own = OWN.replace(workers=workers)
        expected, shortest, longest = (budget(own, 1437, False, share).steps for share in (UNKNOWN, *CARRIES))
        row, low, high = (model.row(one, workers) for one in (raced, *model.ends(raced)))
        assert (row.steps, low.steps, high.steps) == (expected, shortest, longest)
        assert row.seconds == pytest.approx((row.steps + 40) * row.step_seconds)
    assert model.row(raced, 1) == model.row(INPUTS, 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ""),
        (["--optimizer", "adam"], "--search 0"),
        (["--lr", "0.01"], "--search 0"),
        (["--schedule", "growth"], "--schedule growth"),
    ],
)
def test_the_plan_is_of_what_the_command_does(scalewise_here, recorded, flags, words):
    write_measurement(recorded / "adam", optimizer="adam")
    wish = ["--budget", "9", "--price", "0.01/h", "--json"]
    planned = scalewise_here("plan", "digits", "--workers", "8", "--from", recorded, *flags, *wish).json
    assert planned["command"].startswith("scalewise train digits")
    assert (words in planned["command"], "--search" in planned["command"]) == (True, "search" in words)
    if "search" not in words:
        row = planned["rows"][1]
        train = ["train", "digits", "--workers", "8", *flags, "--processes", "1", "--quiet", "--json"]
        trained = scalewise_here(*train).json
        if words:  # the global batch grows: fewer steps, as many samples
            assert row["samples"] == pytest.approx(trained["samples"], rel=0.02)
        else:
            assert row["steps_low"] <= trained["steps"] <= row["steps_high"]
        assert planned["inputs"]["race_steps"] == (trained["search"] or {"steps": 0})["steps"]


def test_a_raced_run_is_seen(recorded):
    raced = OWN.replace(workers=8, optimizer="muon", lr=0.1, epochs=12.0)
    write_run(recorded / "raced", raced, test=0.98, steps=72, search={"trials": [{"name": "muon"}]})
    known = read_records([recorded], FACTS)
    after_race, by_noise = (assemble(FACTS, OWN, known, HARDWARE, race_steps=steps) for steps in (40, 0))
    assert after_race.seen[8].value == 0.98
    assert after_race.inputs.measured_global_batch == 8 * OWN.worker_batch
    assert by_noise.seen == {}
    assert by_noise.inputs.measured_global_batch == OWN.worker_batch


def test_a_slow_link_does_not_limit_where_reading_takes_longer():
    inputs = dataclasses.replace(INPUTS, critical_batch=None)
    rate = inputs.worker_batch / (1.2 * model.step_seconds(inputs, 8))
    assert model.limit(inputs, 8) == "link"
    assert model.limit(dataclasses.replace(inputs, input_samples_per_second=rate), 8) == "input"


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"bytes_per_second": 1e12, "latency_seconds": 0.0, "critical_batch": None}, "compute"),
        ({"bytes_per_second": 1e12, "latency_seconds": 0.0}, "noise"),
        ({"critical_batch": None}, "link"),
        ({"critical_batch": None, "bytes_per_second": 1e12, "latency_seconds": 0, "largest_worker_batch": 4}, "memory"),
        ({"critical_batch": None, "input_samples_per_second": 500.0}, "input"),
    ],
)
def test_what_limits_a_row(changes, limit):
    assert model.row(dataclasses.replace(INPUTS, **changes), 8).limit == limit


def test_memory_makes_micro_batches_and_nodes_share_a_link():
    halves = dataclasses.replace(INPUTS, largest_worker_batch=16)
    assert model.row(halves, 1).step_seconds == pytest.approx(2 * 0.002 + 0.0032)
    nodes = dataclasses.replace(INPUTS, node_devices=4, node_bytes_per_second=4e9)
    assert model.communication_seconds(nodes, 4) == pytest.approx(1.5 * 0.001)
    assert model.communication_seconds(nodes, 8) == pytest.approx(1.5 * 0.001 + 2e-4 + 0.004)


@pytest.mark.parametrize(("workers", "nodes", "processes"), [(16, 2, 8), (4, 1, 4), (9, 3, 3), (12, 2, 6), (11, 11, 1)])
def test_every_worker_has_a_device_also_where_nodes_cannot_be_filled(workers, nodes, processes):
    """As many processes as workers: a device with two of them would take twice the step time that is planned."""
    job = Job("odd", (), workers, 8, 1.0)
    assert (job.nodes, job.processes, job.nodes * job.processes) == (nodes, processes, workers)
    inputs = dataclasses.replace(INPUTS, node_devices=8, node_bytes_per_second=4e9)
    within, between = (2 * (count - 1) / count for count in (processes, nodes))
    expected = within * 0.001 + 2 * (nodes - 1) * 1e-4 + between * 0.004
    assert model.communication_seconds(inputs, workers) == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"bytes_per_second": 1e-290}, {"device_speed": 1e300}, {"step_seconds": 1e250}])
def test_absurd_numbers_do_not_overflow(changes):
    row = model.row(dataclasses.replace(INPUTS, overlap=10.0, **changes), 8)
    assert row.seconds > 0
    assert row.limit in ("noise", "memory", "link", "input", "compute")


def test_overlap_hides_communication():
    seconds = [model.step_seconds(dataclasses.replace(INPUTS, overlap=overlap), 4) for overlap in (1.0, 2.0, 10.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] == pytest.approx(math.hypot(0.0052, 0.0066))
    assert seconds[2] > 0.0066


def random_inputs(random: np.random.Generator) -> Inputs:
    return dataclasses.replace(
        INPUTS,
        worker_batch=int(2 ** random.integers(3, 10)),
        single_steps=float(random.integers(100, 100_000)),
        critical_batch=None if random.random() < 0.2 else float(10 ** random.uniform(1, 5)),
        step_seconds=float(10 ** random.uniform(-4, -1)),
        sample_seconds=float(10 ** random.uniform(-6, -2)),
        parameter_bytes=int(10 ** random.uniform(4, 9)),
        latency_seconds=float(10 ** random.uniform(-6, -3)),
        bytes_per_second=float(10 ** random.uniform(7, 11)),
        overlap=float(random.uniform(1, 10)),
        price_per_hour=float(random.uniform(0.1, 10)),
    )


def true_time_and_cost(inputs: Inputs, workers: int) -> tuple[float, float]:
    """Written again from the equations."""
    b, ratio = inputs.worker_batch, 0.0
    if inputs.critical_batch is not None:
        ratio = (1 + inputs.critical_batch / (workers * b)) / (1 + inputs.critical_batch / b)
    steps = max(1, math.ceil(inputs.single_steps * (ratio or 1 / workers) - 1e-9))
    compute = inputs.step_seconds + inputs.sample_seconds * b
    rounds = 2 * (workers - 1)
    sent = rounds * inputs.latency_seconds + rounds / workers * inputs.parameter_bytes / inputs.bytes_per_second
    seconds = steps * (compute**inputs.overlap + sent**inputs.overlap) ** (1 / inputs.overlap)
    return seconds, workers * seconds / 3600 * inputs.price_per_hour


@pytest.mark.parametrize("seed", range(100))
def test_the_recommended_row_is_the_true_optimum(seed):
    """By brute force over all rows, for a deadline, a budget, and both."""
    random = np.random.default_rng(seed)
    inputs, counts = random_inputs(random), [1, 2, 3, 4, 8, 16, 64, 256, 1024]
    truth = {count: true_time_and_cost(inputs, count) for count in counts}
    rows = model.rows(inputs, counts)
    deadline = float(random.choice([truth[count][0] for count in counts])) * random.uniform(0.9, 1.2)
    budget = float(random.choice([truth[count][1] for count in counts])) * random.uniform(0.9, 1.2)
    for wish in (Wish(deadline, None), Wish(None, budget), Wish(deadline, budget)):
        allowed = [
            count
            for count in counts
            if (wish.deadline is None or truth[count][0] <= wish.deadline)
            and (wish.budget is None or truth[count][1] <= wish.budget)
        ]
        choice = choose(rows, wish)
        if not allowed:
            assert choice.row is None
            best = [min(counts, key=lambda count: truth[count][place]) for place in (0, 1)]
            assert {row.workers for row in choice.closest} <= set(best)
            continue
        measure = 1 if wish.deadline is not None else 0
        assert choice.row is not None
        best_value = min(truth[count][measure] for count in allowed)
        assert truth[choice.row.workers][measure] == pytest.approx(best_value, rel=1e-9)
        assert choice.row.workers in allowed


def test_without_a_wish_the_fastest_half_efficient_row_is_taken():
    rows = model.rows(dataclasses.replace(INPUTS, bytes_per_second=1e12, latency_seconds=0.0), [1, 2, 4, 8, 16])
    assert [row.efficiency >= 0.5 for row in rows] == [True, True, True, False, False]
    assert choose(rows, Wish()).row.workers == 4


def test_intervals_hold_the_rows_and_move_with_the_inputs():
    middle, low, high = rows_with_ends(dataclasses.replace(INPUTS, compute_spread=0.1), [1, 8, 64])
    assert all(a.seconds < b.seconds < c.seconds for a, b, c in zip(low, middle, high, strict=True))


def test_stages_give_the_steps_of_their_sum():
    stages = [(0, 5.0), (100, 40.0), (400, 200.0)]
    found = from_noise([(step, Interval(value, None, None)) for step, value in stages], 32)
    weights = [0.125, 0.5, 0.375]
    for workers in (2, 8, 64):
        total = sum(
            weight * (1 + value / (workers * 32)) / (1 + value / 32)
            for weight, (_, value) in zip(weights, stages, strict=True)
        )
        inputs = dataclasses.replace(INPUTS, critical_batch=found.value)
        assert 1 / model.gain_of(inputs, workers) == pytest.approx(total)


def test_the_interval_from_runs_covers():
    random, covered = np.random.default_rng(0), 0
    for _ in range(200):
        true = 10 ** random.uniform(1.2, 2.8)
        runs = [
            (batch, 50 * (1 + true / batch) * math.exp(0.1 * random.standard_normal()))
            for batch in (32, 64, 128)
            for _ in range(5)
        ]
        found = to_go_by(None, fit_law(runs, "runs"), level=0.8)
        covered += (found.low or 0) <= true <= (found.high or math.inf)
    assert 0.72 <= covered / 200 <= 0.92


def test_with_a_noise_scale_runs_foretell_more_workers_better():
    """Log errors of the steps at 16, from scattered runs of 1, 2 and 4 and a noise scale that may be off tenfold."""
    random, worker_batch, errors, covered = np.random.default_rng(1), 64, {"runs": [], "both": []}, 0
    for _ in range(200):
        true = worker_batch * 10 ** random.uniform(-0.3, 1.4)
        predictor = true * math.exp(math.log(NOISE_FACTOR) / 1.96 * random.standard_normal())
        noise = CriticalBatch(predictor, predictor, predictor, "noise scale")
        runs = [
            (count * worker_batch, (1 + true / (count * worker_batch)) * math.exp(0.28 * random.standard_normal()))
            for count in (1, 2, 4)
            for _ in range(5)
        ]
        single = math.exp(np.mean([math.log(steps) for batch, steps in runs if batch == worker_batch]))
        law = fit_law(runs, "runs")
        for name, found in (("runs", law.critical), ("both", to_go_by(noise, law, level=0.8))):
            inputs = dataclasses.replace(INPUTS, worker_batch=worker_batch, critical_batch=found.value)
            errors[name].append(math.log(single / model.gain_of(inputs, 16) / (1 + true / (16 * worker_batch))))
        covered += found.low <= true <= (found.high or math.inf)
    alone, both = (np.sqrt(np.mean(np.square(errors[name]))) for name in ("runs", "both"))
    assert both < 0.9 * alone
    assert 0.72 <= covered / 200 <= 0.88


def write_measurement(folder: Path, **changes: object) -> Path:
    noise = {"value": 100.0, "low": 80.0, "high": 125.0, "enough": True}
    content = {
        "task": "digits",
        "optimizer": "momentum",
        "worker_batch": 32,
        "stages": [{"step": 0, "noise_scale": noise}, {"step": 449, "noise_scale": noise}],
        "throughput": [{"worker_batch": b, "samples_per_second": b / (0.001 + 1e-4 * b)} for b in (8, 16, 32, 64, 128)],
        "largest_worker_batch": 1437,
        "device": "cpu",
        "verified": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "measure.json").write_text(json.dumps(content | changes))
    return folder


def write_run(folder: Path, recipe: Recipe = OWN, test: float = 0.975, steps: int = 449, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"task": "digits", "settings": [], "recipe": recipe.model_dump(), "derived": []}
    (folder / "recipe.json").write_text(json.dumps(stored | changes))
    result = {"test": {"accuracy": test}, "samples_per_second": 1000.0, "samples": 14368, "processes": 1}
    (folder / "result.json").write_text(json.dumps(result))
    curve = [(steps // 4, 0.8), (steps // 2, 0.9), (steps, 0.96)]
    lines = [{"kind": "epoch", "step": step, "validation": {"accuracy": value}} for step, value in curve]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def recorded(tmp_path):
    """A folder with a measurement, a run of one worker and a link profile."""
    write_measurement(tmp_path / "known" / "measured")
    write_run(tmp_path / "known" / "single")
    save_link(tmp_path / "known" / "link.json", Link("lab", 1e-4, 1e9, "bench"))
    return tmp_path / "known"


HARDWARE = Hardware(link=hardware.parse_link("10gbit"), node_link=hardware.parse_link("nvlink"))


def test_inputs_follow_from_records(recorded):
    known = read_records([recorded], FACTS)
    assert missing(FACTS, OWN, known, None) == []
    inputs = assemble(FACTS, OWN, known, HARDWARE).inputs
    assert inputs.single_steps == 449
    assert inputs.critical_batch == pytest.approx(100)
    assert inputs.critical_low == pytest.approx(100 * 0.1 ** (1.2816 / 1.96), rel=0.03)  # 80 % of a factor of ten
    assert (inputs.step_seconds, inputs.sample_seconds) == (pytest.approx(0.001), pytest.approx(1e-4))
    assert (inputs.accuracy, inputs.largest_worker_batch, inputs.measured_global_batch) == (0.975, 1437, 32)


def test_what_is_missing_is_said():
    assert missing(FACTS, OWN, Known(), None) == ["noise", "throughput", "memory", "single"]


def test_runs_of_several_workers_tell_the_critical_batch(recorded):
    for workers, steps in ((2, 286), (4, 205)):
        recipe = OWN.replace(workers=workers, lr_rule="adascale")
        write_run(recorded / f"w{workers}", recipe, steps=steps, test=0.97)
    found = assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE)
    predicted = model.row(found.inputs, 8).steps
    assert predicted == pytest.approx(164, rel=0.03)  # S = A + C ÷ N through 449, 286 and 205
    assert found.inputs.measured_global_batch == 128
    assert found.seen == dict.fromkeys((2, 4), Metric(0.97, None, None, 1, level=0.8))


def test_a_row_has_the_metric_that_was_seen_with_an_interval_from_two_runs_on(recorded):
    for number, test in enumerate((0.95, 0.96, 0.97)):
        write_run(recorded / f"w4-{number}", OWN.replace(workers=4, lr_rule="adascale"), steps=205, test=test)
    found = assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE)
    rows = rows_with_ends(found.inputs, (1, 4, 8))
    plan = Plan(FACTS, OWN, found.inputs, *rows, Wish(), choose(rows[0], Wish()), found.notes, seen=found.seen)
    one, four, eight = plan.to_json()["rows"]
    assert (one["accuracy"], one["accuracy_low"], one["accuracy_high"]) == (0.975, None, None)  # of a single run
    assert four["accuracy_low"] < four["accuracy"] < four["accuracy_high"]
    assert four["accuracy"] == pytest.approx(0.96)
    assert (four["accuracy_runs"], eight["accuracy_runs"], eight["accuracy"]) == (3, 0, 0.975)
    facts = {fact.name: fact for fact in planning_story(Stored(plan.to_json())).facts}
    assert "its spread is not known" in facts["test accuracy"].note
    assert facts["seen"].value == "4 workers 96.00 % (n=3)"


def test_the_memory_of_other_devices_is_reckoned_with(recorded):
    """7,000 bytes of a process and of the weights, 100 for each sample: 64 samples fit into 13,450."""
    names = ("bytes_per_sample", "largest_worker_batch", "predicted_peak_bytes", "baseline_bytes")
    memory = dict(zip(names, (100.0, 1437, 148_700, 2_000), strict=True))
    known = read_records([recorded], FACTS)
    assert missing(FACTS, OWN, known, None, memory_bytes=13_450) == ["memory"]
    write_measurement(recorded / "measured", memory=memory)
    known = read_records([recorded], FACTS)
    assert missing(FACTS, OWN, known, None, memory_bytes=13_450) == []
    for given, largest in ((None, 1437), (13_450, 64), (10**9, FACTS.samples)):
        hardware = dataclasses.replace(HARDWARE, memory_bytes=given)
        assert assemble(FACTS, OWN, known, hardware).inputs.largest_worker_batch == largest
    with pytest.raises(UsageError, match="--memory must hold one sample at least, by the records 7,100 bytes"):
        assemble(FACTS, OWN, known, dataclasses.replace(HARDWARE, memory_bytes=7_000))


def test_a_run_that_diverged_says_nothing_and_stops_nothing(recorded):
    write_run(recorded / "diverged", test=math.nan)
    lines = [{"kind": "epoch", "step": step, "validation": {"accuracy": None}} for step in (224, 449)]
    (recorded / "diverged" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE, target=0.9)
    assert found.inputs.single_steps == pytest.approx(224)
    assert assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE).inputs.accuracy == 0.975
    assert any("diverged came to no accuracy on test data" in note for note in found.notes)


def test_throughput_of_another_kind_of_device_is_left_out(recorded):
    write_measurement(
        recorded / "graphics", device="cuda", throughput=[{"worker_batch": 32, "samples_per_second": 1e6}]
    )
    found = assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE)
    assert found.inputs.sample_seconds == pytest.approx(1e-4)
    assert "throughput that was measured on cuda is left out" in found.notes


def test_runs_of_another_recipe_are_left_out(recorded):
    write_run(recorded / "other", OWN.replace(lr=0.5), test=0.1)
    assert assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE).inputs.accuracy == 0.975


def test_a_target_takes_its_own_steps(recorded):
    known = read_records([recorded], FACTS)
    found = assemble(FACTS, OWN, known, HARDWARE, target=0.93)
    assert found.inputs.single_steps == pytest.approx(224 + 0.5 * 225)
    assert found.inputs.single_low < found.inputs.single_steps < found.inputs.single_high
    assert "closest possible is accuracy 0.96" in assemble(FACTS, OWN, known, HARDWARE, target=0.99).unreachable


def test_input_that_is_waited_for_limits(recorded):
    lines = [json.dumps({"kind": "step", "step": 1, "input_seconds": 3.0})]
    file = recorded / "single" / "metrics.jsonl"
    file.write_text("\n".join(lines) + "\n" + file.read_text())
    inputs = assemble(FACTS, OWN, read_records([recorded], FACTS), HARDWARE).inputs
    assert inputs.input_samples_per_second == 1000.0


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (hardware.parse_price, "-1/h"),
        (hardware.parse_price, "free"),
        (hardware.parse_price, "2/week"),
        (hardware.parse_duration, "0h"),
        (hardware.parse_duration, "soon"),
        (hardware.parse_speed, "0x"),
        (hardware.parse_speed, "fast"),
        (hardware.parse_link, "0gbit"),
        (hardware.parse_link, "no-such-file"),
    ],
)
def test_words_that_cannot_be(parse, text):
    with pytest.raises(UsageError, match=repr(text)[1:-1]):
        parse(text)


def test_job_files_are_what_their_systems_read(tmp_path):
    job = Job("my_task.py", ("train", "my task.py", "--workers", "16"), 16, 8, 7200.0, "A100", "registry/image:1")
    assert (job.nodes, job.processes) == (2, 8)
    assert command(job).startswith("torchrun --nnodes 2 --nproc-per-node 8 --node-rank $NODE_RANK")
    assert command(job).endswith("-m scalewise train 'my task.py' --workers 16")
    name, text = job_file("slurm", job)
    (tmp_path / name).write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / name], check=False).returncode == 0
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --time=190\n" in text  # half as long again, and ten minutes to start
    assert "#SBATCH --gpus-per-node=A100:8\n" in text
    kubernetes = yaml.safe_load(job_file("kubernetes", job)[1])
    replicas = kubernetes["spec"]["pytorchReplicaSpecs"]
    assert (kubernetes["kind"], replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == ("PyTorchJob", 1, 1)
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert replicas["Master"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert "'my task.py'" in container["command"][2]
    trainjob = yaml.safe_load(job_file("trainjob", job)[1])
    assert (trainjob["apiVersion"], trainjob["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = trainjob["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "-m", "scalewise", "train", "my task.py", "--workers", "16"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "registry/image:1")
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    sky = yaml.safe_load(job_file("skypilot", job)[1])
    assert (sky["num_nodes"], sky["resources"]["accelerators"]) == (2, "A100:8")
    assert "--nproc-per-node 8" in sky["run"]


def test_the_command_plans_from_records(scalewise_here, recorded):
    done = scalewise_here(
        "plan", "digits", "--workers", "2,4,8,1024", "--from", recorded, "--price", "2.50/h", "--json", "--out", "out"
    )
    found = done.json
    assert [row["workers"] for row in found["rows"]] == [1, 2, 4, 8, 1024]
    keys = "workers global_batch lr steps samples seconds cost accuracy efficiency limit extrapolated"
    assert set(keys.split()) <= set(found["rows"][0])
    again = [dataclasses.asdict(row) for row in model.rows(Inputs(**found["inputs"]), [1, 2, 4, 8, 1024])]
    assert all(row.items() <= shown.items() for row, shown in zip(again, found["rows"], strict=True))
    assert found["inputs"]["bytes_per_second"] == 1e9
    assert found["recommended"] in found["rows"]
    assert found["command"] == f"scalewise train digits --workers {found['recommended']['workers']}"
    assert json.loads(Path("out/plan.json").read_text()) == found
    screen = " ".join(done.stderr.split())
    assert "the fastest with at least half of one worker's efficiency" in screen
    assert "~ extrapolated" in screen


def test_an_impossible_deadline_names_the_closest(scalewise_here, recorded):
    given = ("plan", "digits", "--workers", "1,2,4", "--from", recorded, "--json")
    done = scalewise_here(*given, "--deadline", "0.01s")
    assert done.code == 3
    assert done.json["recommended"] is None
    closest = done.json["closest"][0]["workers"]
    assert f"the closest possible is {closest} workers with" in done.stderr.splitlines()[-1]
    met = scalewise_here(*given, "--deadline", "1h", "--price", "1", "--write", "slurm", "--link", "25gbit").json
    assert met["recommended"]["workers"] == 1
    missed = scalewise_here(*given, "--target", "0.99")
    assert (missed.code, missed.json["recommended"]) == (3, None)
    assert "the closest possible is accuracy 0.96" in missed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "nothing"), "found none at nothing"),
        (("--from", "others"), "--from needs records of task digits, got others/measure.json of task mnist"),
        (("--from", "others-with-link"), "got others-with-link/measure.json of task mnist"),
        (("--from", "broken"), "broken/measure.json holds none"),
        (("--from", "negative"), "negative/measure.json holds none"),
        (("--price", "-2.50/h"), "--price needs what one device costs an hour, 0 or more, as in 2.50/h, got '-2.50/h'"),
        (("--budget", "40"), "--budget 40 needs the price of a device; add --price 2.50/h"),
        (("--overlap", "0.5"), "--overlap must be between 1 (nothing hides) and 10"),
        (("--workers", "9" * 5000), "at most 10,000,000"),
        (("--workers", "none"), "--workers needs a count of at least 1"),
        (("--memory", "lots"), "lots"),
        (("--target", "nan"), "--target must be a number that the metric can come to, got nan"),
        (("--node-link", "wire"), "--node-link needs a rate as in 25gbit"),
        (("--link", "text.json"), "a link profile must be JSON with kind link"),
        (("--write", "kubernetes"), "--write kubernetes needs the container image that holds scalewise"),
    ],
)
def test_mistakes_are_one_clear_line(scalewise_here, tmp_path, arguments, message):
    write_measurement(tmp_path / "others", task="mnist")
    write_measurement(tmp_path / "others-with-link", task="mnist")
    save_link(tmp_path / "others-with-link" / "link.json", Link("lab", 1e-4, 1e9, "bench"))
    text = {"kind": "link", "name": "lab", "latency_seconds": "1e-4", "bytes_per_second": "1e9"}
    (tmp_path / "text.json").write_text(json.dumps(text))
    write_measurement(tmp_path / "broken", throughput=3)
    write_measurement(tmp_path / "negative", throughput=[{"worker_batch": 32, "samples_per_second": -1}])
    done = scalewise_here("plan", "digits", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_what_is_missing_is_measured(scalewise_here, tmp_path):
    """Noise, link and one worker's run; memory and throughput, which take longer, are known."""
    write_measurement(tmp_path / "known", stages=[], task="linear", optimizer="sgd")
    given = ("--threads", "1", "--epochs", "0.2", "--workers", "1,4")
    done = scalewise_here("plan", "linear", "--from", "known", *given, "--out", "first", "--json")
    found, said = done.json, " ".join(done.stderr.split())
    announced = (
        "since the records do not hold it: the link between processes of this machine, one worker's whole training"
    )
    assert said.startswith(f"measuring first, {announced}, the noise scale along one training;")
    assert found["inputs"]["single_steps"] == 16
    assert found["inputs"]["accuracy"] > 0  # its loss
    assert found["inputs"]["critical_batch"] > 0
    assert found["inputs"]["bytes_per_second"] == json.loads(Path("first/link.json").read_text())["bytes_per_second"]
    again = scalewise_here("plan", "linear", "--from", "known", "first", *given, "--out", "second", "--json").json
    assert again["inputs"] == found["inputs"]
    assert not Path("second/single").exists()


@pytest.fixture
def both_commands(scalewise_here, recorded):
    """The critical batch of `measure`, and of `plan` from its folder and records without any noise scale."""

    def run(*flags: object) -> list[dict]:
        write_measurement(recorded / "measured", stages=[])
        skipped = ("--skip", "memory", "--skip", "throughput", "--threads", "1")
        measured = scalewise_here("measure", "digits", *skipped, *flags, "--out", "measured", "--json")
        planned = scalewise_here("plan", "digits", "--from", recorded, "measured", "--out", "plan", "--json")
        return [outcome.json["critical_batch"] for outcome in (measured, planned)]

    return run


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (("--steps", "60"), "noise scale"),
        (("--steps", "60", "--optimizer", "momentum", "--verify", "sweep", "--target", "2.0"), "sweep"),
        (("--epochs", "1.6", "--verify", "branch", "--seeds", "1"), "branch"),
    ],
)
def test_measure_and_plan_give_the_same_critical_batch(both_commands, monkeypatch, flags, method):
    quick = {"global_batches": [16, 32, 64], "tuning_seeds": 1, "seeds": 1, "most_seeds": 1, "jobs": 1}
    monkeypatch.setattr(measuring, "sweep", lambda *given, **named: sweep(*given, **(named | quick)))
    measured, planned = both_commands(*flags)
    assert measured == planned
    assert set(planned) == {"value", "low", "high", "method"}
    assert planned["method"].startswith(method)


@pytest.mark.parametrize("method", ["runs", "runs and noise scale"])
def test_trained_runs_count_as_the_points_of_a_sweep_do(scalewise_here, recorded, method):
    """Steps of 1, 2 and 4 workers as runs, and the same steps as a sweep of `measure` would have stored them."""
    counts = (1, 2, 4, 8, 16) if method == "runs" else (1, 2, 4)
    taken = {workers: round(124 * (1 + 84 / (32 * workers)) * (1.1 if workers == 2 else 1)) for workers in counts}
    for workers, steps in taken.items():
        rule = "none" if workers == 1 else "adascale"
        folder = recorded / ("single" if workers == 1 else f"w{workers}")
        write_run(folder, OWN.replace(workers=workers, lr_rule=rule), steps=steps)
    by_runs = scalewise_here("plan", "digits", "--from", recorded, "--json").json
    points = [{"global_batch": 32 * workers, "steps": steps} for workers, steps in taken.items()]
    for workers in counts[1:]:
        shutil.rmtree(recorded / f"w{workers}")
    write_measurement(recorded / "measured", verified={"law": {"points": points}})
    by_sweep = scalewise_here("plan", "digits", "--from", recorded, "--json").json
    ends = [[found["critical_batch"][name] for name in ("value", "low", "high")] for found in (by_runs, by_sweep)]
    assert ends[0] == ends[1]
    assert (by_runs["critical_batch"]["method"], by_sweep["critical_batch"]["method"]) == (
        method,
        method.replace("runs", "sweep"),
    )
    ranges = [by_runs["inputs"][name] for name in ("critical_low", "critical_batch", "critical_high")]
    assert ends[0][1] < ranges[0] < ranges[1] == ends[0][0] < ranges[2] < ends[0][2]  # 80 % within 95 %


def test_one_measured_worker_batch_gives_its_seconds_per_sample():
    fixed, each, _ = _compute([(32, 1000.0)], 32)
    assert (fixed, each) == (0.0, pytest.approx(1 / 1000))
