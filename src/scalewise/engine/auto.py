"""The recipe of a run: what was given, and what auto derives before step 0.

With several workers auto measures the noise scale in a short pilot and follows it with AdaScale. With `search` it races
candidates instead (candidates.py): each trains for a few steps, and the lowest loss on held-out data wins. Both depend
on task, recipe and seed alone, never on timing, so every process and every machine of one kind derives the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scalewise.engine.candidates import DEFAULT_CANDIDATES, Budget, Candidate, budget, candidates, check_names
from scalewise.engine.data import streams
from scalewise.engine.data.samples import held_out_samples, open_samples
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement, available_cores
from scalewise.engine.processes import signals
from scalewise.errors import Interrupted, NonFiniteLoss, RecipeError
from scalewise.optim.muon import matrix_names
from scalewise.recipe import Derived, Recipe, RecipeMode, Search, Trial, adapts, fitting_lr, resolve
from scalewise.records import Step
from scalewise.tasks.task import Task

LEAST_STEPS, MOST_STEPS = 16, 60  # of the pilot
PILOT_SHARE = 0.1  # of the single-worker budget, between those
MOST_WORKERS = 8  # of the pilot: the noise scale does not depend on how many measure it
LEAST_TRIAL_STEPS, MOST_TRIAL_STEPS = 8, 100  # longer ones still rank no rates for a whole run


@dataclass(frozen=True)
class Auto:
    """How auto derives.

    Arguments:
        epochs_fixed: whether it must keep to the single worker's number of samples.
        search: steps of the race, as a share of the single worker's; 0 for no race: AdaScale.
        names: candidates: optimizers, or `own`.
    """

    epochs_fixed: bool = False
    search: float = 0.0
    names: Sequence[str] = DEFAULT_CANDIDATES

    def __post_init__(self) -> None:
        check_names(self.names)
        if not 0 <= self.search <= 1:
            raise RecipeError(
                f"search must be a share of one worker's steps from 0 to 1, got {self.search}; change --search"
            )


OnTrial = Callable[[Trial], None]


def complete(
    task: Task,
    base: Recipe,
    given: dict[str, Any],
    mode: RecipeMode,
    placement: Placement,
    how: Auto | None = None,
    known: Search | None = None,
    hold_out: bool = False,
    alone: bool = True,
    on_trial: OnTrial = lambda trial: None,
) -> tuple[Recipe, list[Derived], Search | None]:
    """The complete recipe, the reasons for what was derived, and what was trained to derive it, if anything.

    Arguments:
        task: what is learned.
        base: its single-worker recipe, or a loaded one.
        given: fields set by the user; they always win.
        mode: `auto` derives the rest when there are several workers, `plain` changes nothing else.
        placement: where the trials run; one that shards matrices leaves Muon out.
        how: of auto.
        known: the search of an earlier call; its trials are not run again.
        hold_out: whether validation data are held out although nothing in the recipe asks for it.
        alone: train on this process by itself, also inside a job of several.
        on_trial: called after every trial of the race.
    """
    how = how or Auto()
    rate = fitting_lr(base, given) if mode == "auto" else None
    wanted = base.replace(**given, **({"lr": rate.value} if rate else {}))
    hold_out = task.validation is None and (hold_out or wanted.selects)
    samples = len(open_samples(task.train, 0, "training"))
    if hold_out:
        samples -= held_out_samples(samples)
    if how.epochs_fixed and wanted.workers > 1 and wanted.lr_rule == "adascale":
        raise RecipeError(
            "--epochs-fixed and --lr-rule adascale cannot be combined: adascale chooses the number of samples; drop one"
        )
    if mode == "plain" or not adapts(wanted):
        return *resolve(base, given, mode, available_cores(), samples), None
    if how.search == 0 or not _races(task, given, placement, how):
        pilot = None if how.epochs_fixed else known or measure(task, wanted, samples, placement, hold_out, alone)
        return *resolve(base, given, mode, available_cores(), samples, pilot), pilot
    total = budget(wanted, samples, how.epochs_fixed)
    entries = candidates(base, given, samples, total, how.names)
    steps = _trial_steps(len(entries), total, how)
    if not steps:
        return *_applied(base, given, entries[0], total, ""), None
    race = _Race(task, base, given, placement, hold_out, alone)
    trials = [*(known.trials if known else ())]
    for candidate in entries[len(trials) :]:
        trials.append(race.run(candidate, steps))
        on_trial(trials[-1])
    winner = min(range(len(trials)), key=lambda number: _rank(trials[number]))
    found = Search(
        sum(trial.steps for trial in trials),
        sum(trial.samples for trial in trials),
        sum(trial.seconds for trial in trials),
        trials=tuple(trials),
    )
    return *_applied(base, given, entries[winner], total, _verdict(trials, winner)), found


def _races(task: Task, given: dict[str, Any], placement: Placement, how: Auto) -> bool:
    """Whether Muon may run: no other optimizer was asked for, the model has matrices, every process has them whole.

    Without it AdaScale keeps one worker's accuracy; a fixed rule in so few steps does not.
    """
    if given.get("optimizer", "muon") != "muon" or ("lr" in given and "optimizer" not in given):
        return False
    if "muon" not in how.names:
        return True  # candidates that somebody named
    if placement.shard_optimizer or placement.parallel in ("fsdp", "tensor"):
        return False
    with streams.undisturbed():
        model = task.model()
    return isinstance(model, nn.Module) and bool(matrix_names(model))


def _trial_steps(count: int, total: Budget, how: Auto) -> int:
    """Steps of each trial; 0 where one candidate has nobody to race."""
    steps = int(how.search * total.single_steps) // count
    if count == 1:
        return 0
    if steps < LEAST_TRIAL_STEPS:
        least = math.ceil(count * LEAST_TRIAL_STEPS / total.single_steps * 1000) / 1000
        raise RecipeError(
            f"--search {how.search:g} gives each of {count} candidates {steps} of one worker's {total.single_steps:,} "
            f"steps, and a trial needs {LEAST_TRIAL_STEPS}; raise it to {least:g}, or drop it"
        )
    return min(steps, MOST_TRIAL_STEPS, total.steps)


def _rank(trial: Trial) -> float:
    return math.inf if trial.loss is None else trial.loss


def _verdict(trials: Sequence[Trial], winner: int) -> str:
    if trials[winner].loss is None:
        return "all candidates diverged in the race: lower --lr or add --clip-norm"
    others = [trial for number, trial in enumerate(trials) if number != winner]
    best = min(others, key=_rank)
    beaten = "diverged" if best.loss is None else f"{best.loss:.4g}"
    return (
        f"held-out loss {trials[winner].loss:.4g} after {trials[winner].steps} steps; next {best.name} at "
        f"{best.lr:g}: {beaten}"
    )


def _applied(
    base: Recipe, given: dict[str, Any], candidate: Candidate, total: Budget, verdict: str
) -> tuple[Recipe, list[Derived]]:
    """The recipe of a candidate, and the reasons for each value; what the task has already is not derived."""
    own = base.replace(**given)
    recipe, threads = resolve(
        base.replace(**candidate.fields), {**given, **_fields(candidate)}, "plain", available_cores()
    )
    reasons = candidate.derived()
    if verdict and not any(value.field == "optimizer" for value in reasons):
        reasons.insert(0, Derived("optimizer", recipe.optimizer, ""))
    named = [
        dataclasses.replace(value, reason=verdict) if verdict and value.field == "optimizer" else value
        for value in reasons
    ]
    changed = [value for value in named if value.field == "optimizer" or getattr(own, value.field) != value.value]
    times = total.samples / (total.single_steps * own.worker_batch)
    price = Derived("samples", total.samples, f"{times:.2f} times those of one worker")
    return recipe, [*changed, price, *threads]


@dataclass(frozen=True)
class _Race:
    """Where candidates are tried."""

    task: Task
    base: Recipe
    given: dict[str, Any]
    placement: Placement
    hold_out: bool
    alone: bool

    def run(self, candidate: Candidate, steps: int) -> Trial:
        """Train a candidate over a shortened course, and look at the held-out loss once, at its end."""
        recipe = self.base.replace(**candidate.fields)
        recipe = recipe.replace(**self.given | _fields(candidate))
        share = steps / recipe.total_steps(len(open_samples(self.task.train, 0, "training")))
        short = {"steps": steps, "warmup_epochs": recipe.warmup_epochs * share}
        trial = recipe.replace(**short, patience=None, target=None, threads=recipe.threads or 1)
        stop = signals.Stop()
        training = Training(self.task, trial, self.placement, hold_out=True, alone=self.alone)
        with training, stop.of(training), signals.stopping(stop.ask):
            seconds, loss = _train(training, steps)
        return Trial(candidate.name, recipe.lr * recipe.lr_factor, training.progress.step, training.seen, seconds, loss)


def _fields(candidate: Candidate) -> dict[str, Any]:
    """What replaces even what was given: the budget, which was that of a single worker."""
    return {"epochs": candidate.fields["epochs"]}


def _train(training: Training, steps: int) -> tuple[float, float | None]:
    """Seconds, and the loss on held-out data after some steps; None where it diverged."""
    held_out, training.validation = training.validation, None  # looked at once, not at every epoch
    seconds = 0.0
    try:
        for record in training.records():
            if isinstance(record, Step):
                seconds = record.seconds
                if record.step >= steps:
                    break
        if training.interrupted:
            name = signals.name(training.interrupted)
            raise Interrupted(f"{name} stopped auto's race; the same command starts it again", training.interrupted)
        training.validation = held_out
        loss = training.validate()["loss"]
    except NonFiniteLoss:
        return seconds, None
    return seconds, loss if math.isfinite(loss) else None


def measure(
    task: Task, recipe: Recipe, samples: int, placement: Placement, hold_out: bool = False, alone: bool = True
) -> Search:
    """A pilot: train for a few steps, on what will be trained on, and measure the noise scale."""
    workers = min(recipe.workers, MOST_WORKERS)
    fitting = round(PILOT_SHARE * recipe.epochs * samples / (workers * recipe.worker_batch))
    steps = min(max(fitting, LEAST_STEPS), MOST_STEPS, recipe.total_steps(samples) * recipe.workers)
    trial = recipe.replace(workers=workers, lr_rule="adascale", patience=None, target=None, threads=recipe.threads or 1)
    seconds = 0.0
    without = dataclasses.replace(task, validation=None)
    where = Placement(device=placement.device)
    with Training(without, trial, where, hold_out=hold_out, alone=True) as training:
        for record in training.records():
            if isinstance(record, Step):
                seconds = record.seconds
            if training.progress.step >= steps:
                break
        noise = training.noise.estimate()
    return Search(training.progress.step, training.seen, seconds, noise.value)
