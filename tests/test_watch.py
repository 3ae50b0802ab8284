"""`sw.watch`: it finds what is wrong in plain scripts of two processes, sees right, and changes nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scalewise as sw
from conftest import environment
from scalewise.doctor.diagnose import diagnose_folder
from scalewise.doctor.evidence import Finding
from scalewise.doctor.observations import Watched, WatchedProcess, WatchedStep, pack, read_folder, unpack
from scalewise.doctor.processes import overlapping_shards
from scalewise.doctor.runs import from_watched, read_run, square
from scalewise.watch import gradients
from scalewise.watch.watcher import Watcher

JOB = Path(__file__).parent / "jobs" / "watched.py"
HEALTHY = [
    "healthy", "healthy-adam-norm", "healthy-cosine", "healthy-accumulated", "healthy-twice", "healthy-uneven",
    "healthy-tokens", "healthy-fsdp",
]  # fmt: skip
PLANTED = {
    "same-data": "same-data",
    "overlapping-shards": "overlapping-shards",
    "unshuffled-epochs": "unshuffled",
    "unshuffled-labels": "unshuffled",
    "unshuffled-shards": "unshuffled",
    "wrong-averaging": "wrong-averaging",
    "wrong-averaging-tokens": "wrong-averaging",
    "replicas-drifted": "replicas-drifted",
    "replicas-drifted-alone": "replicas-drifted",
    "schedule-too-fast": "schedule-too-fast",
    "schedule-too-fast-floor": "schedule-too-fast",
    "warm-up-missing": "warm-up-missing",
    "non-finite": "non-finite",
    "worker-batch-too-small": "worker-batch-too-small",
    "statistics-lag": "statistics-lag",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scripts, run once in one job of two processes; the single-worker one beside them."""
    out = tmp_path_factory.mktemp("watched")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plants = [*HEALTHY, *PLANTED, "unwatched", "lr-not-adapted"]
    for command in ([*launcher, JOB, out, *plants], [sys.executable, JOB, out, "single"]):
        words = [str(word) for word in command]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    return out


def causes(findings: list[Finding]) -> list[str]:
    return [finding.cause for finding in findings]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_script(folder, name):
    assert diagnose_folder(folder / name).findings == []


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_found(folder, name):
    found = causes(diagnose_folder(folder / name).findings)
    allowed = {PLANTED[name], "non-finite"} if name == "warm-up-missing" else {PLANTED[name]}
    assert PLANTED[name] in found
    assert set(found) <= allowed


def test_a_rate_that_was_not_adapted_is_found_beside_the_single_worker(folder):
    assert diagnose_folder(folder / "lr-not-adapted").findings == []
    found = diagnose_folder(folder / "lr-not-adapted", folder / "single").findings
    assert causes(found) == ["lr-not-adapted"]
    assert found[0].severity == "high"
    assert diagnose_folder(folder / "single", folder / "single").findings == []


def test_the_weights_are_the_same_bytes_with_and_without_watching(folder):
    for process in (0, 1):
        watched, plain = (
            json.loads((folder / name / f"check-{process}.json").read_text()) for name in ("healthy", "unwatched")
        )
        assert watched == plain


@pytest.mark.parametrize("name", ["healthy", "healthy-accumulated", "healthy-fsdp"])
def test_gradient_norms_are_those_of_the_whole_gradient(folder, name):
    norms = json.loads((folder / name / "check-0.json").read_text())["norms"]
    processes = read_folder(folder / name)
    seen = 0
    for number, norm in enumerate(norms):
        rows = [one.steps[number] for one in processes]
        if all(row.square is not None for row in rows):
            assert math.sqrt(square(rows, name == "healthy-fsdp")) == pytest.approx(norm, rel=1e-5)
            seen += 1
    assert seen >= 8


def test_the_noise_scale_agrees_between_processes_micro_batches_and_shards(folder):
    names = ("healthy", "healthy-accumulated", "healthy-fsdp", "healthy-twice")
    estimates = [read_run(folder / name).noise for name in names]
    assert max(one.low for one in estimates) < min(one.high for one in estimates)


def test_samples_per_step_are_those_of_all_micro_batches(folder):
    run = read_run(folder / "healthy-accumulated")
    assert (run.workers, run.worker_batch, run.steps) == (2, 16, 64)
    assert read_folder(folder / "healthy-accumulated")[1].steps[0].samples == [8, 8]


def model_and_optimizer(lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int = 1) -> list[float]:
    """A plain loop; the squared norms of its first micro batches' gradients."""
    squares = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for number in range(micro_batches):
            x = torch.randn(5, 6, generator=generator)
            F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            if not number:
                squares.append(sum(float(p.grad.square().sum()) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return squares


def test_one_process_with_micro_batches(tmp_path):
    model, optimizer = model_and_optimizer()
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        squares = train(model, optimizer, 6, micro_batches=4)
        assert watcher.findings() == []
    steps = read_folder(tmp_path / "w")[0].steps
    assert [step.first_square for step in steps] == pytest.approx(squares, rel=1e-5)
    assert [step.samples for step in steps] == [[5, 5, 5, 5]] * 6
    assert len(unpack(steps[0].inputs)) == 20


@pytest.mark.parametrize(("weighted", "expected"), [(False, ["wrong-averaging"]), (True, [])])
def test_micro_batches_of_different_sizes(tmp_path, weighted, expected):
    model, optimizer = model_and_optimizer()
    generator = torch.Generator().manual_seed(1)
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        for _ in range(20):
            for samples in (12, 4):
                x = torch.randn(samples, 6, generator=generator)
                share = samples / 16 if weighted else 0.5
                (F.cross_entropy(model(x), (x.sum(1) > 0).long()) * share).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert causes(watcher.findings()) == expected


def test_sequences_that_count_alike_are_asked_about(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        for _ in range(20):
            for length in (4, 16):
                ids = torch.randint(8, (4, length))
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
        (finding,) = watcher.findings()
    assert (finding.cause, finding.severity) == ("wrong-averaging", "medium")
    assert "is every token meant to count alike, or every sequence?" in finding.evidence


@pytest.mark.parametrize("parts", [1, 2])
def test_full_batches_have_no_order(tmp_path, parts):
    model, optimizer = model_and_optimizer()
    batches = torch.randn(16, 6).chunk(parts)
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        for x in batches * (30 // parts):
            F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watcher.findings() == []


class Frozen(nn.Module):
    """Dense layers behind a pretrained batch norm that stays in evaluation mode; a head of its own norm, if asked."""

    def __init__(self, *head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6, momentum=0.003), nn.Sequential(*head, nn.Linear(6, 3))
        self.norm.running_mean.fill_(3.0)
        self.norm.num_batches_tracked.fill_(100_000)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("head", "samples", "expected"),
    [
        ([], 4, []),
        ([], 32, []),
        ([nn.BatchNorm1d(6)], 4, ["worker-batch-too-small"]),
        ([nn.BatchNorm1d(6)], 32, []),  # the frozen layer's momentum says nothing
        ([nn.BatchNorm1d(6, momentum=0.001)], 32, ["statistics-lag"]),  # nor do its batches
        ([sw.nn.to_ghost_batch_norm(nn.BatchNorm1d(6), 2)], 32, ["worker-batch-too-small"]),
        ([sw.nn.to_ghost_batch_norm(nn.BatchNorm1d(6), 16)], 32, []),
    ],
)
def test_batch_norm_counts_where_it_takes_statistics(tmp_path, head, samples, expected):
    torch.manual_seed(0)
    model = Frozen(*head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sw.watch(model, optimizer, tmp_path / "w") as watcher:
        for _ in range(70):
            x = torch.randn(samples, 6)
            F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
            optimizer.zero_grad()
        findings = watcher.findings()
    assert causes(findings) == expected
    if "ghost" in str(head).lower() and findings:
        assert "(1 layer) takes its statistics over 2 samples" in findings[0].evidence


def seen_by(process: int, epochs: list[np.ndarray], worker_batch: int, looked_at: int) -> Watched:
    """What two processes would have written that were given these samples, of which some were looked at."""
    batches = [epoch[at : at + worker_batch] for epoch in epochs for at in range(0, len(epoch), worker_batch)]
    steps = [
        WatchedStep(number, 0.1, [worker_batch], 0.01, inputs=pack(batch[:looked_at]))
        for number, batch in enumerate(batches, 1)
    ]
    return Watched(WatchedProcess(process, 2, "SGD", 10, reduces=True), steps, [])


@pytest.mark.parametrize(("sharded", "looked_at"), [(True, 64), (True, 16), (False, 64), (False, 16)])
def test_shards_are_told_from_whole_data_by_some_of_the_samples(sharded, looked_at):
    draw = np.random.default_rng(0)
    samples = draw.integers(2**32, size=2048)
    orders = [[draw.permutation(samples) for _ in range(3)] for _ in range(2)]
    if sharded:
        orders = [[epoch[process::2] for epoch in orders[0]] for process in range(2)]
    found = overlapping_shards(
        from_watched("two", [seen_by(process, orders[process], 64, looked_at) for process in range(2)]), None
    )
    assert (found is None) == sharded


def test_neither_weights_nor_random_numbers_are_touched(tmp_path):
    ends = []
    for watched in (False, True):
        model, optimizer = model_and_optimizer()
        watcher = sw.watch(model, optimizer, tmp_path / "w") if watched else None
        train(model, optimizer, 70)
        if watcher is not None:
            watcher.close()
        ends.append([*[p.detach().clone() for p in model.parameters()], torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Inside(nn.Module):
    """A model in whose middle something happens that a second backward pass would do again."""

    def __init__(self, middle: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.middle, self.calls = nn.Linear(8, 3), middle, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.z = self.middle(self, x)
        return self.head(self.z)


def checkpointed(model: nn.Module, x: torch.Tensor, **options: bool) -> torch.Tensor:
    return checkpoint(model.block, x.requires_grad_(), **options)


def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def noisy(gradient: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        return gradient + 0.01 * torch.randn_like(gradient)

    z = model.block(x)
    z.register_hook(noisy)
    return z * 1.0


def retained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = model.block(x)
    z.retain_grad()
    return z


class Drawing(torch.autograd.Function):
    """The identity, with noise in its gradient."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)


MIDDLES = {
    "plain": lambda model, x: model.block(x),
    "checkpoint": lambda model, x: checkpointed(model, x, use_reentrant=False),
    "checkpoint, other random numbers": lambda model, x: checkpointed(
        model, x, use_reentrant=False, preserve_rng_state=False
    ),
    "reentrant checkpoint": lambda model, x: checkpointed(model, x, use_reentrant=True),
    "own function": lambda model, x: Drawing.apply(model.block(x)),
    "hook": hooked,
    "retained": retained,
}


def trained_inside(name: str, folder: Path | None) -> tuple[list[torch.Tensor], list[float]]:
    """State and retained gradients after 12 steps, of which two are looked at in halves."""
    model = Inside(MIDDLES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = sw.watch(model, optimizer, folder) if folder is not None else None
    kept = []
    for _ in range(12):
        x = torch.randn(16, 6)
        F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        kept.append(float(model.z.grad.norm()) if name == "retained" else float(model.calls))
        optimizer.step()
        optimizer.zero_grad()
    if watcher is not None:
        watcher.close()
    return [*[one.clone() for one in model.state_dict().values()], torch.rand(3)], kept


@pytest.mark.parametrize("name", MIDDLES)
def test_what_a_second_pass_would_do_again_is_not_done(tmp_path, name):
    (plain, plain_kept), (watched, watched_kept) = trained_inside(name, None), trained_inside(name, tmp_path / "w")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert plain_kept == watched_kept
    halves = [step for step in read_folder(tmp_path / "w")[0].steps if step.part_square is not None]
    assert bool(halves) == (name == "plain")


def test_what_a_second_pass_moves_unseen_is_put_back(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "what_notices", lambda output, search_tensors: None)
    for name in ("checkpoint", "checkpoint, other random numbers", "reentrant checkpoint", "own function"):
        plain, watched = trained_inside(name, None)[0], trained_inside(name, tmp_path / name)[0]
        assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_hooks_are_gone_after_the_end(tmp_path):
    model, optimizer = model_and_optimizer()
    with sw.watch(model, optimizer, tmp_path / "w"):
        train(model, optimizer, 2)
    train(model, optimizer, 2)
    assert len(read_folder(tmp_path / "w")[0].steps) == 2
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_evaluation_and_thrown_away_gradients_are_no_part_of_a_step(tmp_path):
    model, optimizer = model_and_optimizer()
    with sw.watch(model, optimizer, tmp_path / "w"):
        with torch.no_grad():
            model(torch.rand(9, 6))
        model(torch.rand(7, 6)).sum().backward()
        optimizer.zero_grad()  # as a gradient scaler does after an overflow
        train(model, optimizer, 1)
    assert [step.samples for step in read_folder(tmp_path / "w")[0].steps] == [[5]]


def test_an_error_of_the_watcher_ends_watching_and_not_training(tmp_path):
    class Densely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(x.to_dense())

    model = Densely()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = sw.watch(model, optimizer, tmp_path / "w")
    with pytest.warns(RuntimeWarning, match="sw.watch stopped watching: "):
        output = model(torch.rand(5, 6).to_sparse())
    output.sum().backward()
    optimizer.step()
    model(torch.rand(5, 6).to_sparse())  # without another warning
    assert watcher.closed
    watcher.close()
    assert not model._forward_hooks


def test_an_optimizer_that_calls_anothers_step_counts_once(tmp_path):
    class Twice(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()

    model, _ = model_and_optimizer()
    with sw.watch(model, optimizer := Twice(model.parameters(), lr=0.1), tmp_path / "w"):
        train(model, optimizer, 3)
    assert [step.step for step in read_folder(tmp_path / "w")[0].steps] == [1, 2, 3]


def test_a_wrapped_optimizer_is_watched_and_anything_else_refused(tmp_path):
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model, optimizer = model_and_optimizer()
    with sw.watch(model, Wrapper(optimizer), tmp_path / "w"):
        train(model, optimizer, 1)
    assert len(read_folder(tmp_path / "w")[0].steps) == 1
    with pytest.raises(sw.ScalewiseError, match=r"needs a model and its torch\.optim\.Optimizer, got a Linear"):
        sw.watch(model, nn.Linear(2, 2))


def test_half_precision_gradients_and_models_that_return_their_loss(tmp_path):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(6, 3, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.dense(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with sw.watch(model, optimizer, tmp_path / "w"):
        for _ in range(3):
            model(x=torch.rand(4, 6, dtype=torch.bfloat16), labels=torch.tensor([0, 1, 1, 2]))["loss"].backward()
            square = sum(float(p.grad.double().square().sum()) for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    step = read_folder(tmp_path / "w")[0].steps[-1]
    assert step.square == pytest.approx(square, rel=1e-5)
    assert (step.top_label, step.samples) == ([2, 1, 4], [4])
    assert 0.5 < step.loss < 2


def test_earlier_files_are_set_aside(tmp_path):
    for steps in (3, 2, 1):
        model, optimizer = model_and_optimizer()
        with sw.watch(model, optimizer, tmp_path / "w"):
            train(model, optimizer, steps)
    assert len(read_folder(tmp_path / "w")[0].steps) == 1
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "w").glob("*.earlier*")}
    assert lines == {"process-0.earlier.jsonl": 5, "process-0.earlier-2.jsonl": 4}


def test_two_watchers_of_one_program_write_to_two_folders(tmp_path):
    pairs = [model_and_optimizer() for _ in range(2)]
    first = sw.watch(*pairs[0], tmp_path / "w")
    with pytest.warns(RuntimeWarning, match="needs a folder for each watcher.* writes to .*w-2"):
        second = sw.watch(*pairs[1], tmp_path / "w")
    for steps, (model, optimizer) in enumerate(pairs, 2):
        train(model, optimizer, steps)
    first.close()
    second.close()
    assert second.out == tmp_path / "w-2"
    assert [len(read_folder(one.out)[0].steps) for one in (first, second)] == [2, 3]
    with sw.watch(*pairs[0], tmp_path / "w") as third:
        assert third.out == tmp_path / "w"


def test_looking_closely_is_kept_within_its_share(tmp_path):
    model, optimizer = model_and_optimizer()
    with sw.watch(model, optimizer, tmp_path / "w"):
        train(model, optimizer, 200)  # steps far shorter than a look
    looked = np.array([step.square is not None for step in read_folder(tmp_path / "w")[0].steps])
    assert looked[:32].all()
    assert looked[160:].mean() < 0.1


def test_a_file_of_something_else_is_named(tmp_path, scalewise):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "process-0.jsonl").write_text('{"kind": "nothing"}\n')
    outcome = scalewise("doctor", "w")
    assert outcome.code == 2
    assert "is not a file that sw.watch wrote" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def losses_of(folder: Path) -> list[float | None]:
    return [step.loss for step in read_folder(folder)[0].steps]


def noting(notes: Callable[[Watcher, torch.Tensor], object], folder: Path, steps: int = 70) -> list[float]:
    """A loop that gives the watcher its losses in some way; the mean losses."""
    model, optimizer = model_and_optimizer()
    means = []
    with sw.watch(model, optimizer, folder) as watcher:
        for _ in range(steps):
            x = torch.randn(5, 6)
            each = F.cross_entropy(model(x), (x.sum(1) > 0).long(), reduction="none")
            notes(watcher, each)
            each.mean().backward()
            means.append(each.mean().item())
            optimizer.step()
            optimizer.zero_grad()
    return means


def test_a_loss_of_many_numbers_is_left_out_with_one_word(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"needs one number.* got a Tensor of shape \(5,\)") as said:
        noting(lambda watcher, each: watcher.loss(each), tmp_path / "w")
    assert len(said) == 1
    assert losses_of(tmp_path / "w") == [None] * 70


@pytest.mark.parametrize("form", [lambda mean: mean.item(), lambda mean: mean.reshape(1), lambda mean: mean])
def test_a_loss_may_be_a_float_or_a_tensor_of_one_number(tmp_path, form):
    means = noting(lambda watcher, each: watcher.loss(form(each.mean())), tmp_path / "w", 3)
    assert losses_of(tmp_path / "w") == pytest.approx(means)


def test_what_cannot_be_written_never_ends_training(tmp_path):
    """An error while steps are written comes again when watching stops, of whatever type it is."""

    def spoil(watcher: Watcher, each: torch.Tensor) -> None:
        watcher._now.losses.append(each.detach())  # no number

    with pytest.warns(RuntimeWarning, match="sw.watch stopped watching: ") as said:
        noting(spoil, tmp_path / "w")
    assert len(said) == 1
    assert read_folder(tmp_path / "w")[0].steps == []
