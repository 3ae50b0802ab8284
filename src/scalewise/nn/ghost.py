"""Ghost batch norm (Hoffer et al. 2017): batch-norm statistics over groups of a fixed number of samples.

Every group is treated as a worker of its own would be: it starts from the same running statistics, and the new
ones are the mean over groups. So groups of n samples in a batch of k·n give what k workers of n samples give.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.nn.convert import convert


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
        if ghost_batch < 1:
            raise ValueError(f"ghost_batch must be at least 1 sample, got {ghost_batch}; 16 to 128 are usual")
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
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
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


KINDS: dict[type[nn.Module], type[_GhostBatchNorm]] = {
    **{kind: kind for kind in (GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d)},
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def to_ghost_batch_norm(model: nn.Module, ghost_batch: int) -> nn.Module:
    """The same model with every batch norm turned into ghost batch norm; parameters, names and hooks are kept.

    A batch norm of another kind (SyncBatchNorm, a lazy one, a class of your own) is refused.
    """

    def ghost(norm: _BatchNorm, kind: type[_GhostBatchNorm]) -> _GhostBatchNorm:
        return kind(norm.num_features, ghost_batch, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)

    return convert(model, KINDS, ghost)
