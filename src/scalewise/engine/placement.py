"""Where a run happens: processes and devices. Nothing here changes an exact result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from scalewise.errors import PlacementError
from scalewise.recipe import Recipe

ReduceName = Literal["ordered", "allreduce", "server"]
DeviceName = Literal["auto", "cpu", "cuda", "mps"]
MOST_LOADERS = 8


@dataclass(frozen=True)
class Placement:
    """How the work is spread.

    Arguments:
        device: kind of device; `auto` takes CUDA, then MPS, then the CPU.
        reduce: `ordered` (exact), `allreduce` (the backend's own, close but not exact) or `server` (exact).
        shard_optimizer: each process updates its part of the parameters and keeps optimizer state for it alone.
        noise: measure the noise scale.
        loaders: loader processes per process, for data that are not in memory; 0 loads between the steps.
    """

    device: DeviceName = "auto"
    reduce: ReduceName = "ordered"
    shard_optimizer: bool = False
    noise: bool = True
    loaders: int | None = None

    def __post_init__(self) -> None:
        if self.shard_optimizer and self.reduce != "ordered":
            raise PlacementError(
                f"--shard-optimizer needs --reduce ordered, got {self.reduce}; drop one of the two flags"
            )

        if self.loaders is not None and self.loaders < 0:
            raise PlacementError(f"loaders must be at least 0, got {self.loaders}; change --loaders")

    @property
    def exact(self) -> bool:
        """Whether the bytes are independent of the number of processes."""
        return self.reduce != "allreduce"


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_processes(recipe: Recipe, device: DeviceName) -> int:
    """As many processes as fill the machine: one per CUDA device, or cores ÷ threads; at most one per worker."""
    import torch

    slots = available_cores() // (recipe.threads or 1)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        slots = torch.cuda.device_count()
    elif device in ("auto", "mps") and torch.backends.mps.is_available():
        slots = 1
    return max(1, min(recipe.workers, slots))


def loader_processes(placement: Placement, processes_here: int) -> int:
    """Loader processes of one process: as asked, or this machine's cores shared out."""
    if placement.loaders is not None:
        return placement.loaders
    return max(1, min(MOST_LOADERS, available_cores() // processes_here))


def check_optimizer(placement: Placement, recipe: Recipe) -> None:
    """Refuse to split what an optimizer needs whole."""
    if placement.shard_optimizer and recipe.optimizer == "muon":
        raise PlacementError(
            "--optimizer muon needs whole matrices on every process, which --shard-optimizer takes apart; "
            "drop --shard-optimizer"
        )


def check_processes(processes: int, recipe: Recipe) -> None:
    """Refuse a number of processes that the workers cannot be spread over."""
    if not 1 <= processes <= recipe.workers:
        raise PlacementError(
            f"processes must be between 1 and the number of workers ({recipe.workers}), got {processes}; "
            f"lower --processes or raise --workers"
        )
