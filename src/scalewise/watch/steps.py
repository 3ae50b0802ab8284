"""A step while it is being watched, its batch-norm statistics, and as it is written."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scalewise.doctor.observations import WatchedProcess, WatchedStep, file_of, pack
from scalewise.nn.batch_norm import smallest_momentum
from scalewise.watch.fingerprints import fingerprints
from scalewise.watch.gradients import OutputGradient, is_sharded


@dataclass
class OpenStep:
    """What was seen since the last step; tensors are read when they are written, so that nothing waits for a device."""

    samples: list[int] = field(default_factory=list)
    passed_back: bool = False  # whether a backward pass has begun
    inputs: list[list[Tensor]] = field(default_factory=list)  # per micro batch, some elements of every tensor
    losses: list[Tensor] = field(default_factory=list)
    local_norms: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    outputs: list[OutputGradient] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)
    norms: list[tuple[_BatchNorm, int]] | None = None  # batch norm in training mode and its group; None: nobody looked
    half: tuple[float, Tensor] | None = None  # samples of a half, and its mean gradient's square
    half_seconds: float = 0.0
    weights: tuple[Tensor, Tensor] | None = None
    lr: float = 0.0
    seconds: float = 0.0
    spent: float = 0.0


def observed(waiting: list[tuple[int, OpenStep]]) -> Iterator[WatchedStep]:
    """Steps as they are written; here tensors are read."""
    inputs = iter(fingerprints([elements for _, seen in waiting for elements in seen.inputs]))
    for number, seen in waiting:
        mine = [next(inputs) for _ in seen.inputs]
        yield _observed(number, seen, pack(torch.cat(mine).cpu().numpy()) if mine else None)


def _observed(number: int, seen: OpenStep, inputs: str | None) -> WatchedStep:
    squares = [float(square) for square in seen.squares]
    local = torch.stack([one.cpu().double() for one in seen.local_norms]) if seen.local_norms else None
    first = float(local @ local) if local is not None else (squares[0] if len(squares) > 1 else None)
    losses = [float(loss) for loss in seen.losses]
    loss = sum(losses) / len(losses) if losses else None
    norms = seen.norms or []
    batches = norms[0][0].num_batches_tracked if norms else None
    return WatchedStep(
        step=number,
        lr=seen.lr,
        samples=seen.samples,
        seconds=round(seen.seconds, 6),
        inputs=inputs,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        loss_finite=loss is None or math.isfinite(loss),
        first_square=first,
        passes=len(squares) or None,
        square=squares[-1] if squares else None,
        gradient_finite=math.isfinite(squares[-1]) if squares else None,
        part_samples=seen.half[0] if seen.half else None,
        part_square=float(seen.half[1]) if seen.half else None,
        averaging=[[float(one.positions), float(one.size)] for one in seen.outputs] or None,
        top_label=_top_label(seen.outputs),
        weights=[float(value) for value in seen.weights[0]] if seen.weights else None,
        weight_norm=float(seen.weights[1]) if seen.weights else None,
        statistics_gap=float(torch.stack(seen.gaps).max()) if seen.gaps else None,
        statistics_batches=int(batches) if seen.gaps and batches is not None else None,
        statistics_layers=len(norms) if seen.norms is not None else None,
        statistics_group=min((group for _, group in norms), default=None),
        statistics_momentum=smallest_momentum([layer for layer, _ in norms]),
    )


def _top_label(outputs: list[OutputGradient]) -> list[int] | None:
    """The commonest label's count, that label, and the number of samples."""
    counted = [one.labels for one in outputs if one.labels is not None]
    if not counted:
        return None
    total = torch.stack(counted).sum(0)
    label = int(total.argmax())
    return [int(total[label]), label, int(total.sum())]


_open: set[Path] = set()  # files that watchers of this program write


def describe(model: nn.Module, optimizer: Optimizer, layers: list[_BatchNorm]) -> WatchedProcess:
    """What is watched, and as which of how many processes."""
    joined = dist.is_available() and dist.is_initialized()
    return WatchedProcess(
        process=dist.get_rank() if joined else int(os.environ.get("RANK", "0")),
        processes=dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1")),
        optimizer=type(optimizer).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        reduces=any(isinstance(module, DistributedDataParallel) for module in model.modules()),
        sharded=any(is_sharded(parameter) for parameter in model.parameters()),
        batch_norm_layers=len(layers),
        batch_norm_momentum=smallest_momentum(layers),
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


ENOUGH = 1024  # values per channel


def group_of(layer: _BatchNorm, samples: int, processes: int) -> int:
    """The samples that a layer takes its statistics over: a ghost batch, a micro batch, or those of all processes."""
    if (ghost_batch := getattr(layer, "ghost_batch", None)) is not None:
        return int(ghost_batch)
    return samples * processes if isinstance(layer, nn.SyncBatchNorm) else samples


@torch.no_grad()
def gap(layer: _BatchNorm, batch: Tensor) -> Tensor:
    """How far running statistics are from a batch's, in its middle channel.

    Per channel the larger of |running mean − mean| ÷ standard deviation and |log(running variance ÷ variance)|; the
    median over channels, since single channels of a small batch vary a lot.
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    values, dimensions = batch.detach(), batch.ndim - 2
    too_many = batch.numel() / (ENOUGH * batch.shape[1])
    if dimensions and too_many > 1:  # an even grid over the positions of every sample, about as many as are enough
        stride = math.ceil(too_many ** (1 / dimensions))
        grid = (slice(min(stride, size) // 2, None, stride) for size in batch.shape[2:])
        values = values[(slice(None), slice(None), *grid)]
    over = [dimension for dimension in range(values.ndim) if dimension != 1]
    variance, mean = torch.var_mean(values.float(), dim=over)
    variance = variance + layer.eps
    shift = (layer.running_mean - mean).abs() / variance.sqrt()
    stretch = ((layer.running_var + layer.eps) / variance).log().abs()
    return torch.maximum(shift, stretch).median()
