"""Where a run happens: processes and devices. Nothing here changes an exact result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from scalewise.errors import PlacementError
from scalewise.recipe import Recipe

ReduceName = Literal["ordered", "allreduce", "server"]
DeviceName = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Placement:
    """How the work is spread.

    Arguments:
        device: kind of device; `auto` takes CUDA, then MPS, then the CPU.
        reduce: `ordered` (exact), `allreduce` (the backend's own, close but not exact) or `server` (exact).
        shard_optimizer: each process updates its part of the parameters and keeps optimizer state for it alone.
        noise: measure the noise scale.
    """

    device: DeviceName = "auto"
    reduce: ReduceName = "ordered"
    shard_optimizer: bool = False
    noise: bool = True

    def __post_init__(self) -> None:
        if self.shard_optimizer and self.reduce != "ordered":
            raise PlacementError(
                f"--shard-optimizer needs --reduce ordered, got {self.reduce}; drop one of the two flags"
            )

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


def check_processes(processes: int, recipe: Recipe) -> None:
    """Refuse a number of processes that the workers cannot be spread over."""
    if not 1 <= processes <= recipe.workers:
        raise PlacementError(
            f"processes must be between 1 and the number of workers ({recipe.workers}), got {processes}; "
            f"lower --processes or raise --workers"
        )
