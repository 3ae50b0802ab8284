"""The rows of the table: functions from a task's single-worker recipe and a number of workers to the recipe of a row.

    single       1 worker, the recipe as it is
    naive        N workers, nothing else
    batch-norm     + batch norm that is right for many workers
    lr-scaled        + the learning rate scaled by the rule that fits the optimizer
    warm-up            + warm-up
    lars, lamb           + that optimizer instead
    adascale       + AdaScale instead of a fixed rule (with batch-norm, without warm-up)
    auto         what `train --recipe auto` does with the task as it is
    muon         + Muon with warm-up and a cosine instead, single's samples     (when it is named)
    tuned        a recipe that `scalewise tune` found                           (when it is named or given)

A row builds on those above it whether or not they are shown. A row that has nothing to change, or whose recipe cannot
be, is left out with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from scalewise.engine.candidates import UNKNOWN, Found, candidate
from scalewise.errors import RecipeError, UsageError
from scalewise.recipe import ADAPTIVE, USUAL_LR, Recipe, RecipeMode, fitting_rule, fitting_warmup

LARGEST_GHOST_BATCH = 32  # samples: Hoffer et al. 2017 find groups of 16 to 128 alike; 32 is most tasks' worker batch
DEFAULT_ROWS = ("single", "naive", "batch-norm", "lr-scaled", "warm-up", "lars", "lamb", "adascale", "auto")
SWEEP_ROWS = ("naive", "auto")
TUNED = "tuned"
MOST_WORKERS = 10**7


@dataclass(frozen=True)
class Facts:
    """What rows need to know of a task: its single-worker recipe, its settings and its batch norm."""

    base: Recipe
    settings: tuple[str, ...]
    samples: int
    has_batch_norm: bool
    takes_bn: bool
    changes: str = ""  # what flags changed in the task's own recipe
    tuned: Recipe | None = None  # what `scalewise tune` found


@dataclass(frozen=True)
class RowPlan:
    """How a row is trained: the recipe (its seed is still open), the task's settings, and the words for it."""

    recipe: Recipe
    settings: tuple[str, ...]
    what: str
    mode: RecipeMode = "plain"


@dataclass(frozen=True)
class Line:
    """A row of the table, at one number of workers."""

    name: str
    workers: int
    plan: RowPlan

    @property
    def key(self) -> tuple[str, int]:
        """What sets it apart from the other lines."""
        return self.name, self.workers


@dataclass(frozen=True)
class Skipped:
    """A row that is left out, and why."""

    name: str
    reason: str


class NothingToChange(Exception):
    """A row would repeat another one; the message says why."""


Remedy = Callable[[Facts, int], RowPlan]


def single(facts: Facts, workers: int) -> RowPlan:
    """One worker."""
    changes = f" but for {facts.changes}" if facts.changes else ""
    return RowPlan(facts.base.replace(workers=1), facts.settings, f"1 worker, the task's own recipe{changes}")


def naive(facts: Facts, workers: int) -> RowPlan:
    """More workers and nothing else."""
    return RowPlan(facts.base.replace(workers=workers), facts.settings, "nothing changed but the number of workers")


def batch_norm(facts: Facts, workers: int) -> RowPlan:
    """Batch norm where the task can have it, or in ghost groups where the model has it."""
    plan = naive(facts, workers)
    if not facts.has_batch_norm:
        if not facts.takes_bn:
            raise NothingToChange("the model has no batch norm, and the task has no setting bn to add it")
        others = tuple(setting for setting in facts.settings if not setting.startswith("bn="))
        return dataclasses.replace(
            plan, settings=(*others, "bn=true"), what="batch norm per worker added to the model (--set bn=true)"
        )
    if plan.recipe.ghost_batch is not None:
        raise NothingToChange(f"the recipe has batch_norm={plan.recipe.batch_norm} already")
    group = ghost_batch(plan.recipe.rows)
    if group == plan.recipe.rows:
        raise NothingToChange(f"batch norm is over {group} samples of a worker already, and no smaller group is better")
    recipe = plan.recipe.replace(batch_norm=f"ghost:{group}")
    return dataclasses.replace(plan, recipe=recipe, what=f"batch-norm statistics over {group} samples (ghost:{group})")


def ghost_batch(rows: int) -> int:
    """The largest group of at most 32 samples, and at least 2, that divides the rows; else all of them.

    >>> ghost_batch(512), ghost_batch(48), ghost_batch(37)
    (32, 24, 37)
    """
    groups = (group for group in range(min(rows, LARGEST_GHOST_BATCH), 1, -1) if rows % group == 0)
    return next(groups, rows)


def _normalized(facts: Facts, workers: int) -> tuple[RowPlan, str]:
    """What the rows after batch-norm start from, and its name."""
    try:
        return batch_norm(facts, workers), "batch-norm"
    except NothingToChange:
        return naive(facts, workers), "naive"


def lr_scaled(facts: Facts, workers: int) -> RowPlan:
    """The LR rule that fits the optimizer, unless the recipe has one."""
    plan, start = _normalized(facts, workers)
    rule = plan.recipe.lr_rule if plan.recipe.lr_rule in ("linear", "sqrt") else fitting_rule(plan.recipe)
    factor = "√workers" if rule == "sqrt" else "workers"
    return _with(plan, f"{start} + learning rate × {factor}", lr_rule=rule, warmup_epochs=0.0)


def warm_up(facts: Facts, workers: int) -> RowPlan:
    """A warm-up as auto has it, unless the recipe has one."""
    plan = lr_scaled(facts, workers)
    given = facts.base.warmup_epochs
    epochs = given if given > 0 else fitting_warmup(plan.recipe, facts.samples)
    return _with(plan, f"lr-scaled + warm-up over {epochs:g} epoch{'' if epochs == 1 else 's'}", warmup_epochs=epochs)


def _layerwise(optimizer: Literal["lars", "lamb"], facts: Facts, workers: int) -> RowPlan:
    """LARS or LAMB with warm-up."""
    lr = facts.base.lr if facts.base.optimizer == optimizer else USUAL_LR[optimizer]
    what = f"warm-up with {optimizer.upper()} instead, learning rate {lr:g} × √workers"
    return _with(warm_up(facts, workers), what, optimizer=optimizer, lr=lr, lr_rule="sqrt")


def adascale(facts: Facts, workers: int) -> RowPlan:
    """AdaScale (Johnson et al. 2020) on the task's own optimizer."""
    plan, start = _normalized(facts, workers)
    doubt = " (derived for SGD)" if plan.recipe.optimizer in ADAPTIVE else ""
    return _with(plan, f"{start} + AdaScale instead of a fixed rule{doubt}", lr_rule="adascale", warmup_epochs=0.0)


def auto(facts: Facts, workers: int) -> RowPlan:
    """What `train --recipe auto` does."""
    recipe = facts.base.replace(workers=workers)
    return RowPlan(recipe, facts.settings, "--recipe auto, with the task as it is", mode="auto")


def muon(facts: Facts, workers: int) -> RowPlan:
    """Muon as auto sets it for a task of which nothing is known, over the samples of single."""
    base = facts.base.replace(schedule="constant")  # for which auto takes the cosine
    steps = base.replace(workers=workers, lr_rule="none").total_steps(facts.samples)
    fields = dict(candidate("muon", base, {"workers": workers}, facts.samples, steps, Found(UNKNOWN)).fields)
    del fields["epochs"]  # single's own
    what = f"Muon with warm-up and a cosine, learning rate {fields['lr']:g}"
    return _with(naive(facts, workers), what, **fields)


def tuned(facts: Facts, workers: int) -> RowPlan:
    """A recipe that `scalewise tune` found."""
    if facts.tuned is None:
        raise RecipeError("no recipe was given; add --tuned FILE, the recipe.json of scalewise tune")
    if facts.tuned.workers != workers:
        raise NothingToChange(f"its recipe is for {facts.tuned.workers} workers")
    recipe = facts.tuned.replace(threads=facts.base.threads)
    return RowPlan(recipe, facts.settings, f"found by scalewise tune: {recipe.optimizer}, learning rate {recipe.lr:g}")


ROWS: dict[str, Remedy] = {
    "single": single,
    "naive": naive,
    "batch-norm": batch_norm,
    "lr-scaled": lr_scaled,
    "warm-up": warm_up,
    "lars": partial(_layerwise, "lars"),
    "lamb": partial(_layerwise, "lamb"),
    "adascale": adascale,
    "auto": auto,
    "muon": muon,
    TUNED: tuned,
}


def _with(plan: RowPlan, what: str, **changes: float | str) -> RowPlan:
    """A plan with more in its recipe."""
    return dataclasses.replace(plan, recipe=plan.recipe.replace(**changes), what=what)


def chosen_rows(text: str | None, several: bool, has_tuned: bool = False) -> list[str]:
    """The rows that --rows names, in its order; by default the usual ones, or those of a sweep over worker counts.

    A tuned recipe that is given is a row in any case.

    >>> chosen_rows("single, auto", several=False, has_tuned=True)
    ['single', 'auto', 'tuned']
    """
    more = [TUNED] if has_tuned else []
    if text is None:
        return [*(SWEEP_ROWS if several else DEFAULT_ROWS), *more]
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ROWS]
    if unknown or not names:
        raise UsageError(
            f"--rows needs names out of {', '.join(ROWS)}, got {unknown[0] if unknown else repr(text)}; "
            f"write for example --rows single,naive,auto"
        )
    return list(dict.fromkeys([*names, *more]))


def chosen_workers(text: str) -> list[int]:
    """The worker counts that --workers names, rising.

    >>> chosen_workers("8,2,4")
    [2, 4, 8]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part[:20]) <= MOST_WORKERS for part in parts):
        raise UsageError(
            f"--workers needs a count of at least 1 and at most {MOST_WORKERS:,}, or several as in 1,2,4,8, got "
            f"{text[:80]!r}"
        )
    return sorted({int(part) for part in parts})


def _check_new(row: Sequence[Line], before: Sequence[Line]) -> None:
    """Leave out a row that would train, at every number of workers, what an earlier one trains already."""
    earlier = {line.key: _trained(line) for line in before if line.name != "single"}
    for name in dict.fromkeys(name for name, _ in earlier):
        if all(earlier.get((name, line.workers)) == _trained(line) for line in row):
            raise NothingToChange(f"with this recipe it is the row {name}")


def _trained(line: Line) -> tuple[object, ...]:
    return line.plan.recipe, line.plan.settings, line.plan.mode


def lines(names: Sequence[str], counts: Sequence[int], facts: Facts, asked: bool) -> tuple[list[Line], list[Skipped]]:
    """The lines of the table in order, and the rows that are left out.

    Arguments:
        names, counts: rows and worker counts; `single` is one line however many counts there are.
        facts: the task.
        asked: whether somebody named the rows; then a recipe that cannot be is their mistake, not left out.
    """
    found: list[Line] = []
    skipped: list[Skipped] = []
    for name in names:
        try:
            at = [1] if name == "single" else counts
            if name == TUNED and facts.tuned is not None and facts.tuned.workers in counts:
                at = [facts.tuned.workers]
            new = [Line(name, workers, ROWS[name](facts, workers)) for workers in at]
            _check_new(new, found)
            found += new
        except NothingToChange as reason:
            skipped.append(Skipped(name, str(reason)))
        except RecipeError as error:
            if asked:
                raise RecipeError(f"row {name}: {error}") from None
            skipped.append(Skipped(name, str(error)))
    return found, skipped
