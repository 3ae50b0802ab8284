"""Layers for large-batch training."""

from scalewise.nn.ghost import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d, to_ghost_batch_norm

__all__ = ["GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "to_ghost_batch_norm"]
