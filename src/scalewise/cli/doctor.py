"""`scalewise doctor`."""

from __future__ import annotations

import json as to_json
import os
from dataclasses import asdict
from pathlib import Path

from scalewise.cli.flags import Json, Quiet
from scalewise.present import terminal
from scalewise.present.stories.doctor import diagnosis_story


def doctor(
    run: Path,
    single: Path | None = None,
    /,
    *,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say why a run lost accuracy: causes, worst first, with the evidence and what to change.

    scalewise doctor runs/digits-20261116-101500
    scalewise doctor watch single-worker-run

    Arguments:
        run: A run folder of scalewise train, or the folder that sw.watch writes.
        single: A run that did better, such as that of one worker, to compare with.
    """
    from scalewise.doctor.diagnose import diagnose_folder

    if os.environ.get("RANK", "0") != "0":
        return 0  # one process of a job reads and speaks
    diagnosis = diagnose_folder(run, single)
    if json:
        print(to_json.dumps({"findings": [asdict(finding) for finding in diagnosis.findings]}, indent=2))
    terminal.show(terminal.console(quiet), diagnosis_story(diagnosis))
    return 0
