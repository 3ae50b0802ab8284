"""Batch norm's running statistics against those of the batch that goes through it now."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ENOUGH = 1024  # values per channel


def batch_norm_layers(model: nn.Module) -> list[_BatchNorm]:
    """The layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


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
    values = _some(batch.detach())
    over = [dimension for dimension in range(values.ndim) if dimension != 1]
    variance, mean = torch.var_mean(values.float(), dim=over)
    variance = variance + layer.eps
    shift = (layer.running_mean - mean).abs() / variance.sqrt()
    stretch = ((layer.running_var + layer.eps) / variance).log().abs()
    return torch.maximum(shift, stretch).median()


def _some(batch: Tensor) -> Tensor:
    """An even grid over the positions of every sample, about as many as are enough."""
    dimensions = batch.ndim - 2
    too_many = batch.numel() / (ENOUGH * batch.shape[1])
    if not dimensions or too_many <= 1:
        return batch
    stride = math.ceil(too_many ** (1 / dimensions))
    return batch[(slice(None), slice(None), *(slice(min(stride, size) // 2, None, stride) for size in batch.shape[2:]))]
