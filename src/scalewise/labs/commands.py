"""Programs that a notebook starts in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scalewise.errors import UsageError
from scalewise.labs.files import program_text

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
