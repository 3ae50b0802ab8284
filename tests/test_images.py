"""Folders of photographs, loader processes, and what is wrong with either."""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
import time

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import scalewise as sw
from scalewise.engine.data.feed import ahead
from scalewise.engine.data.loaders import _until_closed
from scalewise.errors import DataError, ProcessFailed, TaskError
from scalewise.tasks import images
from test_resume import start, wait_for


def photographs(folder, count: int = 12, side: int = 40, classes=("cat", "dog", "emu")):
    """JPEG and PNG files whose class is their strongest colour."""
    generator = np.random.default_rng(0)
    for channel, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 90, (side, side + 7, 3)).astype(np.uint8)
            pixels[:, :, channel] += 120
            suffix = "png" if number % 3 == 0 else "JPG" if number % 3 == 1 else "jpeg"
            Image.fromarray(pixels).save(folder / name / f"{number}.{suffix}")
    return folder


@pytest.fixture
def folder(tmp_path):
    return photographs(tmp_path / "pictures")


SMALL = ["--set", "size=16", "--set", "width=4", "--worker-batch", "6"]


def test_a_folder_is_learned(scalewise, tmp_path):
    settings = ["--set", f"folder={photographs(tmp_path / 'many', 40)}", "--set", "size=16", "--set", "width=8"]
    flags = ["--worker-batch", 12, "--epochs", 15, "--threads", 1, "--json", "--quiet"]
    result = scalewise("train", "images", *settings, *flags).json
    assert result["test"]["accuracy"] > 0.9


def test_one_hash_on_any_number_of_processes_and_loaders(scalewise, folder):
    flags = [*SMALL, "--set", f"folder={folder}", "--workers", 3, "--steps", 4, "--json", "--quiet"]
    placements = [(1, 0), (2, 2), (3, 1)]
    found = {
        scalewise("train", "images", *flags, "--processes", processes, "--loaders", loaders).json["weights_sha256"]
        for processes, loaders in placements
    }
    assert len(found) == 1


def test_the_network_has_15_convolutions_6_poolings_and_3_dense_layers():
    for size in (8, 40, 64, 100):
        model = images.vgg(classes=5, size=size, width=2, bn=True)
        assert model(torch.zeros(2, 3, size, size, dtype=torch.uint8)).shape == (2, 5)
    kinds = [type(module) for module in model.modules()]
    assert [kinds.count(kind) for kind in (torch.nn.Conv2d, torch.nn.MaxPool2d, torch.nn.Linear)] == [15, 6, 3]


def test_images_are_decoded_as_their_middle_square(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = (200, 100, 50)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    decoded = images.decode(tmp_path / "wide.png", 8)
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, torch.tensor([200, 100, 50], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8))
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "grey.png")
    assert images.decode(tmp_path / "grey.png", 8).shape == (3, 8, 8)


def test_train_and_test_folders_are_used_as_they_are(tmp_path):
    photographs(tmp_path / "train", 4)
    photographs(tmp_path / "val", 2)
    task = sw.load_task("images", [f"folder={tmp_path}"])
    assert (len(task.train), len(task.test)) == (12, 6)
    shutil.rmtree(tmp_path / "val" / "emu")
    with pytest.raises(DataError, match="same classes, only one has emu"):
        sw.load_task("images", [f"folder={tmp_path}"])
    shutil.rmtree(tmp_path / "val")
    with pytest.raises(DataError, match="has train but none of test, val"):
        sw.load_task("images", [f"folder={tmp_path}"])


def truncated(path):
    path.write_bytes(path.read_bytes()[:-300])


def huge(path):
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (50_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    path.write_bytes(header + b"\0" * 300)


@pytest.mark.parametrize("name", ["cat/0.png", "dog/1.JPG"])
@pytest.mark.parametrize(
    "spoil",
    [truncated, huge, lambda path: path.write_bytes(b""), lambda path: path.write_text("not an image")],
    ids=["truncated", "huge", "empty", "text"],
)
def test_an_unreadable_image_is_named(scalewise, tmp_path, folder, name, spoil):
    spoil(folder / name)
    outcome = scalewise("train", "images", "--set", f"folder={folder}")
    assert outcome.code == 2
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert f"image {folder / name} must be a readable JPEG or PNG file" in outcome.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_image_that_spoils_later_is_named_too(scalewise, folder, loaders):
    """The head and the tail are good, the middle is not: only decoding finds it."""
    path = folder / "cat/0.png"
    data = bytearray(path.read_bytes())
    data[60:400] = bytes(340)
    path.write_bytes(data)
    outcome = scalewise("train", "images", *SMALL, "--set", f"folder={folder}", "--loaders", loaders)
    assert outcome.code == 2
    assert str(path) in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "found none"),
        (lambda folder: folder.mkdir(), "no folder in"),
        (lambda folder: (folder / "cat").mkdir(parents=True), "no image in"),
    ],
)
def test_an_empty_folder_is_refused(scalewise, tmp_path, make, words):
    make(tmp_path / "pictures")
    outcome = scalewise("train", "images", "--set", "folder=pictures")
    assert outcome.code == 2
    assert len(outcome.stderr.splitlines()) == 1
    assert words in outcome.stderr
    assert "folder" in outcome.stderr


@pytest.mark.parametrize("setting", ["size=3", "width=0"])
def test_settings_are_checked(folder, setting):
    with pytest.raises(TaskError, match="size must be at least 8"):
        sw.load_task("images", [f"folder={folder}", setting])


OWN = """
    import os, time, torch, scalewise as sw
    from torch.nn import functional as F

    class Mine(torch.utils.data.Dataset):
        def __init__(self, seconds, bad):
            self.seconds, self.bad = seconds, bad

        def __len__(self):
            return 240

        def __getitem__(self, index):
            time.sleep(self.seconds)
            if index == 77:
                {body}
            return torch.randn(3) + index % 2, index % 2

        def describe(self, index):
            return f"row {{index}} of mine.csv"

    class Slow(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                time.sleep({step})
            return super().forward(x)

    def task(seconds: float = 0.0, bad: bool = False, iterable: bool = False):
        data = Mine(seconds, bad)
        test = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        train = (data[i] for i in range(8)) if iterable else data
        return sw.Task(model=lambda: Slow(3, 2), train=train, test=test, loss=F.cross_entropy)
"""


def own(tmp_path, body: str = "pass", step: float = 0.0):
    (tmp_path / "mine.py").write_text(textwrap.dedent(OWN).format(body=body, step=step))


@pytest.mark.parametrize("loaders", [0, 2])
def test_an_error_in_a_data_set_shows_the_users_frames_only(scalewise, tmp_path, loaders):
    own(tmp_path, "raise KeyError('no such row')")
    outcome = scalewise("train", "mine.py", "--epochs", 1, "--loaders", loaders)
    assert outcome.code == 1
    assert "no such row" in outcome.stderr
    assert "mine.py:15 in __getitem__" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "site-packages" not in outcome.stderr


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_value_that_is_not_finite_names_what_the_data_set_calls_it(scalewise, tmp_path, loaders):
    own(tmp_path, "return torch.full((3,), float('inf')), 0")
    outcome = scalewise("train", "mine.py", "--epochs", 1, "--loaders", loaders)
    assert outcome.code == 1
    assert "got inf in sample 77 (row 77 of mine.csv)" in outcome.stderr


def test_a_label_without_an_output_in_a_data_set(scalewise, tmp_path):
    own(tmp_path, "return torch.zeros(3), 2")
    outcome = scalewise("train", "mine.py", "--epochs", 1)
    assert outcome.code == 2
    assert "Target 2 is out of bounds" in outcome.stderr


def test_a_loader_process_that_dies_is_said(scalewise, tmp_path):
    own(tmp_path, "os.kill(os.getpid(), 9)")
    outcome = scalewise("train", "mine.py", "--epochs", 1, "--loaders", 1)
    assert outcome.code == 1
    assert "a loader process died" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_loader_process_that_dies_while_it_hands_a_batch_over_is_said_too(error):
    class Torn:
        def __iter__(self):
            return self

        def __next__(self):
            raise error

        def _shutdown_workers(self):
            self.ended = True

    batches = Torn()
    with pytest.raises(ProcessFailed, match="a loader process died"):
        next(_until_closed(batches))
    assert batches.ended


def test_iterable_data_are_refused_with_what_to_do(scalewise, tmp_path):
    own(tmp_path)
    outcome = scalewise("train", "mine.py", "--set", "iterable=true")
    assert outcome.code == 2
    assert "can only be iterated; load it into tensors, or index it by position" in outcome.stderr


def test_no_loader_process_outlives_a_killed_run(tmp_path):
    own(tmp_path)
    process = start(tmp_path, "train", "mine.py", "--epochs", "10000", "--loaders", "2", "--out", "run")
    wait_for(lambda: (tmp_path / "run" / "checkpoints").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_ctrl_c_reaches_the_loaders_too_and_the_state_is_saved(tmp_path):
    own(tmp_path)
    process = start(tmp_path, "train", "mine.py", "--epochs", "10000", "--loaders", "2", "--out", "run")
    wait_for(lambda: (tmp_path / "run" / "checkpoints").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    for member in [*children, process]:  # as a terminal does
        member.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "its state is saved" in stderr
    assert not psutil.wait_procs(children, timeout=10)[1]


def waited_share(scalewise, tmp_path, loaders: int) -> float:
    """The share of the steps' time spent waiting for samples, without the first steps, from the records."""
    run = f"run-{loaders}"
    flags = ["--set", "seconds=0.006", "--worker-batch", 20, "--steps", 22, "--loaders", loaders, "--out", run]
    assert scalewise("train", "mine.py", *flags, "--quiet").code == 0
    lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    first, *measured = steps[5:]
    return sum(step["input_seconds"] for step in measured) / (measured[-1]["seconds"] - first["seconds"])


def test_two_loaders_keep_up_where_one_cannot(scalewise, tmp_path):
    """A sample takes 6 ms and 20 samples 120 ms, a step 90 ms; sleeping stands for work, so two cores are enough.

    With real images and a free machine the share is below 5 %: benchmarks/loaders.py.
    """
    own(tmp_path, step=0.09)
    assert waited_share(scalewise, tmp_path, 1) > 0.15
    assert waited_share(scalewise, tmp_path, 2) < 0.1


def test_batches_prepared_by_a_thread_come_in_order_with_their_errors():
    assert list(ahead(iter(range(50)))) == list(range(50))

    def failing():
        yield 1
        raise KeyError("mine")

    batches = ahead(failing())
    assert next(batches) == 1
    with pytest.raises(KeyError, match="mine"):
        next(batches)
    began = time.perf_counter()
    unfinished = ahead(iter(range(1000)))
    next(unfinished)
    unfinished.close()
    assert time.perf_counter() - began < 5
