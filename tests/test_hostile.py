"""Files from anywhere: nothing in them is run, and none takes more memory than it may."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scalewise
from conftest import environment
from scalewise import records
from scalewise.errors import DataError, RunFolderError, ScalewiseError
from scalewise.files import read_bytes
from scalewise.plan import hardware
from scalewise.recipe import Recipe
from scalewise.stats.outlook import read_points
from scalewise.tasks import images, sources
from scalewise.tasks.sources import DataFile, Source

SOURCE = Path(scalewise.__file__).parent
FUZZ = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load", "np.load", "numpy.load"}
# What processes of one job hand to each other; no file that came from elsewhere is read by these.
BETWEEN_OWN_PROCESSES = {
    "engine/processes/job.py",
    "horovod/__init__.py",
    "horovod/torch/elastic/state.py",
    "horovod/torch/functions.py",
    "runs/measure/memory/trials.py",
}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_unpickled_or_evaluated(path):
    if str(path.relative_to(SOURCE)) in BETWEEN_OWN_PROCESSES:
        pytest.skip("pickles what its own job's processes exchange")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in CALLS, node.lineno


CONTENT = bytes(range(250)) * 4
FILE = DataFile("content", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
PACKED = Source("packed", (FILE,), ("packed",), "http://127.0.0.1:9", archive="all.tar.gz")
ARRAYS = Source("arrays", (FILE,), ("arrays",), "http://127.0.0.1:9", arrays=("all.npz", {"x": "content"}))


def test_a_gzip_bomb_is_refused(tmp_path):
    (tmp_path / "content.gz").write_bytes(gzip.compress(bytes(200_000_000)))
    with pytest.raises(DataError, match="too long"):
        sources._from_root(PACKED, tmp_path, [])


def test_a_tar_bomb_is_refused(tmp_path):
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        bomb = tarfile.TarInfo("first")
        bomb.size = 100_000_000
        archive.addfile(bomb, io.BytesIO(bytes(bomb.size)))
    with pytest.raises(DataError, match="unpacks to more than it may"):
        sources._from_root(PACKED, tmp_path, [])


def test_an_array_that_only_claims_to_be_large_is_refused(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(tmp_path / "all.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue())
    with pytest.raises(DataError, match="must be at most"):
        sources._from_root(ARRAYS, tmp_path, [])


def tar_of_headers(place: Path) -> None:
    """An archive of long names that are only ever followed by another one, for which tarfile calls itself."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1
    (place / "all.tar.gz").write_bytes((header.tobuf(tarfile.GNU_FORMAT) + bytes(512)) * 1010)


def npz_of(header: str, method: int = zipfile.ZIP_STORED):
    text = header.encode()

    def write(place: Path) -> None:
        with zipfile.ZipFile(place / "all.npz", "w", method) as archive:
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)

    return write


WHOLE = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000,)}"
ARCHIVES = {
    "headers without end": (PACKED, tar_of_headers),
    "brackets without end": (ARRAYS, npz_of("(" * 3000)),
    "signs without end": (ARRAYS, npz_of("-" * 4000 + "1")),
    "an open string": (ARRAYS, npz_of('{\'descr\': """')),
    "a type that is none": (ARRAYS, npz_of("{'descr': [('a', ('b',))], 'fortran_order': False, 'shape': (1,)}")),
    "a negative shape": (ARRAYS, npz_of("{'descr': '|u1', 'fortran_order': False, 'shape': (-5, -200)}")),
    "LZMA, which may ask for 4 GB": (ARRAYS, npz_of(WHOLE, zipfile.ZIP_LZMA)),
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_an_archive_made_to_break_its_reader_is_refused(tmp_path, what):
    source, write = ARCHIVES[what]
    write(tmp_path)
    with pytest.raises(DataError, match="download it again or remove it"):
        sources._from_root(source, tmp_path, [])


def test_a_line_without_end_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LARGEST_LINE", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + b" " * 5000 + b'{"kind": "step", "step": 2}\n')
    with pytest.raises(RunFolderError, match="line 2 must be a record"):
        [*records.read(path)]
    assert "5 lines, the first of them 2" in str(records.keep_until(path, 9))
    assert [record["step"] for record in records.read(path)] == [1, 2]


def test_an_image_bomb_is_refused(tmp_path):
    from PIL import Image

    Image.new("1", (9_000, 9_000)).save(tmp_path / "bomb.png")
    for read in (images.check, lambda path: images.decode(path, 8)):
        with pytest.raises(DataError, match="9000 × 9000 pixels"):
            read(tmp_path / "bomb.png")


def test_only_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="is not a file"):
            read_bytes(path)
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(OSError, match="11 bytes, more than 10"):
        read_bytes(tmp_path / "large", 10)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*Recipe.model_fields]), inner),
    max_leaves=12,
)
READERS = {
    "recipe": Recipe.load,
    "link": hardware.load_link,
    "points": read_points,
    "records": lambda path: [records.keep_until(path, 3), *records.read(path)],
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300) | VALUES.map(lambda value: repr(value).encode()))
def test_readers_give_a_value_or_a_documented_error(tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / f"fuzzed-{name}"
    path.write_bytes(content)
    try:
        READERS[name](path)
    except ScalewiseError:
        return


def test_every_reader_survives_the_fuzzer(tmp_path):
    command = [sys.executable, FUZZ, "--cases", "600", "--results", tmp_path]
    done = subprocess.run([*map(str, command)], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "600 cases, 0 findings" in done.stdout
