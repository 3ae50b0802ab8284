"""The weights of many recipes, as SHA-256: written before a change of structure, compared after it.

python benchmarks/same_bytes.py --write before.json
python benchmarks/same_bytes.py --against before.json

Every row is a command as a person types it. The file names its machine: another kind of processor has other bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

EIGHT = "--workers 8 --worker-batch 16 --threads 1 --steps 6"
PLAIN = f"{EIGHT} --recipe plain"
TOKENS = "--workers 8 --worker-batch 4 --threads 1 --steps 4 --recipe plain"
ROWS = {
    "one worker": "digits --threads 1 --steps 20",
    "momentum, 1 process": f"digits {PLAIN} --lr 0.05 --processes 1",
    "momentum, 2 processes": f"digits {PLAIN} --lr 0.05 --processes 2",
    "momentum, 3 processes": f"digits {PLAIN} --lr 0.05 --processes 3",
    "sgd": f"digits {PLAIN} --optimizer sgd --lr 0.05 --processes 1",
    "nesterov, cosine": f"mlp {PLAIN} --optimizer nesterov --schedule cosine --processes 1",
    "adam": f"digits {PLAIN} --optimizer adam --lr 0.002 --processes 2",
    "adamw, sharded": f"mlp {PLAIN} --optimizer adamw --lr 0.01 --weight-decay 0.1 --shard-optimizer --processes 2",
    "lars": f"digits {PLAIN} --optimizer lars --lr 5 --weight-decay 0.01 --processes 1",
    "lamb, sharded": f"digits {PLAIN} --optimizer lamb --lr 0.01 --shard-optimizer --processes 2",
    "muon": f"digits {PLAIN} --optimizer muon --lr 0.005 --processes 2",
    "soap": f"digits {PLAIN} --optimizer soap --lr 0.005 --processes 2",
    "schedule-free, sharded": f"digits {PLAIN} --optimizer schedule-free --lr 0.01 --shard-optimizer --processes 2",
    "batch norm": f"digits {PLAIN} --set bn=true --processes 2",
    "ghost batch norm": f"digits {PLAIN} --set bn=true --batch-norm ghost:4 --processes 1",
    "batch norm over all workers": f"digits {PLAIN} --set bn=true --batch-norm sync --processes 2",
    "dropout": f"digits {PLAIN} --set dropout=0.3 --processes 1",
    "micro batches": f"digits {PLAIN} --set bn=true --micro-batch 4 --processes 1",
    "clipping": f"digits {PLAIN} --clip-norm 0.1 --processes 2",
    "smoothed labels": f"mlp {PLAIN} --label-smoothing 0.1 --processes 1",
    "bf16": f"mlp {PLAIN} --precision bf16 --processes 1",
    "adascale": "digits --workers 8 --worker-batch 16 --threads 1 --epochs 0.3 --recipe plain --lr-rule adascale",
    "growth": f"mlp {PLAIN} --schedule growth --drop 2 --processes 1",
    "early stopping": "mlp --workers 8 --worker-batch 8 --threads 1 --epochs 3 --patience 1 --lr 0.5 --recipe plain",
    "auto": "digits --workers 8 --worker-batch 16 --threads 1 --epochs 2 --processes 2",
    "auto, adam": "chars --workers 4 --worker-batch 4 --threads 1 --epochs 0.2 --processes 1",
    "parameter server": f"digits {PLAIN} --reduce server --processes 2",
    "fsdp": f"mlp {PLAIN} --parallel fsdp --optimizer adam --lr 0.002 --processes 2",
    "pipeline": f"digits {PLAIN} --parallel pipeline --processes 2",
    "tokens": f"chars {TOKENS} --optimizer adam --lr 0.002 --processes 2",
}
RESUMED = "digits --workers 8 --worker-batch 16 --threads 1 --recipe plain --lr 0.05"


def train(arguments: str, folder: Path) -> str:
    """The hash of the weights that a command ends with."""
    command = [sys.executable, "-m", "scalewise", "train", *arguments.split(), "--json", "--quiet"]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    sha256: str = json.loads(done.stdout)["weights_sha256"]
    return sha256


def resumed(folder: Path) -> str:
    """The hash after 3 steps on one process and 5 more on two."""
    train(f"{RESUMED} --steps 3 --processes 1 --out stopped", folder)
    return train("digits --resume stopped --steps 8 --processes 2", folder)


def hashes() -> dict[str, str]:
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, arguments in ROWS.items():
            found[name] = train(arguments, Path(temporary))
            print(f"{name:32} {found[name][:16]}", flush=True)
        found["resumed on other processes"] = resumed(Path(temporary))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = hashes()
    if options.write:
        written = {"machine": platform.processor() or platform.machine(), "sha256": found}
        options.write.write_text(json.dumps(written, indent=2) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())["sha256"]
    different = [name for name in before if before[name] != found.get(name)]
    print(f"{len(before) - len(different)} of {len(before)} the same" + "".join(f"\ndiffers: {n}" for n in different))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
