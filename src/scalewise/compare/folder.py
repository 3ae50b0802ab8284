"""The folder of a comparison: what was asked for, a run folder per run, and the document at the end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scalewise.documents import read_json
from scalewise.errors import RunFolderError
from scalewise.records import finite, write_atomically

REQUEST_FILE, DOCUMENT_FILE = "request.json", "compare.json"


@dataclass(frozen=True)
class Request:
    """What a comparison is of. On resume rows, workers and seeds may change; the rest makes its runs what they are."""

    task: str
    settings: list[str]
    given: dict[str, Any]  # recipe fields set on the command line
    tune: int | None
    hold_out: bool
    rows: str | None
    workers: str
    seeds: int


def save_request(folder: Path, request: Request) -> None:
    """Remember what was asked for."""
    write_atomically(folder / REQUEST_FILE, json.dumps(asdict(request), indent=2) + "\n")


def load_request(folder: Path) -> Request:
    """What was asked for when the comparison was begun."""
    file = folder / REQUEST_FILE
    if not file.is_file():
        raise RunFolderError(f"--resume {folder} must be the folder of a comparison, found no {REQUEST_FILE} in it")
    try:
        return Request(**read_json(file))
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} must be a stored request, got something else: {error}") from None


def merged(stored: Request, wanted: Request, folder: Path, changed: dict[str, Any]) -> Request:
    """The stored request with what may change changed; anything else that differs is refused.

    Arguments:
        stored, wanted: what was asked for then and now.
        folder: for the message.
        changed: those of rows, workers and seeds that were given now.
    """
    if not wanted.given:
        wanted = replace(wanted, given=stored.given)
    wanted = replace(wanted, tune=wanted.tune or stored.tune, hold_out=wanted.hold_out or stored.hold_out)
    for name in ("task", "settings", "given", "tune", "hold_out"):
        before, after = getattr(stored, name), getattr(wanted, name)
        if before != after:
            raise RunFolderError(
                f"{folder} was begun with {name}={before}, got {after}; on resume only rows, workers and seeds may "
                f"change: repeat the first command with --resume, or start anew without it"
            )
    return replace(stored, **changed)


def save_document(folder: Path, document: dict[str, Any]) -> str:
    """Write what --json prints; returns it."""
    text = json.dumps(finite(document), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    return text
