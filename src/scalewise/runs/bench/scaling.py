"""How training speeds up on more processes: the engine's own trainings by turns, and where the rest of time goes.

Where time goes when processes are added: from what each process waited for to shares of a step.

All processes end a step together. One that has computed its gradients waits until the slowest has (imbalance), and then
all wait for the exchange itself (communication). So what the process that waits least in a step waits is communication,
and what the others wait beyond that is imbalance. Communication hidden behind computing costs nothing and is not seen
here; the processor time that it takes from computing is, in the rest. On CUDA a process waits on its device, where this
clock does not see it: there all of it is in the rest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scalewise.engine.placement import Placement
from scalewise.recipe import Recipe
from scalewise.runs.bench.common import Topology, topology
from scalewise.runs.bench.jobs import Job, taking_turns
from scalewise.runs.bench.work import Start
from scalewise.stats.timing import median_interval, rounds

if TYPE_CHECKING:
    from scalewise.engine.loop import Training
    from scalewise.engine.processes.team import Team

Mode = Literal["strong", "weak"]
Notify = Callable[[str], None]
MOST_ROUNDS, SECONDS = 15, 25.0
ROUND_SECONDS = 1.0  # of a round on the fewest processes
LEAST_STEPS = 4
WARM_UP_STEPS = 2  # at the start of every round, not timed: caches are cold after another job's round
MOST_STEPS = 1 << 20
MOST_MULTIPLE = 4


@dataclass(frozen=True)
class Turn:
    """So many steps to take and time."""

    steps: int


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

    task_spec: str
    settings: tuple[str, ...]
    data: Path | None
    recipe: Recipe
    placement: Placement

    @contextmanager
    def opened(self, team: Team) -> Iterator[Callable[[Turn], Took]]:
        """A training that goes on from turn to turn."""
        from scalewise.engine.loop import Training
        from scalewise.engine.parallel.data import DataParallel
        from scalewise.tasks.load import load_task

        task = load_task(self.task_spec, self.settings, self.data)
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

            yield lambda turn: _timed_steps(training, turn.steps, advance)


def _timed_steps(training: Training, steps: int, advance: Callable[[int], list[float]]) -> Took:
    from scalewise.engine.parallel.model import sha256
    from scalewise.runs.measure.throughput import timed

    advance(WARM_UP_STEPS)
    training.team.barrier()
    waited = training.strategy.waited_seconds
    waits: list[float] = []
    seconds = timed(lambda: waits.extend(advance(steps)), training.team.device)
    input_seconds = training.strategy.waited_seconds - waited
    digest = sha256(training.strategy.model.tensors()) if training.team.leads else None
    return Took(seconds, waits, input_seconds, digest)


@dataclass(frozen=True)
class Row:
    """Training on so many processes; medians over rounds, intervals of 95 %.

    efficiency: samples per second and process, against the fewest processes in the same round.
    weights_sha256: of the training after all rounds; under strong scaling the same for all rows.
    """

    processes: int
    threads: int
    workers: int
    worker_batch: int
    global_batch: int
    samples_per_second: float
    samples_per_second_low: float
    samples_per_second_high: float
    speedup: float
    efficiency: float
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
    weights_sha256: str | None


@dataclass(frozen=True)
class ScalingReport:
    """Rows from the fewest to the most processes.

    same_weights: whether all rows' weights have the same bytes; None where they are of different recipes.
    """

    task: str
    mode: Mode
    rows: tuple[Row, ...]
    same_weights: bool | None
    reduce: str
    device: str
    hosts: int | None
    rate: str | None
    topology: Topology

    def to_json(self) -> dict[str, Any]:
        """What --json prints."""
        return {"kind": "scaling", **asdict(self)}


def default_workers(processes: Sequence[int]) -> int:
    """Workers that all process counts share evenly, if that takes few; else as many as the most processes.

    >>> default_workers([1, 2, 4]), default_workers([1, 2, 3]), default_workers([5, 7, 8])
    (4, 6, 8)
    """
    multiple = math.lcm(*processes)
    return multiple if multiple <= MOST_MULTIPLE * max(processes) else max(processes)


def recipe_for(recipe: Recipe, mode: Mode, processes: int, workers: int) -> Recipe:
    """The recipe that so many processes train: `workers` in all (strong) or of each process (weak)."""
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
    work: TrainingWork,
    name: str,
    processes: Sequence[int],
    mode: Mode,
    workers: int,
    *,
    hosts: int | None = None,
    rate: str | None = None,
    seconds: float = SECONDS,
    notify: Notify = lambda line: None,
) -> ScalingReport:
    """Train on each number of processes, in rounds by turns.

    Arguments:
        work: what is trained; its recipe's workers do not count.
        name: of the task.
        processes: from the fewest to the most.
        mode: strong: the same global batch on more processes; weak: a global batch that grows with them.
        workers: in all, or of each process.
        hosts, rate: over so many hosts on this machine, whose links carry so much.
        seconds: in which they train, round after round.
        notify: told what is being done.
    """
    machine = topology()
    recipes = {count: recipe_for(work.recipe, mode, count, workers) for count in processes}
    threads = work.recipe.threads or 1
    starts = {
        count: Start(dataclasses.replace(work, recipe=recipe), count, threads, work.placement.device)
        for count, recipe in recipes.items()
    }
    notify(f"scaling: starting {', '.join(map(str, processes))} processes")
    with taking_turns(starts, hosts, rate) as jobs:
        steps = _calibrated(jobs, notify)
        taken: dict[int, list[list[Took]]] = {count: [] for count in processes}
        for number in rounds(MOST_ROUNDS, seconds):
            notify(f"scaling: round {number + 1}, {steps} steps each")
            first = number % len(processes)  # none is always first
            for count in [*processes[first:], *processes[:first]]:
                taken[count].append(jobs[count].ask(Turn(steps)))
    rows = _rows(taken, recipes, steps)
    digests = {row.weights_sha256 for row in rows}
    return ScalingReport(
        task=name,
        mode=mode,
        rows=rows,
        same_weights=len(digests) == 1 if mode == "strong" else None,
        reduce=work.placement.reduce,
        device=work.placement.device,
        hosts=hosts,
        rate=rate,
        topology=machine,
    )


def _calibrated(jobs: dict[int, Job[Turn, Took]], notify: Notify) -> int:
    """Steps of a round, the same for all: all jobs take the same first ones, so that their trainings stay level."""
    first = []
    for count, job in jobs.items():
        notify(f"scaling: first steps on {count} process{'' if count == 1 else 'es'}")
        first.append(max(took.seconds for took in job.ask(Turn(LEAST_STEPS))) / LEAST_STEPS)
    return max(LEAST_STEPS, round(ROUND_SECONDS / max(first)))


def _rows(taken: dict[int, list[list[Took]]], recipes: dict[int, Recipe], steps: int) -> tuple[Row, ...]:
    base = min(taken)
    parts = {count: [_parts(took, steps) for took in rounds] for count, rounds in taken.items()}
    rates = {
        count: [recipes[count].global_batch / one.step_seconds for one in rounds] for count, rounds in parts.items()
    }
    return tuple(
        _row(recipes[count], count, base, parts, rates, taken[count][-1][0].weights_sha256, steps)
        for count in sorted(taken)
    )


def _parts(took: Sequence[Took], steps: int) -> Parts:
    return parts_of_step(
        [one.seconds for one in took], [one.waits for one in took], [one.input_seconds for one in took], steps
    )


def _row(
    recipe: Recipe,
    count: int,
    base: int,
    parts: dict[int, list[Parts]],
    rates: dict[int, list[float]],
    digest: str | None,
    steps: int,
) -> Row:
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
        step_seconds=own.step_seconds,
        compute_seconds=own.compute_seconds,
        communication_seconds=own.communication_seconds,
        imbalance_seconds=own.imbalance_seconds,
        input_seconds=own.input_seconds,
        lost=lost(own, first, efficiency * own.step_seconds),
        steps=steps * len(parts[count]),
        rounds=len(parts[count]),
        weights_sha256=digest,
    )


@dataclass(frozen=True)
class Parts:
    """Seconds of a mean step, averaged over processes; they add up to `step_seconds`."""

    step_seconds: float
    communication_seconds: float
    imbalance_seconds: float
    input_seconds: float

    @property
    def compute_seconds(self) -> float:
        """What is left: computing."""
        return self.step_seconds - self.communication_seconds - self.imbalance_seconds - self.input_seconds


@dataclass(frozen=True)
class Lost:
    """Shares of a step's time that an ideal scaling would not have spent; with the efficiency they add up to 1.

    rest: slower computing, by processes that share cores, caches and memory, or by work that is not shared out.
    """

    communication_share: float
    imbalance_share: float
    input_share: float
    rest_share: float


def parts_of_step(
    seconds: Sequence[float], waits: Sequence[Sequence[float]], input_seconds: Sequence[float], steps: int
) -> Parts:
    """What a round's steps consisted of.

    Arguments:
        seconds: of the whole round, by process.
        waits: seconds waited for other processes, by process and step.
        input_seconds: waited for samples in the whole round, by process.
        steps: in the round.

    >>> parts_of_step([4.0, 4.0], [[1.5, 1.0], [0.5, 1.0]], [0.0, 0.0], 2)
    Parts(step_seconds=2.0, communication_seconds=0.75, imbalance_seconds=0.25, input_seconds=0.0)
    """
    least = sum(min(of_step) for of_step in zip(*waits, strict=True)) / steps
    waited = statistics.fmean(sum(own) for own in waits) / steps
    return Parts(max(seconds) / steps, least, waited - least, statistics.fmean(input_seconds) / steps)


def medians(rounds: Sequence[Parts]) -> Parts:
    """Each part's median over rounds; the parts need not add up to the step's to the last digit."""
    return Parts(
        *(
            statistics.median(getattr(one, name) for one in rounds)
            for name in ("step_seconds", "communication_seconds", "imbalance_seconds", "input_seconds")
        )
    )


def lost(own: Parts, base: Parts, ideal_seconds: float) -> Lost:
    """How much more than ideal each part takes, as a share of a step.

    Arguments:
        own: a step on more processes.
        base: a step on the fewest.
        ideal_seconds: of a step on more processes, had they taken nothing from each other.
    """
    scale = ideal_seconds / base.step_seconds

    def share(name: str) -> float:
        mine: float = getattr(own, name)
        its: float = getattr(base, name)
        return (mine - scale * its) / own.step_seconds

    communication, imbalance, waiting, computing = (
        share(f"{name}_seconds") for name in ("communication", "imbalance", "input", "compute")
    )
    return Lost(communication, imbalance, waiting, computing)


def efficiency_rounds(rates: Mapping[int, Sequence[float]], processes: int, base: int) -> list[float]:
    """Efficiency round by round: samples per second and process, against the fewest processes in the same round.

    >>> efficiency_rounds({1: [100.0, 50.0], 2: [180.0, 90.0]}, 2, 1)
    [0.9, 0.9]
    """
    pairs = zip(rates[processes], rates[base], strict=True)
    return [mine / processes / (its / base) for mine, its in pairs]
