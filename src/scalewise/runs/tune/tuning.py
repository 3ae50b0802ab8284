"""A search in progress: what is known of the single worker, what was found for each number of workers, and as JSON."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from scalewise.recipe import Recipe
from scalewise.runs.compare.comparison import Metric
from scalewise.runs.compare.rows import chosen_workers
from scalewise.runs.request import BegunFolder, Subject
from scalewise.runs.tune.search import TUNING_SEEDS, Search, Trial, parsed_budget
from scalewise.stats.interval import Interval, margin, spread

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True)
class BegunTuning(BegunFolder):
    """What a search was begun with. Resuming may change the budget and the number of seeds."""

    what = "search"
    rule = "only budget and seeds may change"
    may_change = ("budget", "seeds")
    workers: str = "8"
    candidates: str | None = None
    seed: int = 0
    budget: str = "20x"
    seeds: int = 5

    @property
    def names(self) -> list[str] | None:
        """The optimizers that were asked for."""
        return None if self.candidates is None else [name.strip() for name in self.candidates.split(",")]


@dataclass(frozen=True)
class Proof:
    """A recipe beside one worker, on all training data with fresh seeds."""

    trial: Trial
    recipe: Recipe
    steps: int
    samples: int
    test: dict[int, float]  # by seed
    difference: Interval[float] | None
    passed: bool


@dataclass
class Found:
    """What was found for one number of workers."""

    search: Search
    proofs: list[Proof] = field(default_factory=list)
    alone: dict[str, Any] | None = None  # one worker with the winner's optimizer

    @property
    def proof(self) -> Proof | None:
        """The one that passed, or came nearest."""
        higher = self.search.metric.higher_is_better

        def worst(proof: Proof) -> float:
            found = proof.difference
            return math.inf if found is None else -found.low if higher else found.high

        return min(self.proofs, key=lambda proof: (not proof.passed, worst(proof)), default=None)


@dataclass
class Tuning:
    """A search in progress: what is known of the single worker, and what was found for each number of workers."""

    subject: Subject
    base: Recipe
    metric: Metric
    samples: tuple[int, int]  # of the data that the search trains on, and of all training data
    begun: BegunTuning
    folder: Path
    reference: dict[int, float] = field(default_factory=dict)  # validation metric by tuning seed
    single: dict[int, float] = field(default_factory=dict)  # test metric by fresh seed
    found: list[Found] = field(default_factory=list)
    spent: dict[str, int] = field(default_factory=dict)  # samples by what they were for

    @property
    def hold_out(self) -> bool:
        """Whether a tenth of the training data is held out for the search."""
        return self.subject.task.validation is None

    @property
    def single_samples(self) -> int:
        """Those of one single-worker training."""
        return self.base.total_steps(self.samples[1]) * self.base.worker_batch

    @property
    def planned(self) -> int:
        """Samples of everything, about; without a budget in samples those of 20 trainings."""
        times = parsed_budget(self.begun.budget)[0] or 20.0
        counts = len(chosen_workers(self.begun.workers))
        return round(self.single_samples * (TUNING_SEEDS + times + self.begun.seeds * (1 + counts) + counts))

    def recipe_file(self, workers: int) -> str:
        """The name of the file with the recipe for so many workers."""
        return RECIPE_FILE if workers == chosen_workers(self.begun.workers)[-1] else f"recipe-{workers}w.json"

    def rows(self) -> list[dict[str, Any]]:
        """One entry per number of workers, as far as it is."""
        return [self._row(found) for found in self.found]

    def _row(self, found: Found) -> dict[str, Any]:
        proof, search = found.proof, found.search
        steps = self.base.total_steps(self.samples[1])
        interval = proof.difference if proof else None
        file = self.folder / self.recipe_file(search.workers)
        words = ["scalewise", "train", self.subject.spec, *(f"--set={one}" for one in self.subject.settings)]
        return {
            "workers": search.workers,
            "recipe": proof.recipe.model_dump() if proof else None,
            "steps": proof.steps if proof else None,
            "samples": proof.samples if proof else None,
            "speedup_steps": steps / proof.steps if proof else None,
            "single": {
                "steps": steps,
                "samples": self.single_samples,
                "metric": self.metric.name,
                "validation": spread([*self.reference.values()]).to_json(),
                "test": spread([*self.single.values()]).to_json(),
            },
            "not_inferior": {
                "difference": interval.value if interval else None,
                "low": interval.low if interval else None,
                "high": interval.high if interval else None,
            },
            "trials": [_trial_json(trial, found) for trial in search.trials],
            "command": shlex.join([*words, "--recipe", str(file)]) if proof and proof.passed else None,
        }

    def document(self) -> dict[str, Any]:
        """What tune.json holds: what --json prints, and what the page shows beside it."""
        rows = self.rows()
        more = [
            {
                "passed": found.proof.passed if found.proof else None,
                "test": spread([*found.proof.test.values()]).to_json() if found.proof else None,
                "proofs": [_proof_json(proof) for proof in found.proofs],
                "same_optimizer": found.alone,
                "spent": found.search.allowance.spent,
            }
            for found in self.found
        ]
        facts = {
            "run": str(self.folder),
            "task": self.subject.task.name,
            "metric": asdict(self.metric),
            "margin": margin(self.metric.name, fmean(self.single.values())) if self.single else None,
            "budget": self.begun.budget,
            "seeds": self.begun.seeds,
            "tuning_seeds": [*self.reference],
            "hold_out": self.hold_out,
            "spent": self.spent | {"search": sum(found.search.allowance.spent for found in self.found)},
        }
        return facts | {"rows": [row | other for row, other in zip(rows, more, strict=True)]}


def _trial_json(trial: Trial, found: Found) -> dict[str, Any]:
    recipe, search = trial.recipe, found.search
    names = ("optimizer", "lr", "warmup_epochs", "schedule", "momentum", "beta1", "beta2", "weight_decay")
    values = [*trial.values.values()]
    return {
        "number": trial.number,
        "name": trial.name,
        **{name: getattr(recipe, name) for name in names},
        "steps": trial.steps,
        "samples": trial.steps * recipe.global_batch,
        "validation": fmean(values) if values else None,
        "gain": search.gain(trial),
        "seeds": len(values),
        "spent": trial.spent,
        "outcome": _outcome(trial, found),
    }


def _outcome(trial: Trial, found: Found) -> str:
    """What became of a trial, in words; one that was close is not confirmed if others take fewer steps."""
    search = found.search
    for proof in found.proofs:
        if proof.trial is trial:
            return "proved" if proof.passed else "not proved"
    if trial.diverged:
        return "diverged"
    if search.is_good(trial):
        return "as good"
    return "not confirmed" if search.behind(trial) <= 1 and len(trial.values) < len(search.reference) else "worse"


def _proof_json(proof: Proof) -> dict[str, Any]:
    found = proof.difference
    ends = {"difference": found.value, "low": found.low, "high": found.high} if found else {}
    return {"trial": proof.trial.number, "steps": proof.steps, "passed": proof.passed, **ends}
