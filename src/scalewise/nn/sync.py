"""Batch norm over the global batch: statistics of all workers' samples together, to compare ghost batch norm with.

A layer hands its worker's sums to `exchange` and gets everybody's back, in worker order; whoever runs the workers
provides it. Statistics are combined from (count, mean, sum of squared deviations) of each worker, so every worker's
part is computed at its own fixed shape and the rest is the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.nn.convert import convert

# This worker's numbers -> (worker, number), and whether this worker is the first one of its process.
Exchange = Callable[[Tensor], tuple[Tensor, bool]]


class _Normalize(torch.autograd.Function):
    """y = (x − mean) ÷ √(variance + ε) over all workers' samples; backward exchanges the two sums it needs."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, mean: Tensor, scale: Tensor, count: float, exchange: Exchange) -> Tensor:  # noqa: ANN401
        normalized = (input - _spread(mean, input)) * _spread(scale, input)
        ctx.save_for_backward(normalized, scale)
        ctx.count, ctx.exchange = count, exchange
        return normalized

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = gradients
        normalized, scale = ctx.saved_tensors
        dims = _all_but_channels(gradient)
        own = torch.cat([gradient.sum(dims), (gradient * normalized).sum(dims)])
        everybody, _ = ctx.exchange(own)
        plain, weighted = (everybody.sum(0) / ctx.count).chunk(2)
        rest = gradient - _spread(plain, gradient) - normalized * _spread(weighted, gradient)
        return rest * _spread(scale, gradient), None, None, None, None


class _GlobalBatchNorm(_BatchNorm):
    exchange: Exchange | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.exchange is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            everybody, first = self.exchange(_moments(input))
            count, mean, variance = _combined(everybody)
            if first:
                self._remember(count, mean, variance)
            scale = (variance + self.eps).rsqrt()
        normalized: Tensor = _Normalize.apply(input, mean, scale, count, self.exchange)  # type: ignore[no-untyped-call]
        if not self.affine:
            return normalized
        return normalized * _spread(self.weight, input) + _spread(self.bias, input)

    def _remember(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics, once per process: they are the same for all workers."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), factor)


class GlobalBatchNorm1d(_GlobalBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the samples of all workers."""


class GlobalBatchNorm2d(_GlobalBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the samples of all workers."""


class GlobalBatchNorm3d(_GlobalBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over the samples of all workers."""


KINDS: dict[type[nn.Module], type[_GlobalBatchNorm]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
}


def to_global_batch_norm(model: nn.Module) -> nn.Module:
    """The same model with the statistics of every batch norm over all workers; parameters and names are kept."""

    def build(norm: _BatchNorm, kind: type[_GlobalBatchNorm]) -> _GlobalBatchNorm:
        return kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)

    return convert(model, KINDS, build)


@contextmanager
def exchanging(model: nn.Module, exchange: Exchange) -> Iterator[None]:
    """Tell every layer how workers exchange their numbers; without it each takes its own statistics."""
    layers = [module for module in model.modules() if isinstance(module, _GlobalBatchNorm)]
    for layer in layers:
        layer.exchange = exchange
    try:
        yield
    finally:
        for layer in layers:
            layer.exchange = None


def _moments(input: Tensor) -> Tensor:
    """One worker's count, means and sums of squared deviations, (1 + 2 · channel,)."""
    dims = _all_but_channels(input)
    mean = input.mean(dims)
    deviations = (input - _spread(mean, input)).square().sum(dims)
    return torch.cat([mean.new_tensor([input.numel() / input.shape[1]]), mean, deviations])


def _combined(everybody: Tensor) -> tuple[float, Tensor, Tensor]:
    """Count, mean and variance of all workers' samples from each one's moments, (worker, 1 + 2 · channel)."""
    counts, rest = everybody[:, :1], everybody[:, 1:]
    means, deviations = rest.chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (deviations + counts * (means - mean).square()).sum(0) / count
    return float(count), mean, variance


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.ndim)]


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.ndim - 2))
