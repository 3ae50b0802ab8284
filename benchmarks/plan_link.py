"""The step time over a slow link, predicted for a rate and for a model size that were not measured.

Two hosts on this machine (network namespaces) hold one process each, which stay alive while the rate of the link
between them is changed. A round passes through all cases several times, so that a busy moment falls on all of them
alike: each model's compute, taken on both hosts at once without exchange, and its steps at every rate. The link is
calibrated on two rates and two sizes of the model: its bandwidth as a share of the rate, the latency of a message and
the overlap γ. Then a third rate and a third size are predicted. The models are large beside what the rate limiter lets
through at once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import least_squares

import scalewise as sw
from scalewise.engine.processes.job import Job, Start
from scalewise.plan.hardware import Link
from scalewise.runs.bench.common import hosts, limit

if TYPE_CHECKING:
    from scalewise.engine.processes.team import Team

STEPS, PASSES, WORKER_BATCH = 6, 5, 32


@dataclass(frozen=True)
class Case:
    """A model of the task `mlp` and the rate of the link."""

    hidden: int
    megabits: int

    @property
    def name(self) -> str:
        return f"{self.hidden} wide, {self.megabits} Mbit/s"

    @property
    def bytes(self) -> int:
        """Of the gradients: 64 inputs, a hidden layer, one half as wide, 10 classes."""
        half = self.hidden // 2
        return 4 * (65 * self.hidden + (self.hidden + 1) * half + (half + 1) * 10)


CALIBRATED = (Case(512, 100), Case(1024, 400), Case(512, 400), Case(1024, 100))
UNSEEN = {"rate": Case(512, 200), "size": Case(768, 200)}
CASES = (CALIBRATED[0], UNSEEN["rate"], *CALIBRATED[1:3], UNSEEN["size"], CALIBRATED[3])


@dataclass(frozen=True)
class Turn:
    """So many steps of a model: of a worker by itself, or of two workers together."""

    hidden: int
    together: bool


@dataclass(frozen=True)
class Work:
    """Trainings of every size, of this process alone and of both, of which some steps are timed when asked for."""

    widths: tuple[int, ...]

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[Turn], float]]:
        """The median seconds of a turn's steps."""
        from scalewise.engine.loop import Training
        from scalewise.runs.bench.parallelism import take_step

        where = sw.Placement(device="cpu")
        with ExitStack() as stack:
            trainings = {}
            for hidden in self.widths:
                task = sw.load_task("mlp", [f"hidden={hidden}"])
                for workers in (1, 2):
                    recipe = sw.Recipe(workers=workers, worker_batch=WORKER_BATCH, threads=1, steps=100_000, lr=1e-4)
                    training = stack.enter_context(Training(task, recipe, where, alone=workers == 1))
                    trainings[Turn(hidden, workers == 2)] = training
                    weights = training.strategy.model.parameters.values()
                    assert sum(weight.nbytes for weight in weights) == Case(hidden, 1).bytes

            def step_seconds(turn: Turn) -> float:
                took = []
                for _ in range(STEPS + 1):
                    team.barrier()
                    began = time.perf_counter()
                    take_step(trainings[turn])
                    took.append(time.perf_counter() - began)
                return statistics.median(took[1:])

            yield step_seconds


def link(rounds: int) -> dict[str, Any]:
    """Calibrate, predict and measure, so many times over."""
    widths = tuple(sorted({case.hidden for case in CASES}))
    found = []
    with hosts(2) as machines:
        start = Start(Work(widths), 2, 1, addresses=tuple(host.address for host in machines))
        with Job[Turn, float](start, machines) as job:
            for number in range(rounds):
                print(f"link: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                compute: dict[int, list[float]] = {hidden: [] for hidden in widths}
                seconds: dict[str, list[float]] = {case.name: [] for case in CASES}
                for _ in range(PASSES):
                    for case in CASES:
                        for host in machines:
                            limit(host.name, host.interface, f"{case.megabits}mbit")
                        compute[case.hidden].append(max(job.ask(Turn(case.hidden, together=False))))
                        seconds[case.name].append(max(job.ask(Turn(case.hidden, together=True))))
                found.append(_round(_medians(compute), _medians(seconds)))
    return {"rounds": found, "errors": {kind: _error(found, kind) for kind in UNSEEN}}


def _medians(values: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: statistics.median(some) for key, some in values.items()}


def _round(compute: dict[int, float], seconds: dict[str, float]) -> dict[str, Any]:
    """What was measured, what was fitted to it, and the predictions beside what was measured of them."""
    fitted = calibrated(compute, seconds)
    rows = {
        kind: {
            "case": case.name,
            "predicted": predict(fitted, compute[case.hidden], case),
            "measured": seconds[case.name],
        }
        for kind, case in UNSEEN.items()
    }
    return {"compute": compute, "seconds": seconds, "fitted": fitted, "rows": rows}


def _error(found: Sequence[Mapping[str, Any]], kind: str) -> float:
    """The median over rounds of how far the prediction is off."""
    return statistics.median(one["rows"][kind]["predicted"] / one["rows"][kind]["measured"] - 1 for one in found)


def predict(fitted: Mapping[str, float], compute: float, case: Case) -> float:
    """(c^γ + n^γ)^(1/γ), as plan's model."""
    wire = Link("", fitted["latency_seconds"], fitted["share"] * case.megabits * 1e6 / 8)
    ratio = wire.reduction_seconds(case.bytes, 2) / compute
    return float(compute * (1 + ratio ** fitted["overlap"]) ** (1 / fitted["overlap"]))


def calibrated(compute: Mapping[int, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Share of the rate, latency and overlap by least squares on log step times."""

    def named(unknowns: np.ndarray) -> dict[str, float]:
        share, latency, overlap = unknowns
        return {"share": float(share), "latency_seconds": float(np.exp(latency)), "overlap": float(overlap)}

    def residuals(unknowns: np.ndarray) -> np.ndarray:
        fitted = named(unknowns)
        return np.log([predict(fitted, compute[case.hidden], case) / seconds[case.name] for case in CALIBRATED])

    first, bounds = [0.9, np.log(1e-3), 2.0], ([0.3, np.log(1e-6), 1.0], [1.2, np.log(0.1), 10.0])
    return named(least_squares(residuals, first, bounds=bounds).x)


def lines(part: Mapping[str, Any]) -> list[str]:
    """For the results file."""
    table = [
        f"| {number + 1} | {kind} | {row['case']} | {1000 * row['predicted']:.1f} ms | "
        f"{1000 * row['measured']:.1f} ms | {100 * (row['predicted'] / row['measured'] - 1):+.1f} % |"
        for number, one in enumerate(part["rounds"])
        for kind, row in one["rows"].items()
    ]
    seen = ", ".join(case.name for case in CALIBRATED)
    return [
        "## Step time over a link",
        "",
        *(f"- {line}" for line in part["conditions"]),
        f"- `mlp`, two hosts in network namespaces, worker batch {WORKER_BATCH}; "
        f"medians of {PASSES} passes with {STEPS} steps of every case; calibrated on {seen}",
        f"- median error: unseen rate {100 * part['errors']['rate']:+.1f} %, "
        f"unseen size {100 * part['errors']['size']:+.1f} %",
        "",
        "| round | unseen | case | predicted | measured | error |",
        "|---|---|---|---|---|---|",
        *table,
        "",
    ]
