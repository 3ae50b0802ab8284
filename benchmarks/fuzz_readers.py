"""Every reader of files that anyone may have written, with files that it understands."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import scalewise as sw
from scalewise import records
from scalewise.doctor.diagnose import diagnose_folder
from scalewise.engine.loop import Training
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import (
    RunFolder,
    RunRecipe,
    begin,
    check_same,
    read_recipe,
    stored_environment,
)
from scalewise.errors import RunFolderError
from scalewise.plan import hardware
from scalewise.plan.records import TaskFacts, read_records
from scalewise.present.stored import read_run
from scalewise.recipe import Recipe
from scalewise.runs.bisect import compare
from scalewise.runs.compare.compare import BegunComparison
from scalewise.runs.measure.surface import stored_weights
from scalewise.runs.request import load_request
from scalewise.runs.run import stored_records
from scalewise.stats.outlook import read_points
from scalewise.tasks import images, sources
from scalewise.tasks.sources import DataFile, Source

Read = Callable[[Path, bytes, random.Random], object]
RECIPE = Recipe(workers=2, worker_batch=8, steps=12, optimizer="adam", lr=0.01, threads=1)
FACTS = TaskFacts("linear", "linear", (), 1280, 8, "loss", False)
CONTENT = bytes(range(200)) * 3


@dataclass(frozen=True)
class Reader:
    """Files that are understood, how one is read in an empty folder, and how often its turn comes."""

    seeds: list[bytes]
    read: Read
    share: int = 2


def trained(folder: Path) -> RunFolder:
    """A real run, small."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    with Training(sw.load_task("linear"), RECIPE, sw.Placement(), pause_every=6, alone=True) as training:
        begin(run, RunRecipe("linear", [], RECIPE, []), "cpu", 1)
        for _ in stored_records(training, run, 6):
            pass
    return run


def readers(folder: Path) -> dict[str, Reader]:
    """All of them, by name."""
    run = trained(folder / "run")
    saved = checkpoint.stored(run.checkpoints)[0]
    data = {"plain": CONTENT, "gzip": gzip.compress(CONTENT), "tar": tar_file(), "npz": npz_file()}
    found = {
        "recipe": Reader([run.recipe.read_bytes(), b'{"workers": 4}'], at("r.json", Recipe.load)),
        "records": Reader([run.metrics.read_bytes()], at("metrics.jsonl", _records)),
        "link": Reader([link_file(folder)], at("link.json", hardware.load_link)),
        "points": Reader([b"samples,error\n100,0.5\n200,0.4\n", b"100,0.5\n200,0.4\n"], at("points.csv", read_points)),
        "request": Reader(
            [request_file()], at("request.json", lambda path: load_request(path.parent, BegunComparison))
        ),
        "watched": Reader([watched_file()], at("process-0.jsonl", lambda path: diagnose_folder(path.parent)), 1),
        "index": Reader([(saved / "index.json").read_bytes()], _in_checkpoint(saved, "index.json")),
        "shard": Reader([(saved / "shard-0.safetensors").read_bytes()], _in_checkpoint(saved, "shard-0.safetensors")),
        "model": Reader([run.model.read_bytes()], _in_run(run, "model.safetensors", stored_weights)),
        "image": Reader(pictures(), _image),
        **{f"data, {kind}": Reader([content], _data(kind)) for kind, content in data.items()},
    }
    for name in ("recipe.json", "metrics.jsonl", "env.json", "result.json"):
        found[f"run, {name}"] = Reader([(run.path / name).read_bytes()], _in_run(run, name, _whole_run), 1)
    return found


def at(name: str, read: Callable[[Path], object]) -> Read:
    """Read a file of that name."""

    def run(folder: Path, content: bytes, chance: random.Random) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return run


def _records(path: Path) -> None:
    with suppress(RunFolderError):  # the other reader has an answer to that
        [*records.read(path)]
    records.keep_until(path, 6)
    [*records.read(path)]


def _in_run(run: RunFolder, name: str, read: Callable[[Path], object]) -> Read:
    """Read a run of which one file was changed."""

    def go(folder: Path, content: bytes, chance: random.Random) -> object:
        for file in ("recipe.json", "env.json", "metrics.jsonl", "result.json", "model.safetensors"):
            shutil.copy(run.path / file, folder / file)
        (folder / name).write_bytes(content)
        return read(folder)

    return go


def _whole_run(folder: Path) -> None:
    """Everything that is read of a run: to show it, to go on with it, to compare it, to judge it, to plan by it."""
    run = RunFolder(folder)
    read_run(folder)
    stored_environment(run)
    for read in (
        lambda: check_same(read_recipe(run), read_recipe(run), run, has_validation=False),
        lambda: compare(run, run, (read_recipe(run), read_recipe(run))),
        lambda: diagnose_folder(folder),
        lambda: read_records([folder], FACTS),
    ):
        try:
            read()
        except sw.ScalewiseError:
            continue


def _in_checkpoint(saved: Path, name: str) -> Read:
    """Read a checkpoint of which one file was changed; in half of the cases with hashes that are right again."""

    def go(folder: Path, content: bytes, chance: random.Random) -> object:
        place = folder / saved.name
        shutil.copytree(saved, place)
        (place / name).write_bytes(content)
        if chance.random() < 0.5:
            _vouch_for(place, name)
        return checkpoint.model_tensors(place)

    return go


def _vouch_for(place: Path, name: str) -> None:
    """Make the index's hashes those of what is there, as somebody hostile would."""
    try:
        document = json.loads((place / "index.json").read_bytes())
        if name != "index.json":
            content = (place / name).read_bytes()
            stored = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            document["content"]["files"][name] = stored
        text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
        document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (place / "index.json").write_text(json.dumps(document))
    except (ValueError, TypeError, KeyError, RecursionError):
        return


def _image(folder: Path, content: bytes, chance: random.Random) -> None:
    (folder / "picture.png").write_bytes(content)
    images.check(folder / "picture.png")
    images.decode(folder / "picture.png", 8)


def _data(kind: str) -> Read:
    """Read a data set of one file from a folder."""
    file = DataFile("content", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    name = {"plain": "content", "gzip": "content.gz", "tar": "all.tar.gz", "npz": "all.npz"}[kind]
    if kind == "npz":
        stored = sources._idx(np.frombuffer(CONTENT, np.uint8))
        file = DataFile("content", len(stored), hashlib.sha256(stored).hexdigest())
    source = Source(
        "fuzzed", (file,), ("fuzzed",), "http://127.0.0.1:9", archive="all.tar.gz", arrays=("all.npz", {"x": "content"})
    )

    def go(folder: Path, content: bytes, chance: random.Random) -> object:
        (folder / name).write_bytes(content)
        return sources._from_root(source, folder, [])

    return go


def tar_file() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo("folder/content")
        member.size = len(CONTENT)
        archive.addfile(member, io.BytesIO(CONTENT))
    return stream.getvalue()


def npz_file() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, x=np.frombuffer(CONTENT, np.uint8))
    return stream.getvalue()


def link_file(folder: Path) -> bytes:
    hardware.save_link(folder / "link.json", hardware.Link("loopback", 1e-5, 1e9, "by hand"))
    return (folder / "link.json").read_bytes()


def _request(path: Path) -> BegunComparison:
    return load_request(path.parent, BegunComparison)


def request_file() -> bytes:
    fields: dict[str, object] = {
        "task": "digits",
        "settings": [],
        "given": {},
        "tune": None,
        "hold_out": False,
        "rows": None,
    }
    return json.dumps({**fields, "workers": "8", "seeds": 2}).encode()


def watched_file() -> bytes:
    process = {"kind": "process", "process": 0, "processes": 1, "optimizer": "SGD", "parameters": 10}
    step = {"kind": "step", "lr": 0.1, "samples": [8], "seconds": 0.1, "loss": 2.0, "square": 1.0, "first_square": 1.0}
    lines = [process, *({**step, "step": number} for number in range(12)), {"kind": "labels", "counts": [5, 3]}]
    return "\n".join(map(json.dumps, lines)).encode()


def pictures() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 14, 3), np.uint8)
    found = []
    for kind in ("PNG", "JPEG"):
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, kind)
        found.append(stream.getvalue())
    return found
