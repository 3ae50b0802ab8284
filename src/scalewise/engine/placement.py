"""Where a run happens: processes and devices. Nothing here changes an exact result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from scalewise.errors import PlacementError
from scalewise.recipe import Recipe

ReduceName = Literal["ordered", "allreduce", "server"]
ParallelName = Literal["data", "fsdp", "pipeline", "tensor"]
DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DiskFull = Literal["stop", "continue"]
MOST_LOADERS = 8
CHECK_REPLICAS = 20


@dataclass(frozen=True)
class Placement:
    """How the work is spread.

    Arguments:
        device: kind of device; `auto` takes CUDA, then MPS, then the CPU.
        reduce: `ordered` (exact), `allreduce` (the backend's own, close but not exact) or `server` (exact).
        parallel: what a process has: `data` (the model and some workers), `fsdp` (a shard of every tensor and some
            workers), `pipeline` (some layers) or `tensor` (a shard of every large matrix).
        shard_optimizer: each process updates its part of the parameters and keeps optimizer state for it alone.
        noise: measure the noise scale.
        loaders: loader processes per process, for data that are not in memory; 0 loads between the steps.
        check_replicas: steps from one comparison of the processes' weights to the next; 0 compares at checkpoints only.
    """

    device: DeviceName = "auto"
    reduce: ReduceName = "ordered"
    parallel: ParallelName = "data"
    shard_optimizer: bool = False
    noise: bool = True
    loaders: int | None = None
    check_replicas: int = CHECK_REPLICAS

    def __post_init__(self) -> None:
        if self.shard_optimizer and self.reduce != "ordered":
            raise PlacementError(
                f"--shard-optimizer needs --reduce ordered, got {self.reduce}; drop one of the two flags"
            )
        if self.parallel != "data" and (self.shard_optimizer or self.reduce != "ordered"):
            flag = "--shard-optimizer" if self.shard_optimizer else f"--reduce {self.reduce}"
            raise PlacementError(f"{flag} needs --parallel data, got {self.parallel}; drop one of the two flags")
        if self.loaders is not None and self.loaders < 0:
            raise PlacementError(f"loaders must be at least 0, got {self.loaders}; change --loaders")
        if self.check_replicas < 0:
            raise PlacementError(
                f"check_replicas must be at least 0, got {self.check_replicas}; change --check-replicas"
            )

    @property
    def exact(self) -> bool:
        """Whether gradients are summed in one order, whatever the number of processes."""
        return self.reduce != "allreduce"


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slots(device: DeviceName, threads: int = 1) -> int:
    """Runs that this machine has room for at the same time: one on an accelerator, else cores ÷ threads."""
    import torch

    accelerated = device in ("cuda", "mps") or (
        device == "auto" and (torch.cuda.is_available() or torch.backends.mps.is_available())
    )
    return 1 if accelerated else available_cores() // threads


def default_processes(recipe: Recipe, placement: Placement) -> int:
    """The number of processes that fills the machine: one per CUDA device, or cores ÷ threads; at most one per worker.

    Pipeline stages and tensor shards are not tied to workers; fsdp needs the same number of workers on every process.
    """
    import torch

    slots, device = available_cores() // (recipe.threads or 1), placement.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        slots = torch.cuda.device_count()
    elif device in ("auto", "mps") and torch.backends.mps.is_available():
        slots = 1
    if placement.parallel in ("pipeline", "tensor"):
        return max(1, slots)
    most = max(1, min(recipe.workers, slots))
    return most if placement.parallel == "data" else next(n for n in range(most, 0, -1) if recipe.workers % n == 0)


def loader_processes(placement: Placement, processes_here: int) -> int:
    """Loader processes of one process: as requested, or this machine's cores divided among its processes."""
    if placement.loaders is not None:
        return placement.loaders
    return max(1, min(MOST_LOADERS, available_cores() // processes_here))


def check_recipe(placement: Placement, recipe: Recipe) -> None:
    """Refuse to shard what a recipe needs whole."""
    parallel, optimizer = placement.parallel, recipe.optimizer
    splits = "--shard-optimizer" if placement.shard_optimizer else f"--parallel {parallel}"
    if optimizer in ("muon", "soap") and (placement.shard_optimizer or parallel in ("fsdp", "tensor")):
        raise PlacementError(
            f"--optimizer {optimizer} needs whole matrices on every process, and {splits} shards them; drop {splits}"
        )
    if optimizer in ("lars", "lamb") and parallel == "tensor":
        raise PlacementError(
            f"--optimizer {optimizer} needs norms of whole matrices, and {splits} shards them; use --parallel fsdp "
            f"or pipeline, or another optimizer"
        )
    unfit = {"--batch-norm sync": recipe.batch_norm == "sync", "--compile": recipe.compile}
    for flag, given in unfit.items():
        if given and parallel != "data":
            raise PlacementError(f"{flag} needs the whole model on every process, got {splits}; drop one of the two")
    if recipe.layout == "channels_last" and parallel in ("fsdp", "pipeline"):
        raise PlacementError(
            f"{splits} moves tensors in their plain order, got --layout channels_last; use --layout contiguous"
        )


def check_processes(processes: int, recipe: Recipe, placement: Placement) -> None:
    """Refuse a number of processes that the workers cannot be spread over."""
    most = None if placement.parallel in ("pipeline", "tensor") else recipe.workers
    if processes < 1 or (most is not None and processes > most):
        raise PlacementError(
            f"processes must be between 1 and the number of workers ({recipe.workers}), got {processes}; "
            f"lower --processes or raise --workers"
        )
    if placement.parallel == "fsdp" and recipe.workers % processes:
        raise PlacementError(
            f"--parallel fsdp needs as many workers on every process, got {recipe.workers} workers on {processes}; "
            f"change --processes"
        )
