"""What is to be measured."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from scalewise.errors import UsageError
from scalewise.runs.measure.memory import parse_bytes
from scalewise.runs.request import Question, check_alone, check_counts

Part = Literal["noise", "memory", "throughput"]
Verify = Literal["branch", "sweep"]
RANDOM = "random"


@dataclass(frozen=True)
class MeasureRequest(Question):
    """A measurement as it is asked for."""

    recipe: Path | None = None
    verify: Verify | None = None
    target: float | None = None
    seeds: int | None = None
    most_seeds: int | None = None
    sharpness: bool = False
    weights: Path | None = None
    between: tuple[Path, Path] | None = None
    plane: str | None = None
    samples: int = 1024
    layers: bool = False
    skip: Collection[Part] = ()
    memory: str | int | None = None
    processes: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        check_alone("measure")
        check_counts(seeds=self.seeds, most_seeds=self.most_seeds, processes=self.processes, samples=self.samples)
        _ = self.memory_bytes  # refuse what cannot be read before anything is loaded
        self._check_parts()
        self._check_verification()
        if self.weights is not None and not self.sharpness:
            raise UsageError(f"--weights says whose sharpness is measured, got {self.weights} alone; add --sharpness")
        if self.plane is not None and self.between is None:
            raise UsageError(f"--plane needs two runs that lie in it, got {self.plane} alone; add --between RUN RUN")

    def _check_parts(self) -> None:
        if {*self.skip} == {*get_args(Part)} and not self.sharpness and self.between is None:
            raise UsageError(
                f"something must be left to measure, got {' '.join(f'--skip {part}' for part in get_args(Part))}; drop "
                f"one of them, or add --sharpness or --between RUN RUN"
            )
        if self.layers and "noise" in self.skip:
            raise UsageError("--layers is the noise scale of every layer, got --skip noise too; drop one of them")

    def _check_verification(self) -> None:
        if self.target is not None and not math.isfinite(self.target):
            raise UsageError(f"--target must be a finite loss, got {self.target:g}; give a number, or leave it out")
        if self.target is not None and self.verify != "sweep":
            raise UsageError(f"--target is the loss that a sweep trains to, got {self.target:g}; add --verify sweep")
        if self.seeds is not None and self.verify is None:
            raise UsageError(f"--seeds are the runs of --verify, got {self.seeds}; add --verify sweep or branch")
        if self.most_seeds is not None and self.verify != "sweep":
            raise UsageError(f"--most-seeds bounds the runs of a sweep, got {self.most_seeds}; add --verify sweep")
        if self.most_seeds is not None and self.most_seeds < (self.seeds or 1):
            raise UsageError(f"--most-seeds must be at least --seeds, {self.seeds}, got {self.most_seeds}; raise it")
        if self.verify is not None and "noise" in self.skip:
            raise UsageError(f"--verify {self.verify} checks the noise scale, got --skip noise too; drop one of them")

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that the largest worker batch may take; None for what is free."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def runs(self) -> list[Path]:
        """The runs whose weights are looked at: those of `between`, the third one of `plane`, `weights`."""
        third = [] if self.plane is None or self.plane == RANDOM else [Path(self.plane)]
        return [*(self.between or ()), *third, *([] if self.weights is None else [self.weights])]
