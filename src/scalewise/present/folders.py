"""Run folders of every kind, read as far as they can be."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scalewise.errors import RunFolderError
from scalewise.present.stored import LARGEST_RECORDS, Stored, open_regular, read_document, read_records

Kind = Literal["train", "compare", "measure", "bench", "profile", "plan", "forecast"]
# What makes a folder one of a kind, in the order in which they are looked for.
DOCUMENTS: dict[str, Kind] = {
    "plan.json": "plan",
    "forecast.json": "forecast",
    "profile.json": "profile",
    "bench.json": "bench",
    "compare.json": "compare",
    "measure.json": "measure",
    "recipe.json": "train",
}
TRAIN_FILES = ("recipe.json", "env.json", "metrics.jsonl", "result.json")
DEEPEST, MOST = 4, 2_000  # folders to look for runs in, and runs to list


@dataclass(frozen=True)
class Run:
    """What a folder says: its document, and of a training also recipe, environment and records."""

    name: str
    path: Path
    kind: Kind
    document: Stored = field(default_factory=Stored)
    recipe: Stored = field(default_factory=Stored)
    environment: Stored = field(default_factory=Stored)
    records: tuple[Stored, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Stored]:
        """The records of one kind."""
        return [record for record in self.records if record.value.get("kind") == kind]  # type: ignore[attr-defined]


def kind_of(path: Path) -> Kind | None:
    """Which kind of run a folder holds; None if it is no run folder."""
    return next((kind for name, kind in DOCUMENTS.items() if (path / name).is_file()), None)


def document_name(kind: Kind) -> str:
    """The file with what a finished run of this kind has found."""
    return "result.json" if kind == "train" else next(name for name, own in DOCUMENTS.items() if own == kind)


def read_run(path: Path, name: str | None = None, inside: Path | None = None) -> Run:
    """Everything a page shows of a folder. Files that lead out of `inside`, by default the folder, are not read."""
    kind = kind_of(path)
    if kind is None:
        raise RunFolderError(_refusal(path))
    own, root = name or path.name or path.resolve().name, inside or path
    document, problem = read_document(path / document_name(kind), root)
    if kind != "train":
        return Run(own, path, kind, document, problems=(problem,) if problem else ())
    recipe, second = read_document(path / "recipe.json", root)
    environment, third = read_document(path / "env.json", root)
    records, fourth = read_records(path / "metrics.jsonl", root)
    problems = tuple(one for one in (problem, second, third, fourth) if one)
    return Run(own, path, kind, document, recipe, environment, tuple(records), problems)


def _refusal(path: Path) -> str:
    files = ", ".join(DOCUMENTS)
    if not path.is_dir():
        return f"a run must be a folder with one of {files}, found no folder {path}; check the path"
    within = [*find_runs(path)][:3]
    if within:
        names = " ".join(str(path / one) for one in within)
        return (
            f"a run must be a folder with one of {files}, found runs in {path} but not in itself; name them, as in "
            f"scalewise report {names}, or look at all with scalewise serve {path}"
        )
    return f"a run must be a folder with one of {files}, found none of them in {path}; check the path"


def find_runs(root: Path) -> dict[str, Kind]:
    """The run folders under a folder by their path in it, newest first; runs within runs are not looked for."""
    found: list[tuple[float, str, Kind]] = []
    waiting = [(root, 0)]
    while waiting and len(found) < MOST:
        folder, depth = waiting.pop()
        for path in _subfolders(folder):
            kind = kind_of(path)
            if kind is not None:
                found.append((changed(path), path.relative_to(root).as_posix(), kind))
            elif depth + 1 < DEEPEST:
                waiting.append((path, depth + 1))
    return {name: kind for _, name, kind in sorted(found, key=lambda one: (-one[0], one[1]))}


def _subfolders(folder: Path) -> list[Path]:
    """Folders in a folder; links are not followed, since they may lead out or around."""
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def changed(path: Path) -> float:
    """When a run's files were last written."""
    times = [0.0]
    for name in (*DOCUMENTS, *TRAIN_FILES):
        try:
            times.append((path / name).lstat().st_mtime)
        except OSError:
            continue
    return max(times)


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes whenever a run's files do: their times and sizes."""
    found = []
    for name in dict.fromkeys((*DOCUMENTS, *TRAIN_FILES)):
        try:
            state = (path / name).lstat()
        except OSError:
            continue
        found.append((name, state.st_mtime_ns, state.st_size))
    return tuple(found)


def is_safe(path: Path, inside: Path) -> bool:
    """Whether other readers may read a training's files: each is missing, or a regular file in the folder and small."""
    for name in TRAIN_FILES:
        if not (path / name).exists() and not (path / name).is_symlink():
            continue
        descriptor = open_regular(path / name, inside)
        if descriptor is None:
            return False
        length = os.fstat(descriptor).st_size
        os.close(descriptor)
        if length > LARGEST_RECORDS:
            return False
    return True
