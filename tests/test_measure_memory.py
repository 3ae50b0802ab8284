"""The largest worker batch that fits: amounts of memory, the prediction, and real processes that run out of it."""

from __future__ import annotations

import dataclasses
import random
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.engine.placement import Placement, loader_processes
from scalewise.engine.processes.memory import Free, free_memory, is_out_of_memory
from scalewise.errors import Failed, ProcessFailed, TaskError, TooLittleMemory, UsageError
from scalewise.runs.measure.memory import largest as memory
from scalewise.runs.measure.memory import parse_bytes, show_bytes
from scalewise.runs.measure.memory.largest import fit_line, largest_fitting, largest_worker_batch
from scalewise.runs.measure.memory.steps import Job, Note, Parts
from scalewise.runs.measure.memory.trials import Children, worst

MB = 1_000_000
BUDGET = 600 * MB
IMAGES = """
import torch, scalewise as sw
from torch import nn
from torch.nn import functional as F

def task(bn: bool = False, images: int = 2000):
    x, y = torch.rand(images, 1, 32, 32), torch.arange(images) % 10
    def model():
        norm = [nn.BatchNorm2d(48)] if bn else []
        return nn.Sequential(nn.Conv2d(1, 48, 3, padding=1), *norm, nn.ReLU(), nn.Conv2d(48, 48, 1), nn.Tanh(),
                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
    return sw.Task(model=model, train=(x, y), test=(x[:8], y[:8]), loss=F.cross_entropy,
                   recipe=sw.Recipe(worker_batch=8, threads=1))
"""
READ = """
import torch, scalewise as sw
from torch import nn
from torch.nn import functional as F

class Read(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 2

def task():
    return sw.Task(model=lambda: nn.Linear(3, 2), train=Read(), test=Read(), loss=F.cross_entropy,
                   recipe=sw.Recipe(worker_batch=4, threads=1))
"""
FAILING = """
import os, signal, torch, scalewise as sw
from torch import nn

def task(how: str):
    def loss(output, target):
        if how == "error":
            raise KeyError("mine")
        os.kill(os.getpid(), {"abort": signal.SIGABRT, "kill": signal.SIGKILL}[how])
    x = torch.rand(64, 3)
    return sw.Task(model=lambda: nn.Linear(3, 2), train=(x, x), test=(x, x), loss=loss, recipe=sw.Recipe(threads=1))
"""


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4GB", 4_000_000_000),
        ("2GiB", 2 * 2**30),
        ("512MB", 512_000_000),
        ("1.5 tb", 1_500_000_000_000),
        (" 300 KiB ", 300 * 1024),
        ("7B", 7),
    ],
)
def test_amounts_of_memory(text, amount):
    assert parse_bytes(text) == amount


def test_amounts_beyond_any_machine_are_refused():
    for text in ("99999999TB", f"{'9' * 400}GB"):
        with pytest.raises(UsageError, match="--memory must be at most"):
            parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "4", "GB", "4 parsecs", "-1GB", "0MB", "0.2B", "1e3MB", "nan GB", "1,5GB", "4GB4"]
)
def test_malformed_amounts_are_refused_in_one_clear_line(text):
    with pytest.raises(UsageError, match="--memory must be an amount of memory") as caught:
        parse_bytes(text)
    assert caught.value.exit_code == 2
    assert "write for example --memory 4GB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_amounts_are_shown_with_three_digits():
    assert [show_bytes(value) for value in (0, 999, 1_000, 123_456_789, 2_000_000_000)] == [
        "0 B", "999 B", "1 kB", "123 MB", "2 GB",
    ]  # fmt: skip


def machine(root, available_kb, cgroups, files):
    """A folder with what the kernel says of memory."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {2 * available_kb} kB\nMemAvailable: {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroups)
    for path, text in files.items():
        place = root / "sys/fs/cgroup" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def test_free_memory_without_a_limit_is_the_machines(tmp_path):
    files = {"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}
    assert free_memory(machine(tmp_path, 1000, "0::/\n", files)) == Free(1000 * 1024, "free memory of this machine")


def test_the_tightest_cgroup_of_version_2_counts_without_what_is_only_cached(tmp_path):
    files = {
        "outer/memory.max": "600000\n",
        "outer/memory.current": "400000\n",
        "outer/memory.stat": "anon 250000\ninactive_file 150000\n",
        "outer/inner/memory.max": "900000\n",
        "outer/inner/memory.current": "100000\n",
        "outer/inner/memory.stat": "inactive_file 0\n",
    }
    found = free_memory(machine(tmp_path, 1000, "0::/outer/inner\n", files))
    assert found == Free(600_000 - (400_000 - 150_000), "what the cgroup's limit leaves")


def test_a_cgroup_of_version_1_seen_from_within_a_container(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": "500000\n",
        "memory/memory.usage_in_bytes": "480000\n",
        "memory/memory.stat": "total_inactive_file 30000\n",
    }
    lines = "9:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    assert free_memory(machine(tmp_path, 1000, lines, files)).bytes == 50_000


def test_this_machine_says_what_is_free():
    assert free_memory().bytes > 50 * MB


def test_the_line_recovers_planted_bytes():
    generator = random.Random(0)
    points = [(batch, round(40 * MB + 600_000 * batch + generator.gauss(0, 200_000))) for batch in (16, 32, 64, 128)]
    line = fit_line(points)
    assert line.per_sample == pytest.approx(600_000, rel=0.02)
    assert line.peak(2500) == pytest.approx(40 * MB + 600_000 * 2500, rel=0.02)
    assert line.largest(1540 * MB) == pytest.approx(2500, rel=0.02)
    assert fit_line([(4, 9_000)], per_sample=1_000).fixed == 5_000


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_a_planted_limit_to_three_percent(seed):
    generator = random.Random(seed)
    for _ in range(50):
        limit, most = (int(10 ** generator.uniform(0, 5)) for _ in range(2))
        smallest = generator.choice([1, 2, 32])
        tried = []

        def fits(batch, tried=tried, limit=limit):
            tried.append(batch)
            return batch <= limit

        start = limit * generator.choice([0.01, 0.97, 1.0, 1.02, 5.0])
        found = largest_fitting(start, fits, smallest, most)
        possible = min(limit // smallest, max(1, most // smallest)) * smallest
        assert found % smallest == 0
        assert possible / 1.03 - smallest <= found <= possible
        assert all(smallest <= batch <= max(most, smallest) for batch in tried)
        if 0.95 * limit < start < 1.05 * limit:
            assert len(tried) <= 6


class Planted:
    """Trials with a memory that is known."""

    def __init__(self, fixed, per_sample, share, baseline=300 * MB):
        self.fixed, self.per_sample, self.share, self.baseline = fixed, per_sample, share, baseline

    def run(self, batch, expected=0.0):
        batches = [1, 2, 4, 8] if batch is None else [batch]
        points = [[size, self.fixed + self.per_sample * size] for size in batches]
        held = [point for point in points if self.baseline + point[1] <= self.share]
        ended = "done" if len(held) == len(points) else "out of memory"
        return Note(ended, self.baseline, held, 1, Parts(MB, 2 * MB, 2 * MB, 0.5 * self.per_sample))


def planted(fixed, per_sample, share, samples=100_000):
    return memory._search(Planted(fixed, per_sample, share), Free(share, "given"), share, 1, samples, "cpu", print)


def test_planted_memory_is_found_and_split_into_parts():
    report = planted(fixed=20 * MB, per_sample=MB, share=2_000 * MB)
    most = 0.98 * 1700 - 20  # of what the baseline leaves
    assert most / 1.03 - 1 <= report.largest_worker_batch <= most < report.smallest_that_does_not_fit
    assert report.limited_by == "memory"
    assert sum(part.bytes for part in report.parts) == report.predicted_peak_bytes == report.measured_peak_bytes
    parts = {part.name: part.bytes for part in report.parts}
    assert parts["activations"] == 0.5 * MB * report.largest_worker_batch
    assert parts["workspace"] == (20 - 5) * MB + 0.5 * MB * report.largest_worker_batch
    assert dataclasses.asdict(report)["trials"][0].keys() == {"worker_batch", "fits", "peak_bytes"}


def test_no_more_samples_than_there_are_are_of_interest():
    report = planted(fixed=20 * MB, per_sample=MB, share=2_000 * MB, samples=500)
    assert (report.largest_worker_batch, report.limited_by, report.smallest_that_does_not_fit) == (500, "data", None)


def test_not_even_one_sample_fits():
    with pytest.raises(TooLittleMemory, match=r"training 1 sample at once must fit into 310 MB .* raise --memory"):
        planted(fixed=20 * MB, per_sample=MB, share=310 * MB)


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def test_lack_of_memory_is_told_from_other_errors():
    allocator = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: …")
    for error in (MemoryError(), allocator, torch.OutOfMemoryError("x"), OSError(12, "Cannot allocate memory"),
                  raised(ValueError("wrapped"), MemoryError())):  # fmt: skip
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(2, "no such file")):
        assert not is_out_of_memory(error)


JOB = Job(b"", sw.Recipe(), Placement(), 2, 1_000 * MB, 64, 1000)
RUNNING = Note(baseline=200 * MB)


@pytest.mark.parametrize(
    ("notes", "code", "said", "expected"),
    [
        ([Note("out of memory"), Note("failed", message="lost", exit_code=1, lost_contact=True)], 1, "", 0),
        ([RUNNING, RUNNING], -signal.SIGKILL, "", 0),
        ([RUNNING], -signal.SIGKILL, "", 0),
        ([RUNNING, RUNNING], -signal.SIGSEGV, "", 700 * MB),
        ([RUNNING, RUNNING], -signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", 0),
    ],
)
def test_processes_that_ended_for_lack_of_memory(notes, code, said, expected):
    assert worst(dict(enumerate(notes)), code, said, expected, JOB).ended == "out of memory"


def test_a_crash_far_from_the_limit_is_no_lack_of_memory():
    with pytest.raises(ProcessFailed, match=r"killed by SIGSEGV, its last lines:\n  boom"):
        worst({0: RUNNING, 1: RUNNING}, -signal.SIGSEGV, "boom\n", 100 * MB, JOB)
    with pytest.raises(ProcessFailed, match="ended with exit code 7"):
        worst({}, 7, "", 0, JOB)


def test_an_error_of_the_users_code_keeps_its_words_and_exit_code():
    notes = {
        0: Note("failed", message="lost", exit_code=1, lost_contact=True),
        1: Note("failed", message="m", exit_code=2),
    }
    with pytest.raises(Failed, match=r"^m$") as caught:
        worst(notes, 1, "", 0, JOB)
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "images.py"
    path.write_text(IMAGES)
    return sw.load_task(str(path))


@pytest.fixture(scope="module")
def measured(images):
    told = []
    return largest_worker_batch(images, images.recipe, budget=BUDGET, notify=told.append), told


def test_the_reported_worker_batch_runs_and_twice_as_many_do_not(images, measured):
    report, _ = measured
    largest = report.largest_worker_batch
    assert report.limited_by == "memory"
    assert largest < report.smallest_that_does_not_fit <= 1.031 * largest + 1
    children = Children(images, images.recipe, Placement(), 1, BUDGET, 2000)
    again = children.run(largest)
    assert again.ended == "done"
    assert again.baseline + again.points[0][1] <= BUDGET
    assert children.run(2 * largest).ended == "out of memory"


def test_the_prediction_is_within_ten_percent_of_what_was_measured(images, measured):
    report, told = measured
    assert report.predicted_peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.1)
    assert sum(part.bytes for part in report.parts) == report.predicted_peak_bytes
    parts = {part.name: part.bytes for part in report.parts}
    weights = 4 * sum(parameter.numel() for parameter in images.model().parameters())
    assert parts["weights"] == parts["optimizer state"] == weights
    assert parts["gradients"] == 2 * weights  # the worker's own, and the sum over workers
    assert parts["activations"] > 0.3 * report.predicted_peak_bytes
    assert report.baseline_bytes + report.measured_peak_bytes <= report.process_bytes == BUDGET
    assert told[0].startswith("memory: tracing")
    assert told[-1].startswith("memory: trying worker batch")


def test_loader_processes_that_are_not_counted_are_told(measured, tmp_path):
    report, _ = measured
    assert report.loaders == 0  # tensors
    path = tmp_path / "read.py"
    path.write_text(READ)
    task = sw.load_task(str(path))
    read = largest_worker_batch(task, task.recipe, budget=BUDGET)
    assert read.limited_by == "data"
    assert read.loaders == loader_processes(Placement(), 1) > 0


def test_a_budget_below_the_baseline_is_too_small(images):
    with pytest.raises(TooLittleMemory, match="before training begins; raise --memory") as caught:
        largest_worker_batch(images, images.recipe, budget=60 * MB)
    assert caught.value.exit_code == 1


@pytest.fixture
def failing(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    return lambda how: sw.load_task(str(path), [f"how={how}"])


def test_an_error_in_the_task_is_shown_as_the_users_own(failing):
    task = failing("error")
    with pytest.raises(Failed) as caught:
        largest_worker_batch(task, task.recipe, budget=BUDGET)
    assert "KeyError: 'mine'" in str(caught.value)
    assert "failing.py:8 in loss" in str(caught.value)
    assert "scalewise/measure" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_crash_of_the_child_does_not_end_the_caller(failing):
    task = failing("abort")
    with pytest.raises(ProcessFailed, match="SIGABRT"):
        largest_worker_batch(task, task.recipe, budget=BUDGET)


def test_two_processes_share_the_budget():
    task = sw.load_task("mlp")
    report = largest_worker_batch(task, task.recipe.replace(workers=4), budget=2 * BUDGET, processes=2)
    assert (report.processes, report.process_bytes, report.budget_bytes) == (2, BUDGET, 2 * BUDGET)
    assert (report.largest_worker_batch, report.limited_by) == (1437, "data")


def test_a_task_that_cannot_be_passed_on_says_what_to_do():
    x = torch.rand(8, 3)
    task = sw.Task(model=lambda: nn.Linear(3, 2), train=(x, x), test=(x, x), loss=F.mse_loss)
    with pytest.raises(TaskError, match=r"load it with scalewise\.load_task"):
        largest_worker_batch(task, task.recipe, budget=BUDGET)


def test_a_copy_of_a_loaded_task_with_another_model_is_not_taken_for_the_loaded_one():
    task = sw.load_task("mlp")
    assert task.origin is not None
    assert dataclasses.replace(task, model=lambda: nn.Linear(1, 1)).origin is None
