"""The folder of a measurement: what was asked for, the runs it trained, and the document at the end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scalewise.documents import read_json
from scalewise.errors import RunFolderError
from scalewise.records import finite, write_atomically

REQUEST_FILE, DOCUMENT_FILE = "request.json", "measure.json"


@dataclass(frozen=True)
class Request:
    """What a measurement is of. It makes the runs in its folder what they are, so it may not change on resume."""

    task: str
    settings: list[str]
    given: dict[str, Any]  # recipe fields set on the command line
    recipe: str | None  # the file that it started from


def save_request(folder: Path, request: Request) -> None:
    """Remember what was asked for."""
    write_atomically(folder / REQUEST_FILE, json.dumps(asdict(request), indent=2) + "\n")


def resumed_request(folder: Path, wanted: Request) -> Request:
    """The request that a folder was begun with; another task or recipe is refused, leaving the recipe out is not."""
    stored = _load(folder)
    if not wanted.given:
        wanted = replace(wanted, given=stored.given)
    for name, before in asdict(stored).items():
        after = getattr(wanted, name)
        if before != after:
            raise RunFolderError(
                f"{folder} was begun with {name}={before}, got {after}; on resume task and recipe may not change: "
                f"repeat the first command with --resume, or start anew without it"
            )
    return stored


def _load(folder: Path) -> Request:
    file = folder / REQUEST_FILE
    if not file.is_file():
        raise RunFolderError(f"--resume {folder} must be the folder of a measurement, found no {REQUEST_FILE} in it")
    try:
        return Request(**read_json(file))
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} must be a stored request, got something else: {error}") from None


def save_document(folder: Path, document: dict[str, Any]) -> str:
    """Write what --json prints; returns it."""
    text = json.dumps(finite(document), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    return text
