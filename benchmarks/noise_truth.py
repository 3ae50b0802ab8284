"""What the noise scale of a data set is at given weights, from the gradient of every single sample.

With tᵢ the gradient of sample i's summed loss and wᵢ its weight (1, or its number of characters), the gradient over all
data is G = Σt ÷ Σw, a sample moves it by (tᵢ − wᵢ·G) ÷ w̄, and trΣ = Σ‖tᵢ − wᵢ·G‖² ÷ w̄² ÷ (N − 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from scalewise import Task
from scalewise.engine.data.samples import Samples
from scalewise.tasks.task import Loss

CHUNK = 32


@dataclass(frozen=True)
class Truth:
    """|G|² and trΣ by parameter."""

    signal: Tensor  # (parameter,)
    noise: Tensor

    @property
    def noise_scale(self) -> float:
        return float(self.noise.sum() / self.signal.sum())


def per_sample(
    task: Task, module: nn.Module, samples: Samples, factors: list[Tensor] | None = None, chunk: int = CHUNK
) -> Truth:
    """The truth over all samples; `factors` precondition the gradients."""
    parameters = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    buffers = dict(module.named_buffers())
    scales = [torch.ones((), dtype=torch.float64)] * len(parameters) if factors is None else factors

    def total(weights: Mapping[str, Tensor], sample: object) -> tuple[Tensor, Tensor]:
        batch = tree_map(lambda leaf: leaf.unsqueeze(0), sample)

        def call(*arguments: Tensor) -> Tensor:
            return functional_call(module, (dict(weights), buffers), arguments)

        loss = task.evaluate(call, batch)  # type: ignore[arg-type]
        if isinstance(loss, Loss):
            return loss.total, torch.as_tensor(loss.weight, dtype=torch.float64)
        return loss.mean, torch.ones((), dtype=torch.float64)

    each = vmap(grad(total, has_aux=True), in_dims=(None, 0))
    sums = [torch.zeros_like(value, dtype=torch.float64) for value in parameters.values()]
    weighted = [torch.zeros_like(value) for value in sums]
    squares = torch.zeros(len(sums), dtype=torch.float64)
    weight = weight_squares = 0.0
    for start in range(0, len(samples), chunk):
        indices = torch.arange(start, min(start + chunk, len(samples)))
        with sdpa_kernel(SDPBackend.MATH):
            gradients, weights = each(parameters, samples.fetch(indices, torch.zeros_like(indices)))
        weight += float(weights.sum())
        weight_squares += float(weights.square().sum())
        for number, (found, scale) in enumerate(zip(gradients.values(), scales, strict=True)):
            scaled = found.double() * scale
            sums[number] += scaled.sum(0)
            weighted[number] += torch.tensordot(weights, scaled, 1)
            squares[number] += scaled.square().sum()
    mean = [part / weight for part in sums]
    signal = torch.stack([part.square().sum() for part in mean])
    crossed = torch.stack([(part * other).sum() for part, other in zip(mean, weighted, strict=True)])
    mean_weight = weight / len(samples)
    noise = (squares - 2 * crossed + signal * weight_squares) / mean_weight**2 / (len(samples) - 1)
    return Truth(signal, noise)
