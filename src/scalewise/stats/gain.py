"""AdaScale (Johnson et al. 2020): how much more a step of many workers is worth than one of a single worker.

With σ² the variance of a worker's gradient and μ² the squared norm of the true one, both averaged over steps, the gain

    r = (σ² + μ²) ÷ (σ² ÷ S + μ²)

of S workers lies between 1 (their gradients agree: the others add nothing) and S (all noise). A step's learning rate
is r times the single worker's, the step counts as r steps of a single worker, and training ends when those are done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_STEPS = 1000  # the averages forget over N single-worker steps (the paper's θ = 1 − S ÷ 1000) …
MEMORY_SHARE = 0.1  # … but over no more than this share of a short training, whose first gradients are the largest …
LEAST_MEMORY_STEPS = 20.0  # … and never over fewer steps: the ratio of two noisy averages would be noise itself


def decay(workers: int, single_steps: int) -> float:
    """The weight θ that the averages keep in a step.

    >>> decay(workers=8, single_steps=39_100), decay(workers=32, single_steps=450)
    (0.992, 0.95)
    """
    memory = min(MEMORY_STEPS, MEMORY_SHARE * single_steps) / workers
    return 1.0 - 1.0 / max(memory, LEAST_MEMORY_STEPS)


def gain(noise: float, signal: float, workers: float, worker_batch: float) -> float:
    """The gain of `workers` over one; with the noise scale as `noise` and a signal of 1, that of a larger batch.

    Arguments:
        noise: trΣ, the variance of one sample's gradient; σ² is that over the worker batch.
        signal: |G|², the squared norm of the true gradient, which is μ².
        workers: S; a share of one where the batch is the smaller one.

    >>> gain(noise=64.0, signal=1.0, workers=4, worker_batch=64)
    1.6
    """
    variance, square = max(noise, 0.0) / worker_batch, max(signal, 0.0)
    if variance + square == 0.0:
        return 1.0
    least, most = sorted((1.0, float(workers)))
    return min(max((variance + square) / (variance / workers + square), least), most)


@dataclass
class GainAverage:
    """The averages of noise and signal, each on its own, without start-up bias; clamped only when read."""

    noise: float = 0.0
    signal: float = 0.0
    steps: int = 0

    def observe(self, signal: float, noise: float, decay: float) -> None:
        """Take one step's unbiased |G|² and trΣ; steps that are not finite are skipped."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        self.steps += 1
        weight = (1.0 - decay) / (1.0 - decay**self.steps)
        self.noise += weight * (noise - self.noise)
        self.signal += weight * (signal - self.signal)
