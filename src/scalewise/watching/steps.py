"""A step while it is being watched, and as it is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.observations import WatchedStep, pack
from scalewise.watching.gradients import OutputGradient
from scalewise.watching.inputs import fingerprints


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
    local = torch.stack([one.cpu() for one in seen.local_norms]) if seen.local_norms else None
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
        statistics_momentum=min((one.momentum for one, _ in norms if one.momentum is not None), default=None),
    )


def _top_label(outputs: list[OutputGradient]) -> list[int] | None:
    """The commonest label's count, that label, and the number of samples."""
    counted = [one.labels for one in outputs if one.labels is not None]
    if not counted:
        return None
    total = torch.stack(counted).sum(0)
    label = int(total.argmax())
    return [int(total[label]), label, int(total.sum())]
