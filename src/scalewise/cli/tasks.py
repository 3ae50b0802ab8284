"""`scalewise tasks`."""

from __future__ import annotations

import json as to_json
from dataclasses import asdict

from scalewise.cli import views
from scalewise.tasks import BUILT_IN


def tasks(*, json: bool = False, quiet: bool = False) -> int:
    """What is built in, and where its data is.

    Parameters
    ----------
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    if json:
        rows = [{"name": name, **asdict(task)} for name, task in BUILT_IN.items()]
        print(to_json.dumps({"tasks": rows}, indent=2))
    if not quiet and not json:
        views.console().print(views.task_table(BUILT_IN))
    return 0
