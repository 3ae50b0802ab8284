"""The folder of a bench: what --json prints, in bench.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from scalewise.engine.store.folder import make_folder
from scalewise.records import finite, write_atomically

DOCUMENT_FILE = "bench.json"


class Report(Protocol):
    """What a bench has measured."""

    def to_json(self) -> dict[str, Any]:
        """With its `kind` and its `rows`."""


def save_report(report: Report, out: Path | None) -> tuple[Path, str]:
    """Write a report into `out`, or into runs/bench-<kind>-<time>; returns the folder and what --json prints."""
    document = report.to_json()
    folder = make_folder(out, f"bench-{document['kind']}").path
    text = json.dumps(finite({"run": str(folder), **document}), indent=2)
    write_atomically(folder / DOCUMENT_FILE, text + "\n")
    return folder, text
