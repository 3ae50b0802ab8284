"""The wheel and the sdist: they build, hold every file, and work in an environment of their own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import environment

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **variables: str) -> str:
    known = {name: value for name, value in environment().items() if name != "PYTHONPATH"} | variables
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=known, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def sources() -> set[str]:
    tracked = run("git", "ls-files", "src/scalewise", cwd=ROOT).split()
    return {name.removeprefix("src/") for name in tracked}


def test_wheel_and_sdist_hold_every_file_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    assert sources() <= {*zipfile.ZipFile(wheel).namelist()}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


OWN_EXTRAS = ("adapters", "horovod/keras", "labs", "runs/tune", "tasks/images.py", "trackers")  # their own extras


def imported(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"scalewise"}


def test_everything_the_core_imports_is_a_dependency():
    package = ROOT / "src" / "scalewise"
    core = [path for path in package.rglob("*.py") if not str(path.relative_to(package)).startswith(OWN_EXTRAS)]
    needed = set().union(*map(imported, core))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed == {re.split(r"[<>=!~]", line)[0] for line in declared}


def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # torch and the other dependencies are those of this environment, behind the installed wheel on the path
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(here + "\n")
    where = run(python, "-c", "import scalewise; print(scalewise.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
    command = tmp_path / "env" / "bin" / "scalewise"
    version = run(command, "--version", cwd=tmp_path).strip()
    assert version == run(python, "-m", "scalewise", "--version", cwd=tmp_path).strip()
    assert version in wheel.name
    out = run(command, "train", "digits", "--workers", 2, "--steps", 2, "--optimizer", "lamb", "--json", cwd=tmp_path)
    assert '"weights_sha256"' in out
    assert list(tmp_path.glob("runs/*/report.html"))


COMPLETE = """
source "$1"
COMP_WORDS=(scalewise $2 "$3") COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_scalewise
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(script: Path, before: str, word: str) -> set[str]:
    return {*run("bash", "-c", COMPLETE, "bash", script, before, word, cwd=script.parent).split()}


def test_completion_is_installed_and_completes_in_bash(scalewise, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/bin/bash")
    outcome = scalewise("--install-completion", "--shell", "bash")
    assert outcome.code == 0, outcome.stderr
    (script,) = (path for path in tmp_path.rglob("*") if path.is_file() and "_scalewise()" in path.read_text("utf-8"))
    assert completed(script, "", "do") == {"doctor"}
    assert "--track" in completed(script, "train", "--tr")
    for shell in ("zsh", "fish"):
        assert scalewise("--install-completion", "--shell", shell).code == 0


COMMANDS = [
    "train", "compare", "measure", "plan", "forecast", "profile", "doctor", "report", "serve", "tasks",
    "bench devices", "bench collectives", "bench scaling", "bench parallelism",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(scalewise_here, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    said = scalewise_here(*command.split(), "--help").stdout
    assert any(line.startswith(f"scalewise {command}") for line in said.partition("╭")[0].splitlines())
