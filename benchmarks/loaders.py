"""How long a step waits for images with 0, 1 and 2 loader processes: the end of `make bench`.

Makes a folder of JPEG files that one loader process cannot decode as fast as the steps take them, and trains the task
`images` on it by turns with each number of loader processes. Writes benchmarks/results/<date>-loaders.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
from PIL import Image

from report import conditions
from scalewise.tasks.images import decode

SIZE, WIDTH, WORKER_BATCH = 64, 8, 16
IMAGES = 96
WARM_UP_STEPS = 8
TOO_SLOW = 1.35  # decoding a batch should take so many times as long as a step
LOADERS = (0, 1, 2)


def photographs(folder: Path, side: int) -> Path:
    """JPEG files of two classes, as detailed as a photograph of that many pixels a side."""
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = generator.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8)
        path = folder / f"class-{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR).save(path, quality=90)
    return folder


def train(folder: Path, loaders: int, steps: int) -> tuple[float, float]:
    """Seconds of a step, and those of them that it waited for images, after warming up."""
    with tempfile.TemporaryDirectory() as place:
        flags = ["--set", f"folder={folder}", "--set", f"size={SIZE}", "--set", f"width={WIDTH}", "--threads", "1"]
        recipe = ["--worker-batch", str(WORKER_BATCH), "--steps", str(steps + WARM_UP_STEPS), "--loaders", str(loaders)]
        command = [sys.executable, "-m", "scalewise", "train", "images", *flags, *recipe, "--out", f"{place}/run"]
        subprocess.run([*command, "--quiet"], check=True)
        lines = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_taken = [line for line in lines if line["kind"] == "step"]
    first, *counted = steps_taken[WARM_UP_STEPS - 1 :]
    seconds = counted[-1]["seconds"] - first["seconds"]
    return seconds / len(counted), sum(step["input_seconds"] for step in counted) / len(counted)


def decode_seconds(folder: Path) -> float:
    """Decoding one batch on one core."""
    paths = sorted(folder.rglob("*.jpg"))[:WORKER_BATCH]
    tries = []
    for _ in range(5):
        started = time.perf_counter()
        for path in paths:
            decode(path, SIZE)
        tries.append(time.perf_counter() - started)
    return statistics.median(tries)


def slow_folder(root: Path) -> tuple[Path, int]:
    """A folder whose batches take somewhat longer to decode than a step to compute."""
    small = photographs(root / "try", 160)
    seconds, waited = train(small, 0, 12)
    compute = seconds - waited
    for side in range(160, 4000, 80):
        folder = photographs(root / f"side-{side}", side)
        if decode_seconds(folder) > TOO_SLOW * compute:
            return folder, side
    raise RuntimeError("decoding never became slower than the step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    shares: dict[int, list[float]] = {loaders: [] for loaders in LOADERS}
    steps: dict[int, list[float]] = {loaders: [] for loaders in LOADERS}
    with tempfile.TemporaryDirectory() as root:
        folder, side = slow_folder(Path(root))
        for _ in range(options.rounds):
            for loaders in LOADERS:
                seconds, waited = train(folder, loaders, options.steps)
                steps[loaders].append(seconds)
                shares[loaders].append(waited / seconds)
    under = conditions(f"python benchmarks/loaders.py --rounds {options.rounds} --steps {options.steps}", 1,
                       options.rounds, datetime.now().astimezone())  # fmt: skip
    rows = [
        {
            "loaders": loaders,
            "step_milliseconds": statistics.median(steps[loaders]) * 1e3,
            "waiting_share": statistics.median(shares[loaders]),
            "waiting_share_all": shares[loaders],
        }
        for loaders in LOADERS
    ]
    document = {"conditions": asdict(under), "image_side": side, "worker_batch": WORKER_BATCH, "rows": rows}
    options.results.mkdir(exist_ok=True)
    path = options.results / f"{datetime.now():%Y-%m-%d}-loaders.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    for row in rows:
        print(f"{row['loaders']} loaders: step {row['step_milliseconds']:.1f} ms, waiting {row['waiting_share']:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
