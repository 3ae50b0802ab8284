"""Batch norm over groups of samples or over the global batch, and the conversion from one kind to another.

Ghost batch norm (Hoffer et al. 2017) takes statistics over groups of a fixed number of samples. Every group is treated
as a worker of its own: it starts from the same running statistics, and the new ones are the mean over groups. So groups
of n samples in a batch of k·n give what k workers of n samples give.

Batch norm over the global batch takes statistics of all workers' samples together, to compare ghost batch norm with. A
layer hands its worker's sums to `exchange` and receives those of all workers, in worker order; whoever runs the workers
provides it. Statistics are combined from (count, mean, sum of squared deviations) of each worker, so every worker's
part is computed at its own fixed shape and the rest is the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.errors import TaskError


def next_momentum(norm: _BatchNorm) -> float:
    """Count a batch; the share of its statistics in the running ones: momentum, or 1 ÷ batches so far."""
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def averaging_layers(model: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def smallest_momentum(layers: Sequence[_BatchNorm]) -> float | None:
    """Of layers that have one, as torch defines it."""
    return min((layer.momentum for layer in layers if layer.momentum is not None), default=None)


class _GhostBatchNorm(_BatchNorm):
    ghost_batch: int

    def __init__(
        self,
        num_features: int,
        ghost_batch: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        _check_ghost_batch(ghost_batch)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.ghost_batch = ghost_batch

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch={self.ghost_batch}"  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if len(input) % self.ghost_batch:
            raise ValueError(
                f"ghost batch norm needs a batch divisible by ghost_batch={self.ghost_batch}, got {len(input)} "
                f"samples; choose a divisor, and drop_last=True in a DataLoader whose last batch is smaller"
            )
        groups = input.split(self.ghost_batch)
        if self.running_mean is None or self.running_var is None or not self.track_running_stats:
            return torch.cat([self._normalized(group, None, None, 0.0) for group in groups])
        factor = next_momentum(self)
        means = self.running_mean.repeat(len(groups), 1)  # (group, feature)
        variances = self.running_var.repeat(len(groups), 1)
        outputs = [
            self._normalized(group, mean, variance, factor)
            for group, mean, variance in zip(groups, means, variances, strict=True)
        ]
        self.running_mean.copy_(means.mean(0))
        self.running_var.copy_(variances.mean(0))
        return torch.cat(outputs)

    def _normalized(self, group: Tensor, mean: Tensor | None, variance: Tensor | None, factor: float) -> Tensor:
        return F.batch_norm(group, mean, variance, self.weight, self.bias, True, factor, self.eps)


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with statistics over groups of `ghost_batch` samples."""


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with statistics over groups of `ghost_batch` samples.

    >>> GhostBatchNorm2d(3, ghost_batch=4)(torch.randn(8, 3, 5, 5)).shape
    torch.Size([8, 3, 5, 5])
    """


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with statistics over groups of `ghost_batch` samples."""


GHOST_KINDS: dict[type[nn.Module], type[_GhostBatchNorm]] = {
    **{kind: kind for kind in (GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d)},
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def to_ghost_batch_norm(model: nn.Module, ghost_batch: int) -> nn.Module:
    """The same model with every batch norm turned into ghost batch norm; parameters, names and hooks are kept.

    A batch norm of another kind (SyncBatchNorm, a lazy one, a class of your own) is refused.
    """
    _check_ghost_batch(ghost_batch)
    for layer in convert(model, GHOST_KINDS):
        assert isinstance(layer, _GhostBatchNorm)
        layer.ghost_batch = ghost_batch
    return model


def _check_ghost_batch(ghost_batch: int) -> None:
    if ghost_batch < 1:
        raise ValueError(f"ghost_batch must be at least 1 sample, got {ghost_batch}; 16 to 128 are usual")


# This worker's numbers -> (worker, number), and whether this worker is the first one of its process.
Exchange = Callable[[Tensor], tuple[Tensor, bool]]


class _Normalize(torch.autograd.Function):
    """y = (x − mean) ÷ √(variance + ε) over all workers' samples; backward exchanges the two sums it needs."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, mean: Tensor, scale: Tensor, count: float, exchange: Exchange) -> Tensor:  # noqa: ANN401
        normalized = (input - spread(mean, input)) * spread(scale, input)
        ctx.save_for_backward(normalized, scale)
        ctx.count, ctx.exchange = count, exchange
        return normalized

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = gradients
        normalized, scale = ctx.saved_tensors
        dims = all_but_channels(gradient)
        own = torch.cat([gradient.sum(dims), (gradient * normalized).sum(dims)])
        everybody, _ = ctx.exchange(own)
        plain, weighted = (everybody.sum(0) / ctx.count).chunk(2)
        rest = gradient - spread(plain, gradient) - normalized * spread(weighted, gradient)
        return rest * spread(scale, gradient), None, None, None, None


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
        return normalized * spread(self.weight, input) + spread(self.bias, input)

    def _remember(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics, once per process: they are the same for all workers."""
        if self.running_mean is None or self.running_var is None:
            return
        factor = next_momentum(self)
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), factor)


GLOBAL_KINDS: dict[type[nn.Module], type[_GlobalBatchNorm]] = {
    kind: type(f"Global{kind.__name__}", (_GlobalBatchNorm, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def to_global_batch_norm(model: nn.Module) -> nn.Module:
    """The same model with the statistics of every batch norm over all workers; parameters and names are kept."""
    convert(model, GLOBAL_KINDS)
    return model


@contextmanager
def exchanging(model: nn.Module, exchange: Exchange) -> Iterator[None]:
    """Set in every layer how workers exchange their numbers; without it each takes its own statistics."""
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
    dims = all_but_channels(input)
    mean = input.mean(dims)
    deviations = (input - spread(mean, input)).square().sum(dims)
    return torch.cat([mean.new_tensor([input.numel() / input.shape[1]]), mean, deviations])


def _combined(everybody: Tensor) -> tuple[float, Tensor, Tensor]:
    """Count, mean and variance of all workers' samples from each one's moments, (worker, 1 + 2 · channel)."""
    counts, rest = everybody[:, :1], everybody[:, 1:]
    means, deviations = rest.chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (deviations + counts * (means - mean).square()).sum(0) / count
    return float(count), mean, variance


def all_but_channels(input: Tensor) -> list[int]:
    """The dimensions that statistics are taken over."""
    return [0, *range(2, input.ndim)]


def spread(channels: Tensor, like: Tensor) -> Tensor:
    """A number per channel, shaped to go with (sample, channel, …)."""
    return channels.view(1, -1, *[1] * (like.ndim - 2))


def convert(model: nn.Module, kinds: Mapping[type[nn.Module], type[_BatchNorm]]) -> list[_BatchNorm]:
    """Give every batch norm of a model the class in `kinds`; parameters, buffers, names and hooks stay its own."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:  # before anything changes
        if type(layer) not in kinds:
            raise TaskError(
                f"batch norm must be one of {', '.join(kind.__name__ for kind in kinds)} to be converted, got "
                f"{type(layer).__name__}; put one of these in its place first"
            )
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    return layers
