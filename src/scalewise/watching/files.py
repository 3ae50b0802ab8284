"""A process's file, and the first line in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scalewise.observations import WatchedProcess, file_of
from scalewise.watching.gradients import is_sharded


def describe(model: nn.Module, optimizer: Optimizer, layers: list[_BatchNorm]) -> WatchedProcess:
    """What is watched, and as which of how many processes."""
    joined = dist.is_available() and dist.is_initialized()
    momenta = [layer.momentum for layer in layers if layer.momentum is not None]
    return WatchedProcess(
        process=dist.get_rank() if joined else int(os.environ.get("RANK", "0")),
        processes=dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1")),
        optimizer=type(optimizer).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        reduces=any(isinstance(module, DistributedDataParallel) for module in model.modules()),
        sharded=any(is_sharded(parameter) for parameter in model.parameters()),
        batch_norm_layers=len(layers),
        batch_norm_momentum=min(momenta, default=None),
        batch_norm_synchronised=bool(layers) and all(isinstance(layer, nn.SyncBatchNorm) for layer in layers),
    )


def open_file(out: Path, process: int) -> TextIO:
    """This process's file; that of an earlier job is set aside, not lost."""
    out.mkdir(parents=True, exist_ok=True)
    path = file_of(out, process)
    if path.exists():
        path.replace(path.with_suffix(".earlier.jsonl"))
    return path.open("w", encoding="utf-8")
