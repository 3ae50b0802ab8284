"""A process's file, and the first line in it."""

from __future__ import annotations

import os
import warnings
from itertools import chain, count
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scalewise.observations import WatchedProcess, file_of
from scalewise.watching.gradients import is_sharded

_open: set[Path] = set()  # files that watchers of this program write


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


def own_folder(out: Path, process: int) -> Path:
    """`out`, or the first of out-2, out-3, … beside it, where no other watcher of this program writes."""
    named = out if out.name not in ("", "..") else out.resolve()
    numbered = (named.with_name(f"{named.name}-{number}") for number in count(2))
    free = next(one for one in chain([out], numbered) if file_of(one, process).absolute() not in _open)
    if free != out:
        warnings.warn(
            f"sw.watch needs a folder for each watcher, got {out}, where another one still writes; this one writes to "
            f"{free}. Close the first, or give out= for each",
            RuntimeWarning,
            stacklevel=4,
        )
    return free


def open_file(out: Path, process: int) -> TextIO:
    """This process's file; those of earlier jobs are set aside, not lost."""
    out.mkdir(parents=True, exist_ok=True)
    path = file_of(out.absolute(), process)  # by which it is known, wherever the program goes
    if path.exists():
        numbers = chain([""], (f"-{number}" for number in count(2)))
        places = (path.with_suffix(f".earlier{number}.jsonl") for number in numbers)
        path.replace(next(place for place in places if not place.exists()))
    file = path.open("w", encoding="utf-8")
    _open.add(path)
    return file


def close_file(file: TextIO) -> None:
    """Close it, for another watcher to take its place."""
    _open.discard(Path(file.name))
    file.close()
