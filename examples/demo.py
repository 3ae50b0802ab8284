"""What `make demo` shows: one worker, then eight workers on one and on two processes, with the same bytes.

python examples/demo.py [flags of scalewise train]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(title: str, *flags: str) -> dict[str, Any]:
    print(f"\n── {title}\n   scalewise train digits {' '.join(flags)}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scalewise", "train", "digits", *flags]
        out = ["--out", str(Path(folder) / "run"), "--json"]
        result: dict[str, Any] = json.loads(subprocess.run([*command, *out], check=True, stdout=subprocess.PIPE).stdout)
    return result


def main() -> int:
    same_for_all = ["--seed", "0", *sys.argv[1:]]
    eight = ["--workers", "8", "--worker-batch", "32", *same_for_all]
    single = train("one worker", *same_for_all)
    rehearsed = train("eight workers, rehearsed on one process", *eight, "--processes", "1")
    real = train("eight workers, on two processes", *eight, "--processes", "2")
    print()
    for name, result in (("1 worker", single), ("8 workers, 1 process", rehearsed), ("8 workers, 2 processes", real)):
        accuracy = f"{100 * result['test']['accuracy']:.2f} %"
        print(
            f"{name:24} {result['steps']:4} steps  test accuracy {accuracy}  weights {result['weights_sha256'][:16]}…"
        )
    same = rehearsed["weights_sha256"] == real["weights_sha256"]
    if same:
        print("\nThe weights of both 8-worker runs are the same, byte for byte: the rehearsal is the real run.")
    else:
        print("\nThe weights of the two 8-worker runs DIFFER. That is a bug: please report it.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
