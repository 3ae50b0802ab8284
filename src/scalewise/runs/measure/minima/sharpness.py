"""Sharpness of a minimum (Keskar et al. 2017, metric 2.1): how far the loss rises in a small box around the weights.

    100 · (max f(x + A·y) − f(x)) ÷ (1 + f(x)),   |yᵢ| ≤ ε·(|(A⁺x)ᵢ| + 1)

In the full space A is the identity; in a random subspace it has p columns of random numbers, each of length 1. The
maximum is sought with L-BFGS-B, as in the paper from the weights themselves, and once more from the corner of the box
to which the gradient points, because ten iterations from the weights do not always get to the box's edge. What is found
is a lower bound of the maximum.

Batch norm uses the statistics of the weights x, recomputed from training samples, and keeps them while y moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, minimize

from scalewise.engine.data import streams
from scalewise.engine.placement import DeviceName
from scalewise.errors import NonFiniteLoss
from scalewise.recipe import Recipe
from scalewise.runs.measure.minima.surface import SAMPLES, Weights, opened
from scalewise.runs.request import Notify, silent
from scalewise.tasks.task import Task

EPSILONS = (1e-3, 5e-4)
SUBSPACE = 100  # dimensions; both as in the paper
ITERATIONS = 10

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]  # value and gradient


@dataclass(frozen=True)
class Sharpness:
    """How far the loss rises, in percent of 1 + f(x), within a box of size ε."""

    epsilon: float
    value: float
    largest_loss: float


@dataclass(frozen=True)
class SharpnessReport:
    """The sharpness at some weights, by size of the box.

    Arguments:
        loss: f(x), over `samples` training samples.
        parameters: dimensions of x.
        subspace: dimensions of the random subspace; None for the full space.
        iterations: of L-BFGS-B, from each of its two starts.
        rows: one per size of the box; none where 1 + f(x) is not above 0, for which sharpness is undefined.
    """

    loss: float
    samples: int
    parameters: int
    subspace: int | None
    iterations: int
    rows: tuple[Sharpness, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands under `sharpness` of the document."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}


def sharpness(
    task: Task,
    recipe: Recipe,
    weights: Weights,
    *,
    subspace: int | None = None,
    epsilons: Sequence[float] = EPSILONS,
    samples: int = SAMPLES,
    iterations: int = ITERATIONS,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> SharpnessReport:
    """The sharpness of the training loss at a run's weights.

    Arguments:
        task, recipe: what the weights were trained on, and how.
        weights: parameters and buffers by name, as in a run's model.safetensors.
        subspace: dimensions of a random subspace; None for the full space.
        epsilons: sizes of the box.
        samples: fixed training samples that the loss is the mean over.
        iterations: of L-BFGS-B, from each start.
        device: where it is computed.
        notify: told what is being done.
    """
    with opened(task, recipe, samples, device) as surface:
        x = surface.load(weights)
        with surface.right_statistics():
            start, _ = surface.loss_and_gradient(x)
            if not np.isfinite(start):
                raise NonFiniteLoss(
                    f"sharpness needs weights with a finite loss, got {start}; lower --lr and train anew"
                )
            basis = None if subspace is None else random_basis(len(x), subspace)
            rows = []
            for epsilon in epsilons if start > -1 else ():
                notify(f"sharpness in a box of {epsilon:g}, {_space(subspace)}")
                largest = _largest(surface.loss_and_gradient, x, basis, epsilon, iterations)
                rows.append(Sharpness(epsilon, relative_rise(start, largest), largest))
            dimensions = None if basis is None else basis.shape[1]
            return SharpnessReport(start, surface.samples, len(x), dimensions, iterations, tuple(rows))


def relative_rise(start: float, largest: float) -> float:
    """100 · (largest − start) ÷ (1 + start), for a start above −1.

    >>> relative_rise(start=1.0, largest=1.5)
    25.0
    """
    return 100 * (largest - start) / (1 + start)


def random_basis(parameters: int, dimensions: int) -> np.ndarray:
    """Columns of normal random numbers, each of length 1: (parameter, dimension). The same in every call.

    They are kept whole, 4 bytes each: 100 dimensions of a million parameters take 400 MB.
    """
    generator = np.random.Generator(np.random.PCG64(streams.key("subspace")))
    columns = generator.standard_normal((parameters, min(dimensions, parameters)), dtype=np.float32)
    columns /= np.linalg.norm(columns, axis=0)
    return columns


def half_widths(x: np.ndarray, basis: np.ndarray | None, epsilon: float) -> np.ndarray:
    """ε·(|A⁺x| + 1), how far each coordinate may move."""
    coordinates = x if basis is None else np.linalg.lstsq(basis, x.astype(basis.dtype), rcond=None)[0]
    widths: np.ndarray = epsilon * (np.abs(coordinates) + 1)
    return widths


def _largest(function: Function, x: np.ndarray, basis: np.ndarray | None, epsilon: float, iterations: int) -> float:
    """max f(x + A·y) over the box."""

    def moved(y: np.ndarray) -> tuple[float, np.ndarray]:
        if basis is None:
            return function(x + y)
        value, gradient = function(x + basis @ y.astype(basis.dtype))
        return value, (basis.T @ gradient.astype(basis.dtype)).astype(float)

    return largest_in_box(moved, half_widths(x, basis, epsilon), iterations)


def largest_in_box(function: Function, widths: np.ndarray, iterations: int) -> float:
    """The largest value found of a function of y, |yᵢ| ≤ widthsᵢ, by L-BFGS-B from 0 and from the gradient's corner.

    Coordinates are scaled to [−1, 1] and values so that the average slope at the start is 1: then the first step is as
    long as the box, whatever its size and that of the gradient.
    """
    best, gradient = function(np.zeros_like(widths))
    slope = widths * gradient
    scale = float(np.abs(slope).mean()) or 1.0
    uphill = np.where(
        slope == 0,
        np.random.Generator(np.random.PCG64(streams.key("corner"))).choice((-1.0, 1.0), len(slope)),
        np.sign(slope),
    )

    def descending(u: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        value, gradient = function(widths * u)
        if np.isfinite(value):
            best = max(best, value)
        return -value / scale, -widths * gradient / scale

    for start in (np.zeros_like(widths), uphill):
        box = Bounds(-np.ones_like(widths), np.ones_like(widths))
        minimize(descending, start, jac=True, method="L-BFGS-B", bounds=box, options={"maxiter": iterations})
    return best


def _space(subspace: int | None) -> str:
    return "full space" if subspace is None else f"random subspace of {subspace} dimensions"
