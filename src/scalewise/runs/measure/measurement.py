"""Everything that was measured of a task and a recipe, as one document."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalewise.recipe import Recipe
from scalewise.records import finite
from scalewise.runs.measure.critical.branch import BranchReport
from scalewise.runs.measure.critical.sweep import SweepReport
from scalewise.runs.measure.memory.largest import MemoryReport
from scalewise.runs.measure.minima.landscape import Line, Plane
from scalewise.runs.measure.minima.sharpness import SharpnessReport
from scalewise.runs.measure.noise import NoiseReport
from scalewise.runs.measure.throughput import ThroughputReport
from scalewise.stats.critical_batch import WORKERS, CriticalBatch, Efficiency, agreement, efficiency_of, from_noise
from scalewise.stats.steps_law import to_go_by


@dataclass(frozen=True)
class Minimum:
    """How sharp the minimum of one run is, in the full space and in a random subspace."""

    run: str
    full: SharpnessReport
    subspace: SharpnessReport

    def to_json(self) -> dict[str, Any]:
        """As it stands in `sharpness` of the document."""
        return {"run": self.run, "full": self.full.to_json(), "subspace": self.subspace.to_json()}


@dataclass(frozen=True)
class Measurement:
    """What was measured; None for what was not asked for, or skipped."""

    task: str
    recipe: Recipe
    folder: Path | None = None
    noise: NoiseReport | None = None
    verified: BranchReport | SweepReport | None = None
    memory: MemoryReport | None = None
    throughput: ThroughputReport | None = None
    sharpness: tuple[Minimum, ...] | None = None
    line: Line | None = None
    plane: Plane | None = None
    missed: str | None = None  # why `verified` is missing although it was tried
    unfinished: str | None = None  # why the parts after these are missing
    seconds: dict[str, float] = field(default_factory=dict)  # that each part took

    @property
    def cheap(self) -> CriticalBatch | None:
        """The critical batch as the noise scale gives it, with the sampling error alone."""
        return None if self.noise is None else from_noise(self.noise.along, self.recipe.worker_batch)

    @property
    def critical(self) -> CriticalBatch | None:
        """The critical batch to go by, from the noise scale and what was trained."""
        if self.noise is None and self.verified is None:
            return None
        return to_go_by(self.cheap, None if self.verified is None else self.verified.direct)

    @property
    def efficiencies(self) -> tuple[Efficiency, ...]:
        """What more workers bring, by the critical batch to go by; of a lower bound, the least that they bring."""
        if self.critical is None or (self.critical.value is None and not self.critical.low):
            return ()
        workers = sorted({*WORKERS, self.recipe.workers})
        return tuple(efficiency_of(self.critical, self.recipe.worker_batch, count) for count in workers)

    @property
    def agreement(self) -> str | None:
        """Whether the cheap and the direct critical batch say the same."""
        return None if self.cheap is None or self.verified is None else agreement(self.cheap, self.verified.critical)

    def to_json(self) -> dict[str, Any]:
        """What `measure --json` prints."""
        recipe = self.recipe
        content: dict[str, Any] = {
            **({} if self.folder is None else {"run": str(self.folder)}),
            "task": self.task,
            "workers": recipe.workers,
            "worker_batch": recipe.worker_batch,
            "global_batch": recipe.global_batch,
            "optimizer": recipe.optimizer,
            **self._noise(),
            "critical_batch": None if self.critical is None else self.critical.to_json(),
            "efficiency": [row.to_json() for row in self.efficiencies],
            "verified": self._verified(),
            "missed": self.missed or self.unfinished,
            **self._machine(),
            "sharpness": None if self.sharpness is None else [minimum.to_json() for minimum in self.sharpness],
            "landscape": self._landscape(),
            "seconds": self.seconds,
        }
        found: dict[str, Any] = finite(content)
        return found

    def _noise(self) -> dict[str, Any]:
        if self.noise is None:
            missing = dict.fromkeys(("noise_scale", "verdict", "plain", "preconditioned"))
            return {**missing, "stages": [], "layers": []}
        return self.noise.to_json()

    def _machine(self) -> dict[str, Any]:
        memory, speed = self.memory, self.throughput
        rates = {} if speed is None else speed.to_json()
        rows = rates.pop("rows", [])
        return {
            "largest_worker_batch": None if memory is None else memory.largest_worker_batch,
            "memory": None if memory is None else memory.to_json(),
            "throughput": [{name: row[name] for name in ("worker_batch", "samples_per_second")} for row in rows],
            "training": rows,
            **rates,
        }

    def _verified(self) -> dict[str, Any] | None:
        if self.verified is None:
            return None
        cheap = None if self.cheap is None else self.cheap.to_json()
        both = {"cheap": cheap, "critical_batch": self.verified.critical.to_json()}
        return {**both, "agreement": self.agreement, **self.verified.to_json()}

    def _landscape(self) -> dict[str, Any] | None:
        if self.line is None:
            return None
        return {"line": self.line.to_json(), "plane": None if self.plane is None else self.plane.to_json()}
