"""How training speeds up on more processes: the engine's own trainings, interleaved, and where the time goes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scalewise.engine.loop import Training
from scalewise.engine.parallel.data import DataParallel
from scalewise.engine.parallel.model import sha256
from scalewise.engine.placement import DeviceName, Placement, ReduceName
from scalewise.engine.processes.job import Job, Start
from scalewise.engine.processes.team import Team
from scalewise.errors import RecipeError, UsageError
from scalewise.recipe import Recipe
from scalewise.runs.bench.common import (
    Report,
    Topology,
    benching,
    check_timing,
    chosen_device,
    interleaved,
    topology,
)
from scalewise.runs.measure.throughput import timed
from scalewise.runs.request import Notify, Settings, load_subject, silent
from scalewise.stats.interval import median_interval
from scalewise.stats.timing import Lost, Parts, efficiency_rounds, lost, medians, parts_of_step, rounds
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Origin

Mode = Literal["strong", "weak"]
MOST_ROUNDS, SECONDS = 15, 25.0
ROUND_SECONDS = 1.0  # of a round on the fewest processes
LEAST_STEPS = 4
WARM_UP_STEPS = 2  # at the start of every round, not timed: caches are cold after another job's round
MOST_STEPS = 1 << 20
MOST_MULTIPLE = 4


@dataclass(frozen=True)
class Took:
    """What one process's steps took: in all, waited for the others in each step, and waited for samples."""

    seconds: float
    waits: list[float]
    input_seconds: float
    weights_sha256: str | None  # after them, on the first process


@dataclass(frozen=True)
class TrainingWork:
    """The work of a job that trains."""

    task: Origin
    recipe: Recipe
    placement: Placement

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[int], Took]]:
        """A training that takes and times N more steps whenever it is asked."""
        task = load_task(self.task.spec, self.task.settings, self.task.data)
        bare = dataclasses.replace(task, validation=None)  # an epoch's end is not what is timed
        with Training(bare, self.recipe, self.placement) as training:
            records, strategy = training.records(), training.strategy
            assert isinstance(strategy, DataParallel)

            def advance(steps: int) -> list[float]:
                """Take steps; seconds waited for the others in each."""
                until, waits = training.progress.step + steps, []
                while training.progress.step < until:
                    before = strategy.exchange_seconds
                    next(records)
                    waits.append(strategy.exchange_seconds - before)
                return waits

            def perform(steps: int) -> Took:
                advance(WARM_UP_STEPS)
                training.team.barrier()
                waited, waits = strategy.feed.waited_seconds, list[float]()
                seconds = timed(lambda: waits.extend(advance(steps)), training.team.device)
                digest = sha256(strategy.model.tensors()) if training.team.leads else None
                return Took(seconds, waits, strategy.feed.waited_seconds - waited, digest)

            yield perform


@dataclass(frozen=True)
class Row:
    """Training on N processes; medians over rounds, intervals of 95 %."""

    processes: int
    threads: int
    workers: int
    worker_batch: int
    global_batch: int
    samples_per_second: float
    samples_per_second_low: float
    samples_per_second_high: float
    speedup: float
    efficiency: float  # samples per second and process, against the fewest processes in the same round
    efficiency_low: float
    efficiency_high: float
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    imbalance_seconds: float
    input_seconds: float
    lost: Lost
    steps: int
    rounds: int
    weights_sha256: str | None  # of the training after all rounds; under strong scaling the same for all rows


@dataclass(frozen=True)
class ScalingReport(Report):
    """Rows from the fewest to the most processes."""

    kind = "scaling"
    task: str
    mode: Mode
    rows: tuple[Row, ...]
    same_weights: bool | None  # whether all rows' weights have the same bytes; None where they are of different recipes
    reduce: str
    device: str
    hosts: int | None
    rate: str | None
    topology: Topology


def default_workers(processes: Sequence[int]) -> int:
    """Workers that all process counts share evenly, if that takes few; else as many as the most processes.

    >>> default_workers([1, 2, 4]), default_workers([1, 2, 3]), default_workers([5, 7, 8])
    (4, 6, 8)
    """
    multiple = math.lcm(*processes)
    return multiple if multiple <= MOST_MULTIPLE * max(processes) else max(processes)


def recipe_for(recipe: Recipe, mode: Mode, processes: int, workers: int) -> Recipe:
    """The recipe that N processes train: `workers` in all (strong) or of each process (weak)."""
    return recipe.replace(
        workers=workers if mode == "strong" else workers * processes,
        steps=MOST_STEPS,
        schedule="constant",
        warmup_epochs=0.0,
        lr_rule="none",
        patience=None,
        target=None,
    )


def scaling(
    task: str,
    /,
    *,
    processes: Sequence[int],
    weak: bool = False,
    strong: bool = False,
    workers: int | None = None,
    threads: int = 1,
    seconds: float = SECONDS,
    set: Settings = (),
    data: Path | None = None,
    hosts: int | None = None,
    rate: str | None = None,
    device: DeviceName = "auto",
    reduce: ReduceName = "ordered",
    shard_optimizer: bool = False,
    loaders: int | None = None,
    out: Path | None = None,
    notify: Notify = silent,
    **recipe: Any,  # noqa: ANN401
) -> ScalingReport:
    """Train on each number of processes, in interleaved rounds, and store the report.

    Arguments:
        task, set, data: the task by its name, with its settings and the folder of its data.
        processes: how many; each is compared with the fewest.
        weak, strong: the global batch grows with the processes, or stays the same (the default).
        workers: in all, or with `weak` those of each process.
        threads: computing threads of each process.
        seconds: how long to time, in rounds; three rounds at least.
        hosts, rate: spread over N network namespaces of this machine, whose links carry this rate.
        device, reduce, shard_optimizer, loaders: the placement.
        out: folder of the result; by default runs/bench-scaling-<time>.
        notify: receives what is being done.
        recipe: fields of the recipe to change.
    """
    if weak and strong:
        raise UsageError("scaling is either weak or strong, got both; drop --weak or --strong")
    mode: Mode = "weak" if weak else "strong"
    counts = sorted(processes)
    with benching(out):
        check_timing(counts, 1, hosts, rate, seconds)
        spread = workers if workers is not None else default_workers(counts) if mode == "strong" else 1
        least = max(counts) if mode == "strong" else 1
        if spread < least:
            raise RecipeError(f"workers must be at least {least} here, got {spread}; raise --workers")
        loaded = load_subject(task, set, data)
        trained = loaded.task.recipe.replace(**recipe, threads=threads)
        chosen = chosen_device(device, max(counts))
        placement = Placement(device=chosen, reduce=reduce, shard_optimizer=shard_optimizer, loaders=loaders)
        machine = topology()
        recipes = {count: recipe_for(trained, mode, count, spread) for count in counts}
        origin = Origin(loaded.spec, tuple(loaded.settings), data)
        starts = {
            count: Start(TrainingWork(origin, own, placement), count, threads, chosen) for count, own in recipes.items()
        }
        with interleaved(starts, hosts, rate) as jobs:
            steps, taken = _timed_rounds(jobs, seconds, notify)
        rows = _rows(taken, recipes, steps)
        same = len({row.weights_sha256 for row in rows}) == 1 if mode == "strong" else None
        report = ScalingReport(loaded.task.name, mode, rows, same, reduce, chosen, hosts, rate, machine)
        return report.stored(out)


def _timed_rounds(
    jobs: dict[int, Job[int, Took]], seconds: float, notify: Notify
) -> tuple[int, dict[int, list[list[Took]]]]:
    """The steps of a round, and what each process took in each, by the number of processes."""
    counts = [*jobs]
    notify(f"scaling: starting {', '.join(map(str, counts))} processes")
    steps = _calibrated(jobs, notify)
    taken: dict[int, list[list[Took]]] = {count: [] for count in counts}
    for number in rounds(MOST_ROUNDS, seconds):
        notify(f"scaling: round {number + 1}, {steps} steps each")
        first = number % len(counts)  # none is always first
        for count in [*counts[first:], *counts[:first]]:
            taken[count].append(jobs[count].ask(steps))
    return steps, taken


def _calibrated(jobs: dict[int, Job[int, Took]], notify: Notify) -> int:
    """Steps of a round, the same for all: all jobs take the same first ones, so that their trainings stay level."""
    first = []
    for count, job in jobs.items():
        notify(f"scaling: first steps on {count} process{'' if count == 1 else 'es'}")
        first.append(max(took.seconds for took in job.ask(LEAST_STEPS)) / LEAST_STEPS)
    return max(LEAST_STEPS, round(ROUND_SECONDS / max(first)))


def _rows(taken: dict[int, list[list[Took]]], recipes: dict[int, Recipe], steps: int) -> tuple[Row, ...]:
    parts = {count: [_parts(took, steps) for took in rounds] for count, rounds in taken.items()}
    rates = {
        count: [recipes[count].global_batch / one.step_seconds for one in rounds] for count, rounds in parts.items()
    }
    return tuple(
        _row(recipes[count], count, parts, rates, taken[count][-1][0].weights_sha256, steps) for count in sorted(taken)
    )


def _parts(took: Sequence[Took], steps: int) -> Parts:
    return parts_of_step(
        [one.seconds for one in took], [one.waits for one in took], [one.input_seconds for one in took], steps
    )


def _row(
    recipe: Recipe,
    count: int,
    parts: dict[int, list[Parts]],
    rates: dict[int, list[float]],
    digest: str | None,
    steps: int,
) -> Row:
    base = min(parts)
    own, first = medians(parts[count]), medians(parts[base])
    efficiencies = efficiency_rounds(rates, count, base)
    efficiency = statistics.median(efficiencies)
    low, high = median_interval(rates[count])
    assert recipe.threads is not None
    return Row(
        processes=count,
        threads=recipe.threads,
        workers=recipe.workers,
        worker_batch=recipe.worker_batch,
        global_batch=recipe.global_batch,
        samples_per_second=statistics.median(rates[count]),
        samples_per_second_low=low,
        samples_per_second_high=high,
        speedup=efficiency * count / base,
        efficiency=efficiency,
        efficiency_low=median_interval(efficiencies)[0],
        efficiency_high=median_interval(efficiencies)[1],
        compute_seconds=own.compute_seconds,
        **dataclasses.asdict(own),
        lost=lost(own, first, efficiency * own.step_seconds),
        steps=steps * len(parts[count]),
        rounds=len(parts[count]),
        weights_sha256=digest,
    )
