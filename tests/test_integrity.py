"""Whatever happens to the files of a run: what is loaded is what was written, or it is named and set aside."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import scalewise as sw
from conftest import environment
from scalewise import records
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import RunFolder, RunRecipe, begin, holding, make_folder, newest
from scalewise.engine.store.shards import verified_index
from scalewise.engine.sums import replicas
from scalewise.errors import CheckpointError, DamagedCheckpoint, ReplicasDiffer, RunFolderError
from scalewise.runs.run import stored_records

RECIPE = sw.Recipe(workers=2, worker_batch=8, steps=30, optimizer="adam", lr=0.01, threads=1)
CORRUPTIONS = 240


def training() -> Training:
    return Training(sw.load_task("linear"), RECIPE, sw.Placement(), pause_every=10, alone=True)


def state(of: Training) -> tuple[int, str]:
    """The step, and a hash of everything that a checkpoint restores."""
    entries = {entry.name: entry.tensor for entry in of.strategy.state()}
    text = json.dumps([vars(of.progress), of.noise.state()], sort_keys=True)
    return of.progress.step, sha256({**of.strategy.model.tensors(), **entries}) + text


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[RunFolder, dict[int, str]]:
    """A run with the checkpoints of steps 20 and 30, and the states they hold."""
    folder = RunFolder(tmp_path_factory.mktemp("good"))
    states = {}
    with training() as one:
        begin(folder, RunRecipe("linear", [], RECIPE, []), "cpu", 1)
        for record in stored_records(one, folder, 10):
            if record.kind != "result":
                states.update([state(one)])
    assert [path.name for path in checkpoint.stored(folder.checkpoints)] == ["step-30", "step-20"]
    return folder, states


def rewritten(path: Path, change) -> None:
    """An index with other content and the right hash, as somebody hostile would write it."""
    document = json.loads(path.read_bytes())
    change(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(document | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def zero(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    start = chance.randrange(len(content))
    stop = chance.randint(start + 1, len(content))
    path.write_bytes(content[:start] + bytes(stop - start) + content[stop:])


def append(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 5000)))


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randint(0, 5000)))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def swap_with_older(path: Path, chance: random.Random) -> None:
    shutil.copy(path.parent.with_name("step-20") / path.name, path)


def pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


CHANGES = [flip, flip, truncate, zero, append, garbage, remove, swap_with_older, pipe, folder, endless]


@pytest.mark.parametrize("part", range(4))
def test_a_corrupted_checkpoint_is_never_loaded(good, tmp_path, part):
    run, states = good
    with training() as one:
        for seed in range(part, CORRUPTIONS, 4):
            chance = random.Random(seed)
            place = tmp_path / str(seed)
            shutil.copytree(run.checkpoints, place)
            files = sorted((place / "step-30").iterdir())
            change = CHANGES[seed // len(files) % len(CHANGES)]
            change(files[seed % len(files)], chance)
            same = all(
                path.is_file() and not path.is_symlink() and path.read_bytes() == before.read_bytes()
                for path, before in zip(files, sorted((run.checkpoints / "step-30").iterdir()), strict=True)
            )
            assert not same, change
            problems = checkpoint.load_newest(one, place)
            assert state(one) == (20, states[20]), (seed, change)
            assert "step-30" in problems[0]
            assert sorted(path.name for path in place.iterdir()) == ["damaged-step-30", "step-20"]


HOSTILE = {
    "a path": lambda index: index["files"].update({"../../secret": {"bytes": 1, "sha256": "0"}}),
    "a negative size": lambda index: index["tensors"]["model.0.weight"].update(shape=[-1, -8]),
    "a size beyond memory": lambda index: index["tensors"]["model.0.weight"].update(shape=[1 << 60]),
    "a hole": lambda index: index["tensors"]["model.0.weight"]["pieces"][0].update(start=1),
    "another key": lambda index: index["tensors"]["model.0.weight"]["pieces"][0].update(key="model.0.bias@0"),
    "no such file": lambda index: index["tensors"]["model.0.weight"]["pieces"][0].update(file="shard-9.safetensors"),
    "another step": lambda index: index["progress"].update(step=31),
    "a step below 0": lambda index: index["progress"].update(step=-30),
    "words for numbers": lambda index: index["progress"].update(seconds="long"),
    "another recipe": lambda index: index["recipe"].update(lr=0.5),
    "no recipe": lambda index: index.update(recipe={"lr": "high"}),
    "records that are none": lambda index: index.update(records=['{"kind": "step", "step": "last"}']),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_made_to_deceive_is_refused(good, tmp_path, what):
    shutil.copytree(good[0].checkpoints, tmp_path / "saved")
    index = tmp_path / "saved" / "step-30" / "index.json"
    names = json.loads(index.read_bytes())["content"]["tensors"]
    assert {"model.0.weight", "model.0.bias"} <= names.keys()
    rewritten(index, HOSTILE[what])
    with training() as one:
        assert len(checkpoint.load_newest(one, tmp_path / "saved")) == 1
        assert state(one) == (20, good[1][20])


def test_a_rewritten_index_alone_is_no_damage(good, tmp_path):
    """What the test above changes is what is refused."""
    shutil.copytree(good[0].checkpoints, tmp_path / "saved")
    rewritten(tmp_path / "saved" / "step-30" / "index.json", lambda index: None)
    with training() as one:
        assert checkpoint.load_newest(one, tmp_path / "saved") == []
        assert state(one) == (30, good[1][30])


def test_reading_checkpoints_leaves_nothing_in_memory(good):
    path = good[0].checkpoints / "step-30"

    def read(times: int) -> int:
        for _ in range(times):
            assert checkpoint.model_tensors(path)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = read(20)
        assert read(100) - before < 100 * 20  # bytes; a number alone takes 28
    finally:
        tracemalloc.stop()


def test_checkpoints_whose_folders_were_swapped_are_refused(good, tmp_path):
    for name, other in (("step-20", "step-30"), ("step-30", "step-20")):
        shutil.copytree(good[0].checkpoints / name, tmp_path / other)
    with training() as one, pytest.raises(CheckpointError, match="none of the checkpoints can be used"):
        checkpoint.load_newest(one, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]


def test_a_checkpoint_deleted_while_it_is_read(good, tmp_path, monkeypatch):
    shutil.copytree(good[0].checkpoints, tmp_path / "saved")

    def verified_and_gone(path: Path):
        index = verified_index(path)
        if path.name == "step-30":
            shutil.rmtree(path)
        return index

    monkeypatch.setattr(checkpoint, "verified_index", verified_and_gone)
    with training() as one:
        (problem,) = checkpoint.load_newest(one, tmp_path / "saved")
        assert "step-30" in problem
        assert state(one) == (20, good[1][20])


def test_a_good_checkpoint_of_the_same_step_stays(good, tmp_path):
    shutil.copytree(good[0].checkpoints, tmp_path / "saved")
    before = (tmp_path / "saved" / "step-30" / "index.json").read_bytes()
    with training() as one:
        checkpoint.load_newest(one, tmp_path / "saved")
        one.progress.seconds += 1
        checkpoint.save(one, tmp_path / "saved")
    assert (tmp_path / "saved" / "step-30" / "index.json").read_bytes() == before
    assert len([*(tmp_path / "saved").iterdir()]) == 2


def test_a_flipped_number_in_the_recipe_is_seen(good, tmp_path, scalewise_here):
    shutil.copytree(good[0].path, tmp_path / "run")
    text = (tmp_path / "run" / "recipe.json").read_text()
    (tmp_path / "run" / "recipe.json").write_text(text.replace('"lr": 0.01', '"lr": 0.11'))
    outcome = scalewise_here("train", "linear", "--resume", "run", "--steps", 40, "--processes", 1)
    assert outcome.code == 1
    assert "lr=0.01" in outcome.stderr
    assert "0.11" in outcome.stderr
    assert len(checkpoint.stored(tmp_path / "run" / "checkpoints")) == 2


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": 5}, "task: "),
        ({"settings": ["a=1", 7]}, "settings.1: "),
        ({"derived": [{"field": {}, "value": [], "reason": 0}]}, "derived.0.field: "),
        ({"search": {"steps": 1}}, "search.samples: "),
        ({"pilot": {"steps": 1}}, "search.samples: "),  # its name before auto raced
        ({"recipe": {"lr": "high"}}, "recipe: lr must be"),
    ],
)
def test_a_recipe_of_something_else_is_refused(good, tmp_path, scalewise_here, changes, what):
    shutil.copytree(good[0].path, tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    outcome = scalewise_here("train", "linear", "--resume", "run", "--steps", 40, "--processes", 1)
    assert outcome.code == 2
    assert f"must be a stored recipe, got something else: {what}" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_links_in_a_run_folder_are_not_written_through(good, tmp_path, scalewise_here):
    shutil.copytree(good[0].path, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("r+") as file:
        file.write("export PATH=hostile")
    mine = tmp_path / "mine"
    mine.write_text("my own")
    for name in ("damaged-metrics.jsonl", "model.tmp", f".recipe.json.{os.getpid()}"):
        (tmp_path / "run" / name).symlink_to(mine)
    resume = ["train", "linear", "--resume", "run", "--processes", 1]
    outcome = scalewise_here(*resume, "--steps", 40, "--json")
    assert outcome.json["steps"] == 40
    assert "damaged-metrics.jsonl-2" in outcome.stderr
    metrics, lock = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / ".lock"
    metrics.unlink()
    metrics.symlink_to(tmp_path / "new")
    assert scalewise_here(*resume, "--steps", 50).code == 0
    lock.unlink()
    lock.symlink_to(mine)
    outcome = scalewise_here(*resume, "--steps", 60)
    assert outcome.code == 2
    assert ".lock must be a plain file" in outcome.stderr
    assert mine.read_text() == "my own"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("file", ["env.json", "metrics.jsonl", "result.json"])
def test_damaged_records_do_not_stop_a_run(good, tmp_path, scalewise_here, file):
    shutil.copytree(good[0].path, tmp_path / "run")
    path = tmp_path / "run" / file
    content = path.read_bytes()
    middle = content.index(b"\n", len(content) // 2)
    damaged = content[:middle] + b"\xff\x00{" + content[middle + 3 :]
    path.write_bytes(damaged)
    outcome = scalewise_here("train", "linear", "--resume", "run", "--steps", 40, "--processes", 1, "--json")
    assert outcome.json["steps"] == 40
    if file == "metrics.jsonl":
        assert "damaged-metrics.jsonl" in outcome.stderr
        assert (tmp_path / "run" / "damaged-metrics.jsonl").read_bytes() == damaged
    last = [record["step"] for record in records.read(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"][
        -1
    ]
    assert last == 40
    json.loads((tmp_path / "run" / "env.json").read_bytes())


def test_a_damaged_model_is_not_used(good, tmp_path, scalewise_here):
    shutil.copytree(good[0].path, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    outcome = scalewise_here("measure", "linear", "--sharpness", "--weights", "run", "--quiet")
    assert outcome.code == 1
    assert "SHA-256" in outcome.stderr


HOLD = """
import sys, time
from pathlib import Path
from scalewise.engine.store.folder import holding
with holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_runs_in_one_folder(good, tmp_path, scalewise_here):
    shutil.copytree(good[0].path, tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, env=environment())
    try:
        assert holder.stdout.readline() == b"held\n"
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        outcome = scalewise_here("train", "linear", "--resume", "run", "--steps", 40, "--processes", 1)
        assert outcome.code == 2
        assert f"in use by another run (process {holder.pid}" in outcome.stderr
        assert len(outcome.stderr.splitlines()) == 1
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    outcome = scalewise_here("train", "linear", "--resume", "run", "--steps", 40, "--processes", 1, "--json")
    assert outcome.json["steps"] == 40


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    reader, writer = os.pipe()
    began, begin_it = os.pipe()
    with holding(tmp_path), pytest.raises(RunFolderError, match="in use"), holding(tmp_path):
        pass
    with holding(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.write(begin_it, b"!")
            os.read(reader, 1)  # until the parent is done
            os._exit(0)
        assert os.read(began, 1)
    with holding(tmp_path):
        os.close(writer)
    for descriptor in (reader, began, begin_it):
        os.close(descriptor)
    assert os.waitpid(child, 0)[1] == 0


def test_the_newest_run_is_not_a_matter_of_clocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    future = tmp_path / "runs" / "mine-20990101-000000"
    for number, path in enumerate([future, tmp_path / "runs" / "mine-20261116-101500"]):
        path.mkdir(parents=True)
        (path / "recipe.json").touch()
        os.utime(path / "recipe.json", (number, number))
    assert newest("mine", Path("runs"), "recipe.json") == Path("runs/mine-20990101-000000")
    after = make_folder(None, "mine").path
    (after / "recipe.json").touch()
    os.utime(after / "recipe.json", (0, 0))
    assert newest("mine", Path("runs"), "recipe.json") == after
    assert make_folder(None, "mine").path == Path("runs/mine-20990101-000000-3")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB, and a way to fill it."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small file system needs the rights of root: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_full_disk_stops_the_run_and_nothing_is_lost(small_disk, good):
    run = RunFolder(small_disk / "run")
    run.path.mkdir()
    with training() as one:
        stored = stored_records(one, run, 10)
        while next(stored).step < 15:
            pass
        fill(small_disk)
        with pytest.raises(checkpoint.StorageFull, match="No space left"):
            list(stored)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-10"]
    (small_disk / "filler").unlink()
    with training() as one:
        assert checkpoint.load_newest(one, run.checkpoints) == []
        assert one.progress.step == 10
        *_, last = stored_records(one, run, 10)
    assert last.weights_sha256 == json.loads(good[0].result.read_text())["weights_sha256"]


def test_a_full_disk_is_passed_over_if_asked(small_disk, good):
    run = RunFolder(small_disk / "run")
    run.path.mkdir()
    warnings: list[str] = []
    seen = []
    with training() as one:
        for record in stored_records(one, run, 10, "continue", warnings.append):
            if record.kind == "step" and record.step == 15:
                fill(small_disk)
            if record.kind == "step" and record.step == 25:
                seen = [path.name for path in run.checkpoints.iterdir()]
                (small_disk / "filler").unlink()
            if record.kind == "epoch":
                assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-10", "step-30"]
    assert seen == ["step-10"]
    assert len(warnings) == 1
    assert "--on-disk-full continue" in warnings[0]
    assert record.weights_sha256 == json.loads(good[0].result.read_text())["weights_sha256"]
    assert [one["step"] for one in records.read(run.metrics) if one["kind"] == "step"] == [*range(1, 31)]
    assert not [path.name for path in run.path.rglob("*") if "tmp" in path.name]


DRIFT = """
import os
import torch
import scalewise as sw
from torch import nn
from torch.nn import functional as F

class Drifting(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += self.training
        if self.calls == 33 and os.environ.get("RANK") == "1" and not os.path.exists("repaired"):
            bits = self.weight.data.view(torch.int32)
            bits[1, 2] ^= 1 << 3
        return super().forward(x)

def task():
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    return sw.Task(name="drift", model=lambda: Drifting(4, 3), train=(x, x.argmax(1) % 3), test=(x, x.argmax(1) % 3),
                   loss=F.cross_entropy, recipe=sw.Recipe(worker_batch=8, optimizer="sgd", lr=0.1))
"""


def test_a_bit_that_flips_on_one_process_is_found(scalewise, tmp_path):
    (tmp_path / "drift.py").write_text(DRIFT)
    flags = ["--workers", 2, "--recipe", "plain", "--steps", 60, "--checkpoint-steps", 15]
    whole = scalewise("train", "drift.py", *flags, "--processes", 1, "--out", "one", "--json").json
    outcome = scalewise("train", "drift.py", *flags, "--processes", 2, "--out", "two", "--check-replicas", 10)
    assert outcome.code == 1
    assert "after step 40 process 1 (worker 1) differs" in outcome.stderr
    assert "after step 30 they were equal" in outcome.stderr
    (tmp_path / "repaired").touch()
    again = scalewise("train", "drift.py", "--resume", "two", "--processes", 2, "--json").json
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_the_odd_one_out_is_named():
    same = [[1, 2], [1, 2], [1, 2]]
    replicas.check(same, 4, 10, 0)
    with pytest.raises(ReplicasDiffer, match=r"process 0 \(worker 0\) differs"):
        replicas.check([[1, 3], [1, 2], [1, 2]], 3, 10, 0)
    with pytest.raises(ReplicasDiffer, match=r"processes 1 \(workers 2 to 3\), 2 \(workers 4 to 5\) differ "):
        replicas.check([[1, 2], [1, 3], [1, 4]], 6, 10, 0)


def test_verification_names_what_is_wrong(good, tmp_path):
    shutil.copytree(good[0].checkpoints / "step-30", tmp_path / "step-30")
    shard = tmp_path / "step-30" / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"shard-0.safetensors has [\d,]+ bytes, its index says [\d,]+"):
        verified_index(tmp_path / "step-30")
