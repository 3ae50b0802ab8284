"""Batch norm over the samples of all processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.horovod.processes import ProcessSet, global_process_set
from scalewise.horovod.torch.collectives import allreduce
from scalewise.horovod.wire import ReduceOp
from scalewise.nn.batch_norm import all_but_channels, next_momentum, spread


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of all processes together, however many samples each has.

    Mean first and then variance, in two reductions, so that nothing cancels; gradients flow through both.
    """

    process_set: ProcessSet = global_process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs (sample, channel, …), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in evaluation, or alone, as torch does."""
        self._check_input_dim(input)
        own = self.training or self.running_mean is None
        if not own or self.process_set.size() == 1:
            return super().forward(input)
        dimensions = all_but_channels(input)
        count = input.new_full((1,), input.numel() / input.shape[1])
        sums = allreduce(torch.cat([input.sum(dimensions), count]), op=ReduceOp.Sum, process_set=self.process_set)
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - spread(mean, input)
        squares = allreduce(centred.square().sum(dimensions), op=ReduceOp.Sum, process_set=self.process_set)
        variance = squares / total
        self._track(mean.detach(), variance.detach(), total)
        output = centred * spread((variance + self.eps).rsqrt(), input)
        if self.weight is not None:
            output = output * spread(self.weight, input) + spread(self.bias, input)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        share = next_momentum(self)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), share)
