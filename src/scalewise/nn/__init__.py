"""Layers for large-batch training: batch norm over ghost groups, or over the global batch.

May import: recipe, records, errors, files, extras.
Public: `GhostBatchNorm1d`, `GhostBatchNorm2d`, `GhostBatchNorm3d`, `to_ghost_batch_norm`.
"""

from scalewise.nn.batch_norm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d, to_ghost_batch_norm

__all__ = ["GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "to_ghost_batch_norm"]
