"""`scalewise tasks`."""

from __future__ import annotations

import json as to_json
from pathlib import Path

from scalewise.present import terminal
from scalewise.present.story import Cell, Table
from scalewise.tasks import BUILT_IN


def tasks(*, data: Path | None = None, json: bool = False, quiet: bool = False) -> int:
    """What is built in, and where its data is.

    scalewise tasks
    scalewise tasks --data ~/data --json

    Arguments:
        data: Folder of data files, looked in before $SCALEWISE_DATA and the usual caches.
        json: Print one JSON document on stdout.
        quiet: Draw nothing.
    """
    rows = [{"name": name, "summary": task.summary, "data": task.place(data)} for name, task in BUILT_IN.items()]
    if json:
        print(to_json.dumps({"tasks": rows}, indent=2))
    elif not quiet:
        cells = tuple((Cell(row["name"], "strong"), row["summary"], row["data"]) for row in rows)
        table = Table(("task", "what", "data"), cells, "Built-in tasks", words=frozenset({1, 2}))
        where = terminal.console()
        where.print(terminal.table_view(table, where.width))
    return 0
