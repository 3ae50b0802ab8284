"""The recipe of a run: what was given, and what auto derives before step 0.

With several workers auto races optimizers (candidates.py): each trains for a few steps on a part of the data, Muon at
three rates, and the lowest loss on held-out data wins. One trial is twice as long: the share of what it then learns
that carries over to held-out data says how hard and how long the run may train. Without a race auto measures the noise
scale in a short pilot and follows it with AdaScale. All of it depends on task, recipe and seed alone, never on timing,
so every process and every machine of one kind derives the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalewise.engine.candidates import (
    CARRIES,
    DEFAULT_CANDIDATES,
    MOST_WORKERS,
    MUON_LADDER,
    UNKNOWN,
    WARMUP_SHARE,
    Budget,
    Candidate,
    Found,
    best_rate,
    budget,
    candidate,
    candidate_names,
    check_names,
    single_steps,
)
from scalewise.engine.data import streams
from scalewise.engine.data.samples import held_out_samples, open_samples, some
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement, available_cores
from scalewise.engine.processes import signals
from scalewise.errors import Interrupted, NonFiniteLoss, RecipeError
from scalewise.optim.rules import matrices
from scalewise.recipe import Derived, Recipe, RecipeMode, Search, Trial, adapts, fitting_lr, resolve
from scalewise.records import Step
from scalewise.tasks.task import Task

LEAST_STEPS, MOST_STEPS = 16, 60  # of the pilot
PILOT_SHARE = 0.1  # of the single-worker budget, between those
SEARCH_SHARE, MOST_SEARCH_SHARE = 0.03, 0.1  # of one worker's steps: the race by default, and at most
LEAST_TRIAL_STEPS, USUAL_TRIAL_STEPS, MOST_TRIAL_STEPS = 8, 10, 40
TRIAL_PASSES = 4  # of the longer trial over its part of the data: enough to memorize what does not carry over
LEAST_HELD_OUT = 1000  # samples to judge by, where there are that many
MUON_HANDICAP = 3.0  # short trials favour large rates: an optimizer with a third of Muon's loss was behind in the end


@dataclass(frozen=True)
class Auto:
    """How auto derives.

    Arguments:
        epochs_fixed: whether it must keep to the single worker's number of samples.
        search: steps of the race, as a share of the single worker's; 0 for no race: AdaScale. By default 3 %, or as
            much as trials need, up to 10 %.
        names: candidates: optimizers, or `own`.
    """

    epochs_fixed: bool = False
    search: float | None = None
    names: Sequence[str] = DEFAULT_CANDIDATES

    def __post_init__(self) -> None:
        check_names(self.names)
        if self.search is not None and not 0 <= self.search <= 1:
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
    processes: int = 1,
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
        processes: of the job that derives together; trials run on all of them.
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
    names, spent = candidate_names(base, given, how.names), Search(0, 0, 0.0)
    if steps := _trial_steps(task, names, given, placement, wanted, samples, how):
        race = _Race(task, base, given, placement, samples, steps, processes, on_trial)
        found = race.winner(names, known.trials if known else ())
        spent = race.search(wanted.epochs)
        if found is not None:
            name, measured = found
            total = budget(wanted, samples, how.epochs_fixed, measured.carried)
            chosen = candidate(name, base, given, samples, total.steps, measured)
            return *_applied(base, given, chosen, total, _verdict(spent.trials, name, steps)), spent
        known = None
    pilot = None if how.epochs_fixed else known or measure(task, wanted, samples, placement, hold_out)
    if pilot is not None and spent.trials:  # all candidates diverged
        counted = {name: getattr(pilot, name) + getattr(spent, name) for name in ("steps", "samples", "seconds")}
        pilot = dataclasses.replace(pilot, **counted, trials=spent.trials)
    return *resolve(base, given, mode, available_cores(), samples, pilot), pilot


def _races(task: Task, given: dict[str, Any], placement: Placement, names: Sequence[str]) -> bool:
    """Whether Muon may run: no other optimizer was asked for, the model has matrices, every process has them whole.

    Without it AdaScale keeps one worker's accuracy; a fixed rule in so few steps does not.
    """
    if given.get("optimizer", "muon") != "muon" or ("lr" in given and "optimizer" not in given):
        return False
    if "muon" not in names:
        return True  # candidates that somebody named
    if placement.shard_optimizer or placement.parallel in ("fsdp", "tensor"):
        return False
    with streams.undisturbed():
        model = task.model()
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return not trained.isdisjoint(matrices(model))


def race_steps(task: Task, base: Recipe, given: dict[str, Any], placement: Placement) -> int:
    """Steps that auto's race takes for a recipe; 0 where there is none, so that it follows the noise instead."""
    wanted, names = base.replace(**given), candidate_names(base, given, DEFAULT_CANDIDATES)
    samples = len(open_samples(task.train, 0, "training"))
    if not adapts(wanted):
        return 0
    return _parts(names, given) * _trial_steps(task, names, given, placement, wanted, samples, Auto())


def _parts(names: Sequence[str], given: dict[str, Any]) -> int:
    """Short trials that a race is as long as: one for each candidate, three for Muon's rates, one that is longer."""
    return len(names) + (1 if "muon" in names else 2) + (2 if "muon" in names and "lr" not in given else 0)


def _trial_steps(
    task: Task,
    names: Sequence[str],
    given: dict[str, Any],
    placement: Placement,
    wanted: Recipe,
    samples: int,
    how: Auto,
) -> int:
    """Steps of a short trial; 0 where there is no race: nothing to judge by, no Muon, too few steps of one worker."""
    judged = samples > (2 if task.validation is None else 1)  # to train on two at least beside those held out
    if how.search == 0 or not judged or not _races(task, given, placement, names):
        return 0
    return share_of_trial(single_steps(wanted, samples), _parts(names, given), how.search)


def share_of_trial(single: int, parts: int, search: float | None) -> int:
    """Steps of a short trial where one worker takes `single`; 0 where that is too few, and nobody asked for a race."""
    steps = int((search or SEARCH_SHARE) * single) // parts
    if search is None:
        steps = max(steps, min(USUAL_TRIAL_STEPS, int(MOST_SEARCH_SHARE * single) // parts))
    if steps < LEAST_TRIAL_STEPS and search is not None:
        least = math.ceil(parts * LEAST_TRIAL_STEPS / single * 1000) / 1000
        advice = f"raise it to {least:g}, or use --search 0" if least <= 1 else "use --search 0"
        raise RecipeError(
            f"--search {search:g} gives a trial {steps} of one worker's {single:,} steps, and each needs "
            f"{LEAST_TRIAL_STEPS}, one of them twice that; {advice}"
        )
    return min(steps, MOST_TRIAL_STEPS) if steps >= LEAST_TRIAL_STEPS else 0


def _loss(trial: Trial, steps: int) -> float:
    """On held-out data after so many steps; infinite where it diverged before."""
    if trial.halfway is not None and trial.steps > steps:
        return trial.halfway[0]
    return math.inf if trial.loss is None else trial.loss


def _rank(trial: Trial, steps: int) -> float:
    loss = _loss(trial, steps)
    return loss / MUON_HANDICAP if trial.name == "muon" and loss > 0 else loss


def _verdict(trials: Sequence[Trial], name: str, steps: int) -> str:
    """How the winner of a race did, and the next one."""

    def ranked(mine: bool) -> list[Trial]:
        return sorted((one for one in trials if (one.name == name) == mine), key=lambda one: _rank(one, steps))

    text = f"held-out loss {_loss(ranked(True)[0], steps):.4g} after {steps} steps"
    if not ranked(False):
        return text
    best = ranked(False)[0]
    loss = _loss(best, steps)
    early = ", which short trials favour" if loss < _loss(ranked(True)[0], steps) else ""
    return f"{text}; next {best.name}: {f'{loss:.4g}' if math.isfinite(loss) else 'diverged'}{early}"


def _applied(
    base: Recipe, given: dict[str, Any], chosen: Candidate, total: Budget, verdict: str
) -> tuple[Recipe, list[Derived]]:
    """The recipe of a candidate, and the reasons for each value; what the task has already is not derived."""
    own = base.replace(**given)
    budgeted = {**given, "epochs": chosen.fields["epochs"]}  # which was that of a single worker
    recipe, threads = resolve(base.replace(**chosen.fields), budgeted, "plain", available_cores())
    reasons = [value for value in chosen.derived() if value.field != "optimizer"]
    changed = [value for value in reasons if getattr(own, value.field) != value.value]
    times = total.samples / (total.single_steps * own.worker_batch)
    price = Derived("samples", total.samples, f"{times:.2f} times those of one worker")
    return recipe, [Derived("optimizer", recipe.optimizer, verdict), *changed, price, *threads]


@dataclass
class _Race:
    """Where candidates are tried, and what was found so far."""

    task: Task
    base: Recipe
    given: dict[str, Any]
    placement: Placement
    samples: int
    steps: int
    processes: int
    on_trial: OnTrial
    trials: list[Trial] = field(default_factory=list)
    _known: list[Trial] = field(default_factory=list)

    def winner(self, names: Sequence[str], known: Sequence[Trial]) -> tuple[str, Found] | None:
        """The best candidate, and what the trials have measured; None where all diverge.

        Arguments:
            names: of the candidates.
            known: trials of a race that was stopped, which are not run again.
        """
        self._known = [*known]
        rate = self._muon() if "muon" in names else None
        for name in names:
            if name != "muon":
                self._next(name, self.steps)
        for trial in sorted(self.trials, key=lambda one: _rank(one, self.steps)):
            if not math.isfinite(_rank(trial, self.steps)):
                break
            if "muon" not in names:
                self._next(trial.name, 2 * self.steps)
            longer = [one for one in self.trials if one.halfway is not None]
            share, rows = carried(longer[-1]) if longer else UNKNOWN, _looked_up(self.task)
            if rows:
                share = max(share, CARRIES[0] + rows * (CARRIES[1] - CARRIES[0]))
            return trial.name, Found(share, rate, self.steps)
        return None

    def _muon(self) -> float | None:
        """Try rates: one of the ladder for twice the steps, the next one up, and one more on the better side.

        The best one; None where it is given.
        """
        if "lr" in self.given:
            self._next("muon", 2 * self.steps)
            return None
        lowest, low, high, highest = MUON_LADDER
        losses = {
            low: _loss(self._next("muon", 2 * self.steps, low), self.steps),
            high: _loss(self._next("muon", self.steps, high), self.steps),
        }
        last = highest if losses[high] < losses[low] else lowest
        losses[last] = _loss(self._next("muon", self.steps, last), self.steps)
        return best_rate(losses)

    def _next(self, name: str, steps: int, rate: float | None = None) -> Trial:
        """Run a trial, or take the next one that is known."""
        if self._known and (self._known[0].name != name or self._known[0].steps > steps):
            self._known.clear()  # of another race
        trial = self._known.pop(0) if self._known else self.run(name, steps, rate)
        self.trials.append(trial)
        self.on_trial(trial)
        return trial

    def search(self, epochs: float) -> Search:
        """What was trained so far, by one worker's epochs."""
        return Search(
            sum(trial.steps for trial in self.trials),
            sum(trial.samples for trial in self.trials),
            sum(trial.seconds for trial in self.trials),
            trials=tuple(self.trials),
            epochs=epochs,
        )

    def run(self, name: str, steps: int, rate: float | None = None) -> Trial:
        """Train a candidate for some steps at a constant rate, and look at its losses at the end.

        Arguments:
            name: of the candidate.
            steps: those of the race, or twice as many: then it also looks at its losses halfway.
            rate: instead of the candidate's own.
        """
        wanted = self.base.replace(**self.given)
        given = {**self.given, "workers": min(wanted.workers, MOST_WORKERS)}
        fields = {**candidate(name, self.base, given, self.samples, steps).fields}
        if rate is not None:
            fields["lr"] = rate
        recipe = self.base.replace(**fields).replace(**given)
        part = max(1, min(2 * self.steps * recipe.global_batch // TRIAL_PASSES, self._most_samples()))
        rising = self.given["warmup_epochs"] / wanted.epochs if "warmup_epochs" in self.given else WARMUP_SHARE
        course = {"steps": steps, "warmup_epochs": rising * self.steps * recipe.global_batch / part}
        trial = recipe.replace(**course, schedule="constant", patience=None, target=None, threads=recipe.threads or 1)
        stop, alone = signals.Stop(), not 1 < self.processes <= recipe.workers
        training = Training(self.task, trial, self.placement, hold_out=True, alone=alone, most_samples=part)
        with training, stop.of(training), signals.stopping(stop.ask):
            looks = [self.steps, steps] if steps > self.steps else [steps]
            seconds, losses = _train(training, looks)
        loss, train_loss = losses[-1] if len(losses) == len(looks) else (None, None)
        halfway = losses[0] if steps > self.steps and losses else None
        peak = trial.lr * trial.lr_factor
        return Trial(name, peak, training.progress.step, training.seen, seconds, loss, train_loss, halfway)

    def _most_samples(self) -> int:
        return self.samples - (held_out_samples(self.samples) if self.task.validation is None else 0)


def carried(trial: Trial) -> float:
    """The share of what a trial has learned of its training data in its second half that holds for held-out data.

    (fall of the loss on held-out data) ÷ (fall of the loss on training data); 1 where it has learned nothing more,
    unknown where it diverged.
    """
    assert trial.halfway is not None
    if trial.loss is None or trial.train_loss is None:
        return UNKNOWN
    held_out, trained = trial.halfway
    learned = trained - trial.train_loss
    return 1.0 if learned <= 1e-6 * abs(trained) else (held_out - trial.loss) / learned


def _looked_up(task: Task) -> float:
    """The share of a model's weights that are rows to look up.

    Few samples of a part of the data touch each row, so what a trial learns of them seems memorized, and is not.
    """
    with streams.undisturbed():
        model = task.model()
    weights = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
    rows = [weights.get(name, 0) for name, weight in model.named_parameters() if weight.ndim >= 2]
    return (sum(rows) - sum(weights.get(name, 0) for name in matrices(model))) / max(sum(weights.values()), 1)


def _train(training: Training, looks: Sequence[int]) -> tuple[float, list[tuple[float, float]]]:
    """Seconds, and the losses on held-out and on training data after each of some steps, until it diverges."""
    held_out, training.validation = training.validation, None  # looked at where asked, not at every epoch
    assert held_out is not None
    judged = some(held_out, max(len(training.samples), LEAST_HELD_OUT))
    seconds, found = 0.0, []
    try:
        for record in training.records():
            if isinstance(record, Step):
                seconds = record.seconds
                if record.step in looks:
                    losses = [training.validate(part)["loss"] for part in (judged, training.samples)]
                    if not all(map(math.isfinite, losses)):
                        break
                    found.append((losses[0], losses[1]))
                if record.step >= looks[-1]:
                    break
    except NonFiniteLoss:
        pass
    if training.interrupted:
        name = signals.name(training.interrupted)
        raise Interrupted(f"{name} stopped auto's race; the same command continues it", training.interrupted)
    return seconds, found


def measure(task: Task, recipe: Recipe, samples: int, placement: Placement, hold_out: bool = False) -> Search:
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
