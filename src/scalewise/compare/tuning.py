"""The same budget of learning rates for every row, judged on validation data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scalewise.compare.jobs import Job, Outcome
from scalewise.compare.rows import Line
from scalewise.compare.table import Metric

TUNING_SEED = 0
# Between neighbours of the grid. A rule that is off by the number of workers (8, say) is found with 5 rates; what a
# finer grid would still gain is small, as a rate is then off by less than √√10 = 1.8.
TUNING_FACTOR = math.sqrt(10)


@dataclass(frozen=True)
class Trial:
    """A learning rate that was tried: its peak and what it gave on validation data; None where it diverged."""

    multiple: float
    lr: float | None
    validation: float | None


@dataclass(frozen=True)
class Tuned:
    """What was tried for a line, and the multiple of its own learning rate that won."""

    line: Line
    trials: list[Trial]
    multiple: float

    @property
    def lr(self) -> float | None:
        """The chosen peak rate."""
        return next((trial.lr for trial in self.trials if trial.multiple == self.multiple), None)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `tuned`."""
        trials = [asdict(trial) for trial in self.trials]
        return {"name": self.line.name, "workers": self.line.workers, "lr": self.lr, "trials": trials}


def grid(budget: int) -> list[float]:
    """Multiples of a row's learning rate that are tried: a geometric grid that holds 1.

    >>> [round(multiple, 2) for multiple in grid(3)]
    [0.32, 1.0, 3.16]
    """
    return [TUNING_FACTOR**exponent for exponent in range(-((budget - 1) // 2), budget // 2 + 1)]


def trials(lines: Sequence[Line], budget: int) -> list[Job]:
    """A run for each line and each multiple of its learning rate."""
    return [Job(line, TUNING_SEED, multiple, trial=True) for line in lines for multiple in grid(budget)]


def tuned(line: Line, ended: Mapping[float, Outcome], metric: Metric) -> Tuned:
    """The multiple with the best validation metric; of equals the one nearest to 1, and 1 if none has a metric."""
    found = [_trial(multiple, ended[multiple], metric) for multiple in sorted(ended)]
    sign = 1 if metric.higher_is_better else -1
    known = [(sign * trial.validation, -abs(math.log(trial.multiple)), trial.multiple)
             for trial in found if trial.validation is not None]  # fmt: skip
    return Tuned(line, found, max(known)[2] if known else 1.0)


def _trial(multiple: float, outcome: Outcome, metric: Metric) -> Trial:
    if outcome.result is None:
        return Trial(multiple, None, None)
    validation = (outcome.result["validation"] or {}).get(metric.name)
    return Trial(multiple, outcome.result["lr"]["peak"], validation)


def document(found: Sequence[Tuned], budget: int) -> dict[str, Any]:
    """What `tuned` of the JSON document holds."""
    rows = [row.to_json() for row in found]
    return {"budget": budget, "factor": TUNING_FACTOR, "seed": TUNING_SEED, "rows": rows}
