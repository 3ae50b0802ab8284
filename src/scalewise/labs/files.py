"""The notebooks, their programs and the measured tables they show: in an installed package or in a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from scalewise.errors import DataError, UsageError

PACKAGED = Path(str(resources.files("scalewise.labs"))) / "sources"  # in a wheel
CHECKOUT = Path(__file__).parents[3] / "labs"  # in a clone, where the package is imported from src/
RESULTS = CHECKOUT.parent / "benchmarks" / "results"
PROGRAMS = ("data_parallel_by_hand.py", "lecture_style.py")


def source_folder() -> Path:
    """Where the notebooks' sources are."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def notebooks() -> list[Path]:
    """The sources, in order: 1-….py, 2-….py, …"""
    return sorted(source_folder().glob("[0-9]-*.py"))


def write(folder: Path) -> list[Path]:
    """Write every notebook as .ipynb into a folder, and the programs beside them; existing files stay."""
    import jupytext

    wanted = [folder / source.with_suffix(".ipynb").name for source in notebooks()]
    wanted += [folder / name for name in PROGRAMS]
    if there := [path for path in wanted if path.exists()]:
        raise UsageError(
            f"the notebooks need a folder without them, so that your answers stay, found {there[0]}; name another "
            f"folder or move that file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for source in notebooks():
        jupytext.write(jupytext.read(source), folder / source.with_suffix(".ipynb").name, fmt="ipynb")
    for name in PROGRAMS:
        (folder / name).write_text(program_text(name))
    return wanted


def program_text(name: str) -> str:
    """A program that a notebook runs: the learner's own copy in this folder, or the original."""
    own = Path(name)
    return (own if own.is_file() else source_folder() / name).read_text()


def code(name: str) -> Any:  # noqa: ANN401  (IPython has no types)
    """Show a program of the labs."""
    from IPython.display import Code

    return Code(program_text(name), language="python")


def measured(name: str) -> dict[str, Any]:
    """A dated result of the benchmarks, as JSON."""
    for path in (PACKAGED / f"{name}.json", RESULTS / f"{name}.json"):
        if path.is_file():
            document: dict[str, Any] = json.loads(path.read_text())
            return document
    raise DataError(f"the labs need the measured table {name}.json, found none; install scalewise again")


TIMEOUT_SECONDS = 600


def scalewise(*arguments: str) -> dict[str, Any]:
    """What `scalewise …  --json` prints; shows the line that does the same in a terminal."""
    print("$ scalewise", *arguments)
    said = _run([sys.executable, "-m", "scalewise", *arguments, "--json", "--quiet"])
    document: dict[str, Any] = json.loads(said)
    return document


def program(name: str, *arguments: str, processes: int) -> str:
    """What a program of the labs prints when torchrun starts it in several processes."""
    print("$ torchrun --nproc-per-node", processes, name, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(program_text(name))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        return _run([*launcher, str(path), *arguments])


def _run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=environment)
    if done.returncode not in (0, 3):  # 3: it ran, but missed a target that was asked for
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise UsageError(f"the command must end well, got exit code {done.returncode}; it said:\n{last}")
    return done.stdout
