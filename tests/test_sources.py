"""Finding, checking and downloading data files."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

from conftest import environment
from scalewise.errors import DataError
from scalewise.tasks import sources
from scalewise.tasks.sources import DataFile, Labels, Source


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (20, 3, 3), np.uint8)
LABELS = GENERATOR.integers(0, 10, 20).astype(np.uint8)
CONTENTS = {"images-ubyte": idx(IMAGES), "labels-ubyte": idx(LABELS)}


def described(name: str, labels: Labels | None = None) -> DataFile:
    return DataFile(name, len(CONTENTS[name]), hashlib.sha256(CONTENTS[name]).hexdigest(), labels)


TINY = Source(
    name="tiny",
    files=(described("images-ubyte"), described("labels-ubyte", Labels(8, 1, 10))),
    folders=("tiny", "Tiny/raw"),
    address="http://127.0.0.1:9",
    arrays=("tiny.npz", {"x": "images-ubyte", "y": "labels-ubyte"}),
)
PACKED = Source(
    name="packed", files=TINY.files, folders=("packed-bin",), address="http://127.0.0.1:9", archive="p.tar.gz"
)


@pytest.fixture(autouse=True)
def _alone_in_the_world(tmp_path, monkeypatch):
    """No cache of this machine's user is looked into or written to."""
    for name in ("SCALEWISE_DATA", "KERAS_HOME", "XDG_CACHE_HOME", "SCALEWISE_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def put(folder, packed: bool = True, **changed: bytes):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (CONTENTS | {key.replace("_", "-"): value for key, value in changed.items()}).items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)


def archive(path, names=tuple(CONTENTS)):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(f"packed-bin/{name}")
            member.size = len(CONTENTS[name])
            file.addfile(member, io.BytesIO(CONTENTS[name]))


@pytest.mark.parametrize("place", [
    "data/tiny", "home/.cache/scalewise/tiny", "home/.keras/datasets/tiny", "home/data/Tiny/raw", "cwd/data/Tiny/raw",
])  # fmt: skip
@pytest.mark.parametrize("packed", [True, False])
def test_files_are_found_in_every_place_and_layout(tmp_path, place, packed):
    put(tmp_path / place, packed)
    given = tmp_path / "data" if place.startswith("data") else None
    assert sources.read(TINY, given) == CONTENTS
    assert sources.find(TINY, given).resolve() == tmp_path / place


def test_the_folder_of_the_files_itself_may_be_named(tmp_path):
    put(tmp_path / "anything")
    assert sources.read(TINY, tmp_path / "anything") == CONTENTS


def test_the_environment_names_a_place(tmp_path, monkeypatch):
    put(tmp_path / "mine" / "tiny")
    monkeypatch.setenv("SCALEWISE_DATA", str(tmp_path / "mine"))
    assert sources.read(TINY) == CONTENTS


def test_keras_arrays_and_archives_are_read(tmp_path):
    folder = tmp_path / "home/.keras/datasets"
    folder.mkdir(parents=True)
    np.savez(folder / "tiny.npz", x=IMAGES, y=LABELS)
    assert sources.read(TINY) == CONTENTS
    archive(tmp_path / "data/p.tar.gz")
    assert sources.read(PACKED, tmp_path / "data") == CONTENTS
    assert sources.find(PACKED, tmp_path / "data") == tmp_path / "data/p.tar.gz"


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    folder = tmp_path / "data"
    folder.mkdir()
    np.savez(folder / "tiny.npz", x=np.array([Trap()], dtype=object), y=LABELS)
    with pytest.raises(DataError, match="Keras"):
        sources.read(TINY, folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"images_ubyte": CONTENTS["images-ubyte"][:-5]}, "is truncated.*must hold 196 bytes, got 191"),
        ({"images_ubyte": CONTENTS["images-ubyte"] + b"x"}, "too long"),
        ({"images_ubyte": CONTENTS["images-ubyte"][:-1] + b"\0"}, "SHA-256"),
        ({"labels_ubyte": CONTENTS["labels-ubyte"][:-1] + b"\x0b"}, "got 11 at sample 19"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, changed, words):
    put(tmp_path / "data/tiny", **changed)
    with pytest.raises(DataError, match=words) as caught:
        sources.read(TINY, tmp_path / "data")
    assert f"{next(iter(changed)).replace('_', '-')}.gz" in str(caught.value)


def test_a_torn_gzip_file_is_truncated(tmp_path):
    put(tmp_path / "data/tiny")
    path = tmp_path / "data/tiny/images-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="truncated"):
        sources.read(TINY, tmp_path / "data")


def test_a_bomb_is_not_unpacked(tmp_path):
    put(tmp_path / "data/tiny", images_ubyte=bytes(300_000_000))
    with pytest.raises(DataError, match="more than 196"):
        sources.read(TINY, tmp_path / "data")


def test_a_damaged_file_in_a_cache_is_passed_over(tmp_path):
    put(tmp_path / "home/.cache/scalewise/tiny", images_ubyte=b"nonsense")
    put(tmp_path / "home/.keras/datasets/tiny")
    assert sources.read(TINY) == CONTENTS


def test_without_network_the_ways_are_said(tmp_path):
    put(tmp_path / "data/tiny")
    (tmp_path / "data/tiny/labels-ubyte.gz").unlink()
    with pytest.raises(DataError) as caught:
        sources.read(TINY, tmp_path / "data")
    message = str(caught.value)
    for word in ("lacks labels-ubyte", "127.0.0.1:9", "--data FOLDER", "SCALEWISE_DATA", "Connection refused"):
        assert word in message
    assert "\n" not in message
    with pytest.raises(DataError):
        sources.read(PACKED, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An HTTP server on loopback, which stands for the official address."""
    folder = tmp_path / "www"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, directory=str(folder), **options)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("SCALEWISE_MIRROR", f"http://127.0.0.1:{running.server_address[1]}")
        yield folder
        running.shutdown()
        thread.join()


def test_files_are_downloaded_once(tmp_path, server):
    put(server)
    told = []
    assert sources.read(TINY, progress=lambda *numbers: told.append(numbers)) == CONTENTS
    size = (server / "images-ubyte.gz").stat().st_size
    assert told[0] == ("images-ubyte.gz", size, size)
    stored = tmp_path / "home/.cache/scalewise/tiny"
    assert sorted(path.name for path in stored.iterdir()) == ["images-ubyte.gz", "labels-ubyte.gz"]
    for path in server.iterdir():
        path.unlink()
    assert sources.read(TINY) == CONTENTS


def test_an_archive_is_downloaded_and_unpacked(tmp_path, server):
    archive(server / "p.tar.gz")
    assert sources.read(PACKED, tmp_path / "data") == CONTENTS
    assert sorted(path.name for path in (tmp_path / "data/packed-bin").iterdir()) == sorted(CONTENTS)


def test_what_comes_is_checked_and_nothing_half_is_left(tmp_path, server):
    put(server, labels_ubyte=CONTENTS["labels-ubyte"][:-1] + b"\x05")
    with pytest.raises(DataError, match="SHA-256"):
        sources.read(TINY, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data/tiny").iterdir()] == ["images-ubyte.gz"]
    archive(server / "p.tar.gz", ["images-ubyte"])
    with pytest.raises(DataError, match="lacks labels-ubyte"):
        sources.read(PACKED, tmp_path / "data")
    (server / "p.tar.gz").write_bytes((server / "p.tar.gz").read_bytes()[:50])
    with pytest.raises(DataError, match="readable"):
        sources.read(PACKED, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*p.tar*"))


def linked(folder, data, kind: str):
    """A copy of a real data set in which files can be replaced."""
    (folder / kind).mkdir(parents=True)
    for path in (data / kind).iterdir():
        (folder / kind / path.name).symlink_to(path)
    return folder / kind


def damaged(content: bytes, how: str) -> bytes:
    if how == "truncated":
        return content[: len(content) // 2]
    place = {"SHA-256": 5000, "got 77 at sample 2": 2 * 3073}[how]
    return content[:place] + bytes([77]) + content[place + 1 :]


@pytest.mark.parametrize("how", ["truncated", "SHA-256", "got 77 at sample 2"])
def test_the_command_names_a_damaged_file(scalewise, data, tmp_path, how):
    path = linked(tmp_path / "copy", data, "cifar-10-batches-bin") / "data_batch_3.bin"
    content = damaged(path.read_bytes(), how)
    path.unlink()
    path.write_bytes(content)
    outcome = scalewise("train", "cifar10-small", "--data", tmp_path / "copy", "--steps", 1)
    assert outcome.code == 2, outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
    assert "data_batch_3.bin" in outcome.stderr
    assert how in outcome.stderr
    assert not (tmp_path / "runs").exists()


def test_the_command_without_data_and_network(tmp_path):
    hidden = environment() | {"HOME": str(tmp_path), "SCALEWISE_MIRROR": "http://127.0.0.1:9"}
    hidden.pop("SCALEWISE_DATA", None)
    command = [sys.executable, "-m", "scalewise", "train", "mnist", "--steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--data FOLDER" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("cwd", "home")]


def test_tasks_says_where_data_are(scalewise, data):
    outcome = scalewise("tasks", "--data", data, "--json")
    rows = {row["name"]: row["data"] for row in outcome.json["tasks"]}
    assert str(data / "fashion-mnist") in rows["fashion-mnist"]
    assert rows["digits"].startswith("embedded")
