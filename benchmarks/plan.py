"""How well `plan` predicts: published scaling tables, and steps to a loss with more workers than were measured.

    python benchmarks/plan.py published
    python benchmarks/plan.py steps digits --seeds 5 --runs FOLDER
    python benchmarks/plan.py steps fashion-mnist --seeds 5 --runs FOLDER --data DATA
    python benchmarks/plan.py link --rounds 3

The second part trains with 1, 2 and 4 workers, predicts 8 and 16, and trains those too; it goes on where it was when it
is started again with the same --runs. Writes benchmarks/results/<date>-plan.md and .json, which keep the other parts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plan_link
from report import add_part, described
from scalewise.plan import model
from scalewise.plan.assemble import LEVEL
from scalewise.plan.hardware import ETHERNET_LATENCY
from scalewise.plan.model import Inputs
from scalewise.stats.critical_batch import CriticalBatch, from_noise
from scalewise.stats.interval import mean_interval
from scalewise.stats.steps_law import fit_law, to_go_by

RESULTS = Path(__file__).parent / "results"
MEASURED, PREDICTED = (1, 2, 4), (8, 16)
LONGER = 4  # times the recipe's epochs, so that no training ends before the loss is reached
NOTE = """The loss is the one that one worker has after a fifth of its budget. That share was changed once, from a half,
after a first run on digits: at half the budget (0.2129) validation loss is flat, one of five seeds with 8 workers never
came to it within four times the budget, nor had the first with 16 when it was stopped. So digits is no independent
proof."""
SHARE = 0.2  # of the recipe's budget, after which one worker is at the loss that is asked for: well before it is flat


@dataclass(frozen=True)
class Published:
    """A published scaling table: efficiency from one number of GPUs to another, and what the model is told."""

    name: str
    source: str
    inputs: Inputs
    first: int
    last: int
    efficiency: float
    stated: tuple[str, ...]


def _goyal() -> Published:
    """29 hours on 8 GPUs and one hour on 256, 90 epochs of 1,281,167 images in global batches of 32 a GPU."""
    steps = 90 * 1_281_167 / 32
    eight = 29 * 3600 / (steps / 8)
    inputs = Inputs(
        worker_batch=32,
        single_steps=steps,
        single_low=steps,
        single_high=steps,
        critical_batch=None,
        critical_low=None,
        critical_high=None,
        lr=0.0125,
        lr_power=1.0,
        step_seconds=0.0,
        sample_seconds=eight / 32,
        parameter_bytes=4 * 25_557_032,
        latency_seconds=ETHERNET_LATENCY,
        bytes_per_second=50e9 / 8,
        node_devices=8,
        node_latency_seconds=5e-6,
        node_bytes_per_second=40e9,
        measured_global_batch=256,
    )
    return Published(
        name="ResNet-50, Goyal et al. 2017",
        source="arXiv 1706.02677: about 90 % from 8 to 256 GPUs; 29 hours on 8 by NVIDIA's account of the paper",
        inputs=inputs,
        first=8,
        last=256,
        efficiency=0.9,
        stated=(
            f"a step of 32 images takes {1000 * eight:.0f} ms on 8 GPUs (29 h for 90 epochs), all taken as compute",
            "25,557,032 parameters, 4 bytes each",
            "servers of 8 P100 with 50 Gbit/s Ethernet between them; NVLink within, 40 GB/s; 50 and 5 µs a message",
            "overlap γ = 2 as assumed without a measurement; 1 and 10 are the ends of the interval",
        ),
    )


def published() -> list[dict[str, Any]]:
    """The model's efficiency beside the published one."""
    found = []
    for table in (_goyal(),):
        values = {}
        for name, overlap in (("value", 2.0), ("low", 1.0), ("high", 10.0)):
            inputs = replace(table.inputs, overlap=overlap)
            few, many = (model.step_seconds(inputs, count) for count in (table.first, table.last))
            values[name] = few / many
        found.append(
            {
                "name": table.name,
                "source": table.source,
                "stated": [*table.stated],
                "workers": [table.first, table.last],
                "published": table.efficiency,
                "predicted": values,
                "points_off": 100 * (values["value"] - table.efficiency),
            }
        )
    return found


def steps(name: str, seeds: int, data: Path | None, runs: Path) -> dict[str, Any]:
    """Steps to a smoothed validation loss: predicted from 1, 2 and 4 workers, measured with 8 and 16."""
    from scalewise.engine.data.samples import open_samples
    from scalewise.runs.measure.critical.sweep import constant_rate
    from scalewise.runs.measure.critical.trials import Laboratory, Trial, evaluation_steps, smoothed
    from scalewise.runs.measure.noise import measure_noise
    from scalewise.tasks.load import load_task

    task = load_task(name, (), data)
    base = constant_rate(task.recipe).replace(threads=1)
    budget = base.total_steps(round(0.9 * len(open_samples(task.train, 0, "training"))))
    runs.mkdir(parents=True, exist_ok=True)

    def trial(workers: int, seed: int, target: float | None) -> Trial:
        rule = "none" if workers == 1 else "adascale"
        recipe = base.replace(workers=workers, lr_rule=rule, seed=seed, epochs=LONGER * base.epochs)
        last = budget if target is None else LONGER * budget
        return Trial(f"{workers}-{seed}", recipe, evaluation_steps(SHARE * budget / workers**0.5, last), last, target)

    def at_share(points: Sequence[Any]) -> float:
        reached = [loss for step, loss in smoothed(points) if step <= math.log(SHARE * budget)]
        return reached[-1]

    def noise_scale(last: float) -> CriticalBatch:
        """Along one worker's way to the loss, as `scalewise measure` finds it."""
        shorter = base.replace(steps=max(2, round(last)))
        found = measure_noise(task, shorter, notify=lambda line: print(line, file=sys.stderr))
        return from_noise(found.along, base.worker_batch)

    taken: dict[int, list[float]] = {}
    with Laboratory(task, runs, 1) as laboratory:
        singles = laboratory.curves([trial(1, seed, None) for seed in range(seeds)])
        target = round(statistics.median(at_share(curve.points) for curve in singles), 4)
        taken[1] = [steps for curve in singles if (steps := curve.steps_to(target)) is not None]
        for workers in (*MEASURED[1:], *PREDICTED):
            print(f"{name}: {workers} workers to loss {target}", file=sys.stderr, flush=True)
            curves = laboratory.curves([trial(workers, seed, target) for seed in range(seeds)])
            taken[workers] = [steps for curve in curves if (steps := curve.steps_to(target)) is not None]
    noise = noise_scale(statistics.median(taken[1]))
    return {"task": name, "seeds": seeds, "target": target, "worker_batch": base.worker_batch} | predicted(
        base.worker_batch, taken, noise
    )


def predicted(worker_batch: int, taken: dict[int, list[float]], noise_scale: CriticalBatch) -> dict[str, Any]:
    """What the plan says of the larger numbers of workers from the steps of the smaller ones and the noise scale."""
    seen = [(count * worker_batch, steps) for count in MEASURED for steps in taken[count]]
    by_runs_alone = fit_law(seen, "runs")
    critical = to_go_by(noise_scale, by_runs_alone, LEVEL)
    single = mean_interval([math.log(steps) for steps in taken[1]], LEVEL, new=True)
    middle, low, high = (math.exp(value) for value in (single.value, single.low, single.high))
    inputs = replace(
        _goyal().inputs,
        worker_batch=worker_batch,
        single_steps=middle,
        single_low=low,
        single_high=high,
        critical_batch=critical.value,
        critical_low=critical.low,
        critical_high=critical.high,
    )
    shortest, longest = model.ends(inputs)
    rows = []
    for count in PREDICTED:
        measured = statistics.median(taken[count])
        expected = [one.single_steps / model.gain_of(one, count) for one in (inputs, shortest, longest)]
        rows.append(
            {
                "workers": count,
                "measured": measured,
                "all": taken[count],
                "predicted": expected[0],
                "low": expected[1],
                "high": expected[2],
                "error": expected[0] / measured - 1,
                "covers": expected[1] <= measured <= expected[2],
            }
        )
    return {
        "seen": {str(count): taken[count] for count in MEASURED},
        "noise_scale": noise_scale.value,
        "critical_batch": {"value": critical.value, "low": critical.low, "high": critical.high},
        "critical_batch_by_runs_alone": by_runs_alone.critical.value,
        "rows": rows,
    }


def to_markdown(found: dict[str, Any]) -> str:
    """The results file."""
    lines = ["# Plan", ""]
    if "published" in found:
        lines += _published_lines(found["published"])
    for part in found.get("steps", {}).values():
        lines += _steps_lines(part)
    if "link" in found:
        lines += plan_link.lines(found["link"])
    return "\n".join(lines) + "\n"


def _published_lines(part: dict[str, Any]) -> list[str]:
    lines = ["## Published scaling", "", *(f"- {line}" for line in part["conditions"])]
    for table in part["tables"]:
        expected = table["predicted"]
        lines += [
            f"- **{table['name']}**, {table['workers'][0]} to {table['workers'][1]} workers: published "
            f"{100 * table['published']:.0f} %, predicted {100 * expected['value']:.1f} % "
            f"({100 * expected['low']:.1f} to {100 * expected['high']:.1f}), {table['points_off']:+.1f} points",
            f"  - {table['source']}",
            *(f"  - {line}" for line in table["stated"]),
        ]
    return [*lines, ""]


def _steps_lines(part: dict[str, Any]) -> list[str]:
    critical = part["critical_batch"]
    seen = "; ".join(
        f"{count} workers {statistics.median(values):.1f} (n={len(values)})" for count, values in part["seen"].items()
    )
    high = "unbounded" if critical["high"] is None else f"{critical['high']:.0f}"
    alone = part.get("critical_batch_by_runs_alone")
    noise = f"; by these alone {alone:.0f}, noise scale {part['noise_scale']:.0f}" if alone else ""
    return [
        f"## {part['task']}: steps to a smoothed validation loss of {part['target']}",
        "",
        *(f"- {line}" for line in part["conditions"]),
        f"- worker batch {part['worker_batch']}, AdaScale with several workers, constant rate; medians seen: {seen}",
        f"- {NOTE}",
        f"- critical batch from these: {critical['value']:.0f} ({critical['low']:.0f} to {high}){noise}",
        "",
        "| workers | measured, median (least–most) | predicted (80 %) | error | covers |",
        "|---|---|---|---|---|",
        *(
            f"| {row['workers']} | {row['measured']:.1f} ({min(row['all']):.1f}–{max(row['all']):.1f}), "
            f"n={len(row['all'])} | {row['predicted']:.1f} ({row['low']:.1f}–{row['high']:.1f}) | "
            f"{100 * row['error']:+.1f} % | {'yes' if row['covers'] else 'no'} |"
            for row in part["rows"]
        ),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("published")
    trained = parts.add_parser("steps")
    trained.add_argument("task")
    trained.add_argument("--seeds", type=int, default=5)
    trained.add_argument("--data", type=Path)
    trained.add_argument("--runs", type=Path, required=True)
    wire = parts.add_parser("link")
    wire.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.part == "published":
        part: dict[str, Any] = {"tables": published(), "conditions": described("python benchmarks/plan.py published")}
        add_part(given.results, "plan", ["published"], part, to_markdown)
        return
    if given.part == "link":
        command = f"python benchmarks/plan.py link --rounds {given.rounds}"
        add_part(
            given.results,
            "plan",
            ["link"],
            plan_link.link(given.rounds) | {"conditions": described(command)},
            to_markdown,
        )
        return
    command = f"python benchmarks/plan.py steps {given.task} --seeds {given.seeds} …"
    part = steps(given.task, given.seeds, given.data, given.runs)
    add_part(given.results, "plan", ["steps", given.task], part | {"conditions": described(command)}, to_markdown)


if __name__ == "__main__":
    main()
