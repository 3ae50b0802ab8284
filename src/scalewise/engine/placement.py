"""Where a run happens: processes and devices. Nothing here changes an exact result."""

from __future__ import annotations

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


def default_processes(recipe: Recipe, cores: int) -> int:
    """As many processes as fill the machine: min(workers, cores ÷ threads), at least 1."""
    return max(1, min(recipe.workers, cores // (recipe.threads or 1)))


def check_processes(processes: int, recipe: Recipe) -> None:
    """Refuse a number of processes that the workers cannot be spread over."""
    if not 1 <= processes <= recipe.workers:
        raise PlacementError(
            f"processes must be between 1 and the number of workers ({recipe.workers}), got {processes}; "
            f"lower --processes or raise --workers"
        )
