"""`scalewise report`."""

from __future__ import annotations

import json as to_json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import Json, Quiet
from scalewise.present import terminal


def report(
    runs: list[Path],
    /,
    *,
    out: Path | None = None,
    open: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make one self-contained HTML page of one or several runs.

    scalewise report runs/digits-20261116-101500 --open
    scalewise report runs/one runs/eight --out compared.html

    Arguments:
        runs: Folders of train, compare, measure, plan, forecast, bench or profile. Trainings are shown beside each
            other.
        out: The file to write; by default report.html in the folder, or in the working folder for several.
        open: Open the page in a browser.
    """
    from scalewise.present import page

    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of a job writes
    path = page.report(runs, out)
    if json:
        print(to_json.dumps({"report": str(path), "runs": [str(run) for run in runs], "bytes": path.stat().st_size}))
    terminal.console(quiet).print(f"report {path} ({path.stat().st_size / 1000:,.0f} kB)", markup=False)
    if open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0
