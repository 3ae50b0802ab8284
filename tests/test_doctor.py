"""`scalewise doctor`: each planted cause is found in runs of `scalewise train`, and nothing in healthy ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.doctor.amount import efficiency
from scalewise.doctor.diagnose import CHECKS, TITLES, Diagnosis, diagnose, diagnose_folder
from scalewise.doctor.evidence import Baseline, BatchNorm, Evidence, Finding, still_falling
from scalewise.doctor.observations import Watched, WatchedProcess
from scalewise.engine.loop import Training
from scalewise.engine.store.folder import RunFolder, RunRecipe, begin
from scalewise.errors import NonFiniteLoss, UsageError
from scalewise.present import terminal
from scalewise.present.stories.doctor import diagnosis_story
from scalewise.recipe import resolve
from scalewise.runs.run import stored_records
from scalewise.stats.gain import gain
from scalewise.stats.noise_scale import NoiseEstimate
from scalewise.tasks.digits import digits, load, mlp
from scalewise.tasks.generated import linear, logistic
from scalewise.tasks.load import load_task


class OneSample(torch.utils.data.Dataset):
    """A data set that gives the same sample for every index."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        (x, y), _ = load()
        return x[7], y[7]


def normed(momentum: float = 0.1) -> sw.Task:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32, momentum=momentum), nn.ReLU(), nn.Linear(32, 10)
        )

    train, test = load()
    return sw.Task(model=model, train=train, test=test, loss=F.cross_entropy, recipe=sw.Recipe(epochs=6.0, lr=0.02))


def same_data() -> sw.Task:
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    return sw.Task(model=model, train=OneSample(), test=load()[1], loss=F.cross_entropy)


def trained(task: sw.Task, folder: Path, mode: str = "auto", **given: object) -> Path:
    """A run folder as `scalewise train --out folder` leaves it, from this process."""
    recipe, derived = resolve(task.recipe, {"threads": 1, **given}, mode, 1, None)
    place = RunFolder(folder)
    folder.mkdir()
    with Training(task, recipe, sw.Placement(loaders=0), derived) as training:
        begin(place, RunRecipe(task.name, [], recipe, derived), "cpu", 1)
        for _ in stored_records(training, place, None):
            pass
    return folder


def causes(findings: list[Finding]) -> list[str]:
    return [finding.cause for finding in findings]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(runs: Path) -> Path:
    return trained(digits(), runs / "single", epochs=4.0)


@pytest.fixture(scope="module")
def plain(runs: Path) -> Path:
    return trained(digits(), runs / "plain", "plain", workers=8, epochs=4.0)


HEALTHY = {
    "digits, 8 workers": lambda: (digits(), {"workers": 8}),
    "digits with batch norm, 8 workers": lambda: (digits(bn=True), {"workers": 8, "epochs": 8.0}),
    "digits with batch norm, micro batches": lambda: (digits(bn=True), {"micro_batch": 16, "epochs": 2.0}),
    "digits, 8 workers, rate scaled by hand": lambda: (digits(), {"workers": 8, "lr_rule": "none", "lr": 0.12}),
    "mlp with adam, 1 worker": lambda: (mlp(), {}),
    "mlp with adam, 2 workers": lambda: (mlp(), {"workers": 2}),
    "linear, 4 workers": lambda: (linear(), {"workers": 4}),
    "logistic, 2 workers, cosine": lambda: (logistic(), {"workers": 2, "schedule": "cosine"}),
    "logistic, 8 workers, steps": lambda: (logistic(), {"workers": 8, "schedule": "step"}),
    "chars, 4 workers": lambda: (load_task("chars", []), {"workers": 4, "worker_batch": 4, "steps": 60}),
}


def test_nothing_is_found_with_one_worker(single):
    assert diagnose_folder(single).findings == []


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(runs, name):
    task, given = HEALTHY[name]()
    assert diagnose_folder(trained(task, runs / name, **given)).findings == []


def test_a_rate_that_was_not_adapted(plain):
    assert "lr-not-adapted" in causes(diagnose_folder(plain).findings)


def test_a_single_worker_run_beside_it_makes_it_firm(plain, single):
    found = diagnose_folder(plain, single).findings
    rate = next(finding for finding in found if finding.cause == "lr-not-adapted")
    assert rate.severity == "high"
    assert "the loss ended at" in rate.evidence
    assert causes(diagnose_folder(single, plain).findings) == []


def test_workers_that_see_the_same_data(runs):
    found = diagnose_folder(trained(same_data(), runs / "same", workers=4, worker_batch=8, steps=20)).findings
    assert causes(found) == ["same-data"]


@pytest.mark.parametrize("lr", [0.5, 2.0])
def test_a_spike_without_warm_up(runs, lr):
    found = diagnose_folder(trained(digits(), runs / f"spike-{lr}", "plain", workers=8, lr=lr, epochs=4.0)).findings
    assert "warm-up-missing" in causes(found)


@pytest.mark.parametrize(("worker_batch", "severity"), [(2, "high"), (4, "medium")])
def test_a_worker_batch_too_small_for_batch_norm(runs, worker_batch, severity):
    folder = trained(normed(), runs / f"small-{worker_batch}", workers=2, worker_batch=worker_batch, epochs=0.5)
    found = {finding.cause: finding.severity for finding in diagnose_folder(folder).findings}
    assert found["worker-batch-too-small"] == severity


def test_running_statistics_that_lag(runs):
    running = {"statistics": "running"} if "statistics" in sw.Recipe.model_fields else {}
    found = diagnose_folder(trained(normed(momentum=0.01), runs / "lag", workers=4, **running)).findings
    assert causes(found) == ["statistics-lag"]
    assert "still hold 51% of their start values" in found[0].evidence  # 0.99 to the power of 67 steps


def test_too_few_steps(runs):
    found = diagnose_folder(trained(mlp(), runs / "few", workers=32, epochs=10.0)).findings
    assert "too-few-steps" in causes(found)


def test_a_run_that_stopped_at_a_loss_that_is_not_finite(runs):
    with pytest.raises(NonFiniteLoss):
        trained(digits(), runs / "infinite", "plain", workers=4, lr=1e18)
    found = diagnose_folder(runs / "infinite").findings
    assert found[0].cause == "non-finite"
    assert "the loss must stay finite, got nan at step 2" in found[0].evidence


def test_the_command(plain, scalewise):
    outcome = scalewise("doctor", plain, "--json")
    assert outcome.code == 0
    findings = json.loads(outcome.stdout)["findings"]
    assert [*findings[0]] == ["cause", "severity", "evidence", "fix"]
    assert "the learning rate was not adapted" in outcome.stderr
    assert not scalewise("doctor", plain, "--quiet").stderr


def test_the_command_on_a_healthy_run(single, scalewise):
    outcome = scalewise("doctor", single, "--json")
    assert json.loads(outcome.stdout) == {"findings": []}
    assert "Nothing found" in outcome.stderr


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], ["run", "nowhere"]])
def test_a_folder_that_is_no_run(arguments, plain, tmp_path, scalewise):
    (tmp_path / "run").symlink_to(plain)
    outcome = scalewise("doctor", *arguments, "--json")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "must be a folder with recipe.json" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_damaged_run_is_named(plain, tmp_path, scalewise):
    (tmp_path / "recipe.json").write_text((plain / "recipe.json").read_text())
    for line, said in (
        ('{"kind": "step", "step": 1}', "holds damaged files of a run"),
        ('{"kind": "step"}', "line 1 must"),
    ):
        (tmp_path / "metrics.jsonl").write_text(f"{line}\n{line}\n")
        outcome = scalewise("doctor", tmp_path)
        assert outcome.code == 2
        assert said in outcome.stderr


def test_doctor_does_not_import_torch(plain):
    check = (
        "import sys\nfrom scalewise.cli import main\n"
        f"try: main(['doctor', {str(plain)!r}])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The checks themselves, on evidence made by hand.

STEPS = 100
FALLING = tuple(2.0 * 0.97**step for step in range(STEPS))
COSINE = tuple((1 + math.cos(math.pi * step / STEPS)) / 20 for step in range(STEPS))


def evidence(**changes: object) -> Evidence:
    values = Evidence(
        "a run", workers=8, worker_batch=32, steps=STEPS, optimizer="sgd", rates=(0.1,) * STEPS, losses=FALLING
    )
    return replace(values, **changes)


def found(one: Evidence, other: Evidence | None = None) -> list[str]:
    return causes(diagnose(one, other).findings)


def test_gain_and_efficiency():
    assert gain(noise=0.0, signal=1.0, workers=8, worker_batch=32) == 1.0
    assert gain(noise=256.0, signal=1.0, workers=8, worker_batch=32) == 4.5  # (8 + 1) ÷ (1 + 1)
    assert gain(noise=1e12, signal=1.0, workers=8, worker_batch=32) == pytest.approx(8.0)
    assert efficiency(300.0, critical=100.0) == 0.25


@pytest.mark.parametrize(
    ("low", "factor", "optimizer", "expected"),
    [
        (256.0, 1.0, "sgd", ["lr-not-adapted"]),  # 4.5 allowed
        (256.0, 3.1, "sgd", []),
        (256.0, 1.0, "adam", ["lr-not-adapted"]),  # its root, 2.12, allowed
        (256.0, 1.5, "adam", []),
        (16.0, 1.0, "sgd", []),  # 1.41 allowed: not worth a word
    ],
)
def test_the_rate_is_held_against_the_low_end_of_the_noise_scale(low, factor, optimizer, expected):
    run = evidence(
        optimizer=optimizer,
        noise=NoiseEstimate(2 * low, low, None, False),
        baselines=(Baseline(lr=0.1 / factor, global_batch=32),),
        losses=(1.0,) * STEPS,
    )
    assert found(run) == expected


def test_a_rate_that_follows_the_noise_is_adapted():
    noise = NoiseEstimate(512.0, 256.0, None, False)
    run = evidence(noise=noise, baselines=(Baseline(0.1, 32),), losses=(1.0,) * STEPS, follows_noise=True)
    assert found(run) == []


def test_too_few_steps_holds_against_the_high_end_of_the_noise_scale():
    losses = tuple(2.0 - 0.01 * step for step in range(STEPS))
    low_noise, high_noise = (NoiseEstimate(high / 2, 0.0, high, True) for high in (64.0, 4096.0))
    assert found(evidence(losses=losses, noise=low_noise)) == ["too-few-steps"]
    few = diagnose(evidence(steps=10, losses=losses, noise=low_noise)).findings[0]
    assert "(--steps 34)" in few.fix  # 10 ÷ 0.3, up to a whole one
    assert found(evidence(losses=losses, noise=high_noise)) == []
    assert found(evidence(losses=(1.0,) * STEPS, noise=low_noise)) == []  # it has settled


def test_a_schedule_is_compared_by_samples():
    one = evidence(workers=1, steps=8 * STEPS, rates=tuple(r for r in COSINE for _ in range(8)), losses=(1.0,) * 800)
    assert found(evidence(rates=COSINE), one) == []
    assert found(evidence(rates=tuple(COSINE[min(4 * step, 99)] for step in range(STEPS))), one) == [
        "schedule-too-fast"
    ]
    slow = evidence(rates=tuple(COSINE[step // 8] for step in range(STEPS)))
    assert found(slow, one) == ["schedule-too-slow"]


def test_a_schedule_counted_in_progress_ends_with_the_run():
    one = evidence(workers=1, steps=8 * STEPS, rates=tuple(r for r in COSINE for _ in range(8)), losses=(1.0,) * 800)
    for rates in ((0.1,) * STEPS, tuple(COSINE[step // 8] for step in range(STEPS)), COSINE[::-1]):
        assert found(evidence(rates=rates, counts_progress=True), one) == []


def test_a_schedule_that_grows_the_batch_is_not_too_slow(runs):
    single = trained(digits(), runs / "cosine", schedule="cosine", epochs=4.0)
    growing = trained(digits(), runs / "growing", schedule="growth", epochs=4.0)
    assert "schedule-too-slow" not in causes(diagnose_folder(growing, single).findings)


def cosine(period: int) -> tuple[float, ...]:
    """The rates of torch's CosineAnnealingLR with T_max=period, which goes on beyond its end."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, period)
    return rates_of(optimizer, scheduler, 180)


def rates_of(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int
) -> tuple[float, ...]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return tuple(rates)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("period", "times"), [(45, "4.0"), (90, "2.0"), (110, "1.6")])
def test_a_cosine_that_comes_back_is_named_by_its_first_period(workers, period, times):
    run = evidence(workers=workers, rates=cosine(period), steps=180, processes=(nobody(workers),))
    (finding,) = [one for one in diagnose(run).findings if one.cause == "schedule-too-fast"]
    assert finding.severity == "high"
    assert f"after {period} of 180 steps" in finding.evidence
    assert f"about {times} times too fast" in finding.fix
    assert ("for 2 processes" in finding.fix) == (workers == 2)
    assert "1 processes" not in finding.fix


def nobody(processes: int) -> Watched:
    return Watched(WatchedProcess(0, processes, "SGD", 10, reduces=True), [], [])


def stock_schedules() -> dict[str, tuple[float, ...]]:
    """Schedules that are meant: none of them ran out."""
    schedules = torch.optim.lr_scheduler
    kinds = {
        "triangles": lambda one: schedules.CyclicLR(one, 1e-3, 0.1, step_size_up=30, cycle_momentum=False),
        "milestones": lambda one: schedules.MultiStepLR(one, [60, 110]),
        "two phases": lambda one: schedules.LambdaLR(one, lambda step: 1.0 if step < 80 else 0.01),
        "one cycle": lambda one: schedules.OneCycleLR(one, 0.1, total_steps=201, cycle_momentum=False),
        "restarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 50),
        "waves": lambda one: schedules.LambdaLR(one, lambda step: math.sin(math.pi * step / 50) ** 2),
    }
    rates = {}
    for name, make in kinds.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        rates[name] = rates_of(optimizer, make(optimizer), 200)
    return rates


@pytest.mark.parametrize("name", ["triangles", "milestones", "two phases", "one cycle", "restarts", "waves"])
def test_stock_schedules_of_one_process_are_healthy(name):
    assert found(evidence(workers=1, steps=200, rates=stock_schedules()[name])) == []


@pytest.mark.parametrize(
    ("workers", "shape", "severity"),
    [
        (1, lambda step: max(0.0, 1 - step / 80), "high"),  # a line that has ended
        (1, lambda step: 0.9**step, "high"),  # stepped with every batch instead of every epoch
        (1, lambda step: 0.1 ** (step // 10), "low"),  # to zero in steps: a plateau may have asked for them
        (2, lambda step: 0.1 ** ((step > 60) + (step > 110)), "low"),
        (2, lambda step: max(0.01, 1 - step / 80), "high"),
    ],
)
def test_a_schedule_that_ran_out(workers, shape, severity):
    run = evidence(workers=workers, steps=200, rates=tuple(0.1 * shape(step) for step in range(200)))
    findings = {one.cause: one for one in diagnose(run).findings}
    assert findings["schedule-too-fast"].severity == severity
    assert ("may be meant so" in findings["schedule-too-fast"].evidence) == (severity == "low")


def test_restarts_and_long_warm_ups_are_healthy_schedules():
    assert found(evidence(rates=COSINE[::2] + COSINE[::2])) == []  # cosine with a warm restart
    assert found(evidence(rates=tuple(0.001 * step for step in range(STEPS)))) == []
    steps = tuple(0.1 * 0.1 ** ((step >= 50) + (step >= 75)) for step in range(STEPS))
    assert found(evidence(rates=steps)) == []


def test_a_single_wild_step_is_no_spike():
    wild = (2.0, 2.0, 9.0, *FALLING[3:])
    assert found(evidence(losses=wild)) == []
    squares = np.random.default_rng(0).chisquare(4, STEPS) / 4  # a mean of few squares: it scatters as it is large
    assert found(evidence(losses=tuple(np.array(FALLING) * squares))) == []
    spike = (2.0, 4.0, 6.0, 5.0, 4.0, *FALLING[5:])
    assert found(evidence(losses=spike)) == ["warm-up-missing"]
    assert found(evidence(losses=spike, rates=tuple(min(0.1, 0.01 * (step + 1)) for step in range(STEPS)))) == []


@pytest.mark.parametrize("seed", range(20))
def test_losses_of_small_batches_that_are_right_nearly_always_are_no_spike(seed):
    """Fine-tuning: most batches of four have a loss of nearly 0, some one of 1; the first may be any of them."""
    random = np.random.default_rng(seed)
    losses = np.exp(random.normal(-6.0, 2.5, (300, 4))).clip(max=4.0).mean(axis=1)
    assert found(evidence(workers=1, losses=tuple(losses), rates=(0.001,) * 300)) == []


def test_a_target_far_from_zero_is_no_sign_of_the_same_data():
    far = NoiseEstimate(0.18, 0.158, 0.195, enough=True)
    assert "same-data" not in found(evidence(worker_batch=1024, noise=far))
    same = NoiseEstimate(1e-9, 0.0, 2e-9, enough=True)
    assert "same-data" in found(evidence(worker_batch=1024, noise=same))


def test_a_run_that_lost_to_one_of_more_steps_is_not_called_healthy():
    random = np.random.default_rng(0)
    mine, other = (tuple(level + 0.05 * random.standard_normal(steps)) for level, steps in ((0.38, 28), (0.2, 112)))
    rough = NoiseEstimate(22.0, 22.0, None, enough=False)
    one = evidence(workers=1, steps=112, losses=(0.7, *other), rates=(0.05,) * 113, test_loss=0.2)
    naive = evidence(workers=4, steps=28, losses=(0.7, *mine), rates=(0.05,) * 29, test_loss=0.39, noise=rough)
    assert found(naive, one) == ["lr-not-adapted", "too-few-steps"]
    known = replace(naive, noise=NoiseEstimate(1.0, 0.9, 1.1, enough=True))  # a larger rate would not help
    assert found(known, one) == ["too-few-steps"]
    assert found(replace(known, test_loss=0.19), one) == []  # it generalizes better


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (BatchNorm(3, group=32, momentum=0.1, batches=100), []),
        (BatchNorm(3, group=32, momentum=0.1, batches=20), ["statistics-lag"]),  # 0.9²⁰ = 12 %
        (BatchNorm(3, group=32, momentum=0.01, batches=100, recalibrated=True), []),
        (BatchNorm(3, group=32, momentum=None, batches=5), []),  # a plain average of all batches
        (BatchNorm(3, group=32, momentum=0.1, batches=100, gap=1.5), ["statistics-lag"]),
        (BatchNorm(3, group=8, momentum=0.1, batches=100), []),
        (BatchNorm(3, group=7, momentum=0.1, batches=100), ["worker-batch-too-small"]),
    ],
)
def test_batch_norm(norm, expected):
    assert found(evidence(batch_norm=norm)) == expected


def test_findings_are_ranked_and_every_cause_has_a_title():
    run = evidence(
        failure="the loss must stay finite, got inf; lower --lr", batch_norm=BatchNorm(1, 6, 0.1, 100), rates=COSINE
    )
    assert [finding.severity for finding in diagnose(run).findings] == ["high", "low"]
    assert set(CHECKS) <= set(TITLES)


def rendered(diagnosis: Diagnosis) -> str:
    return terminal.text(diagnosis_story(diagnosis), 80)


def test_the_view_of_findings():
    text = rendered(diagnose(evidence(batch_norm=BatchNorm(2, 4, 0.1, 100))))
    assert text == (
        "Why did a run lose accuracy?\n"
        "1 of 10 causes found.\n"
        "\n"
        "run  8 workers × 32 = global batch 256, 100 steps, sgd\n"
        "\n"
        " medium   worker batch too small for batch norm  worker-batch-too-small\n"
        "   seen  Batch norm (2 layers) takes its statistics over 4 samples; under 8 they\n"
        "         are noisy.\n"
        "   fix   Raise --worker-batch (and --micro-batch or ghost:N) to 8 or more, with\n"
        "         fewer workers.\n"
        "\n"
        "· not looked for: same-data: the noise scale was not measured\n"
        "· not looked for: lr-not-adapted: the rate of one worker is not known; give its\n"
        "  run as the second folder\n"
        "· not looked for: too-few-steps: the noise scale was not measured firmly enough"
    )


def test_a_loss_that_ran_away_is_found_though_it_is_a_number():
    found = diagnose(evidence(workers=1, losses=tuple(2.0 * 1.5**step for step in range(100))))
    assert causes(found.findings) == ["diverged"]
    noisy = np.random.default_rng(0).chisquare(4, 100)  # a mean of few squares is never the same
    assert "diverged" not in causes(diagnose(evidence(workers=1, losses=tuple(noisy))).findings)


def test_the_share_of_the_last_quarter_in_a_few_steps():
    assert still_falling(evidence(losses=(1.1, 1.0, 0.9, 0.7, 0.6, 0.4))) == pytest.approx(0.2 / 0.7)


def test_runs_of_two_tasks_are_not_compared(runs, single):
    other = trained(linear(), runs / "other-task", epochs=0.5)
    with pytest.raises(UsageError, match="must be of one task to be compared, got digits and linear"):
        diagnose_folder(single, other)


def test_the_view_of_a_healthy_run():
    text = rendered(diagnose(evidence(workers=1)))
    assert text == (
        "Why did a run lose accuracy?\n"
        "✓ Nothing found: 13 causes looked for.\n"
        "\n"
        "run  1 worker × 32 = global batch 32, 100 steps, sgd"
    )
