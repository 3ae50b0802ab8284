"""What minima look like: the sharpness of one, and the loss between the weights of two runs: numbers to plot.

Sharpness (Keskar et al. 2017, metric 2.1) is how far the loss rises in a small box around the weights:

    100 · (max f(x + A·y) − f(x)) ÷ (1 + f(x)),   |yᵢ| ≤ ε·(|(A⁺x)ᵢ| + 1)

In the full space A is the identity; in a random subspace it has p columns of random numbers, each of length 1. The
maximum is sought with L-BFGS-B, as in the paper from the weights themselves, and again from the corner of the box to
which the gradient points, because ten iterations from the weights do not always get to the box's edge. What is found
is a lower bound of the maximum. Batch norm uses the statistics of the weights x, recomputed from training samples, and
keeps them while y moves.

Between runs with weights a and b:

    line    w(α) = a + α·(b − a)
    plane   w(x, y) = a + x·u + y·v,   u = b − a

v is a third run's difference from a, made perpendicular to u (Garipov et al. 2018), or a random direction whose filters
have the lengths of a's own (Li et al. 2018; biases and norm weights stay). Batch-norm statistics are recomputed from
training samples at every point: averages of the two runs' statistics belong to neither's activations and show a barrier
where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import Bounds, minimize

from scalewise.engine.data import streams
from scalewise.engine.placement import DeviceName
from scalewise.errors import NonFiniteLoss
from scalewise.recipe import Recipe
from scalewise.runs.measure.surface import SAMPLES, Surface, Weights, opened
from scalewise.runs.request import Notify, silent
from scalewise.tasks.task import Task

EPSILONS = (1e-3, 5e-4)
SUBSPACE = 100  # dimensions; both as in the paper
ITERATIONS = 10
LINE = tuple(np.linspace(-1, 2, 25).tolist())
ACROSS = tuple(np.linspace(-0.5, 1.5, 9).tolist())  # of a plane, where the runs are at 0 and 1 …
AROUND = tuple(np.linspace(-1, 1, 9).tolist())  # … and where a random direction leaves the line at 0

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]  # value and gradient


@dataclass(frozen=True)
class Sharpness:
    """How far the loss rises, in percent of 1 + f(x), within a box of size ε."""

    epsilon: float
    value: float
    largest_loss: float


@dataclass(frozen=True)
class SharpnessReport:
    """The sharpness at some weights, by size of the box."""

    loss: float  # f(x), over `samples` training samples
    samples: int
    parameters: int  # dimensions of x
    subspace: int | None  # dimensions of the random subspace; None for the full space
    iterations: int  # of L-BFGS-B, from each of its two starts
    rows: tuple[Sharpness, ...]  # none where 1 + f(x) is not above 0, for which sharpness is undefined


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
    """The sharpness of the loss, over fixed training samples, at a run's weights; `epsilons` are the boxes' sizes."""
    with opened(task, recipe, samples, device) as surface:
        x = surface.load(weights)
        with surface.right_statistics():
            start, _ = surface.loss_and_gradient(x)
            if not np.isfinite(start):
                raise NonFiniteLoss(
                    f"sharpness needs weights with a finite loss, got {start}; lower --lr and train again"
                )
            basis = None if subspace is None else random_basis(len(x), subspace)
            space = "full space" if subspace is None else f"random subspace of {subspace} dimensions"
            rows = []
            for epsilon in epsilons if start > -1 else ():
                notify(f"sharpness in a box of {epsilon:g}, {space}")
                largest = _largest(surface.loss_and_gradient, x, basis, epsilon, iterations)
                rows.append(Sharpness(epsilon, 100 * (largest - start) / (1 + start), largest))
            dimensions = None if basis is None else basis.shape[1]
            return SharpnessReport(start, surface.samples, len(x), dimensions, iterations, tuple(rows))


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


@dataclass(frozen=True)
class LinePoint:
    """Loss and metrics at a + alpha·(b − a), on training and on test samples."""

    alpha: float
    train: dict[str, float]
    test: dict[str, float]


@dataclass(frozen=True)
class PlanePoint:
    """Training loss and metrics at a + x·u + y·v."""

    x: float
    y: float
    train: dict[str, float]


@dataclass(frozen=True)
class Line:
    """The line between two runs.

    barrier: how far the training loss rises between the runs above the straight line between their losses
        (Frankle et al. 2020); about 0 when they lie in one basin. None where no point between them was taken.
    """

    samples: int
    distance: float  # ‖b − a‖ over the trainable weights
    barrier: float | None
    rows: tuple[LinePoint, ...]


@dataclass(frozen=True)
class Plane:
    """The plane through two runs."""

    samples: int
    direction: str  # what v is: "third run" or "random"
    lengths: tuple[float, float]  # ‖u‖ and ‖v‖, for a plot in which distances are true
    runs: tuple[tuple[float, float], ...]  # the coordinates (x, y) of the runs in the plane
    rows: tuple[PlanePoint, ...]


def line(
    task: Task,
    recipe: Recipe,
    first: Weights,
    second: Weights,
    *,
    alphas: Sequence[float] = LINE,
    samples: int = SAMPLES,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> Line:
    """Loss and metrics along the line through two runs' weights.

    Arguments:
        first, second: parameters and buffers by name; alpha is 0 at the first and 1 at the second.
        samples: fixed training samples, and as many test samples, that the numbers are means over.
    """
    notify(f"loss at {len(alphas)} points of the line between the runs")
    with opened(task, recipe, samples, device) as surface:
        surface.add_part("test", task.test)
        a, b = surface.load(first), surface.load(second)
        rows = tuple(
            LinePoint(alpha, *_numbers(surface, a + alpha * (b - a), ("train", "test"))) for alpha in map(float, alphas)
        )
        return Line(surface.samples, float(np.linalg.norm(b - a)), barrier(rows), rows)


def plane(
    task: Task,
    recipe: Recipe,
    first: Weights,
    second: Weights,
    third: Weights | None = None,
    *,
    xs: Sequence[float] = ACROSS,
    ys: Sequence[float] | None = None,
    samples: int = SAMPLES,
    device: DeviceName = "auto",
    notify: Notify = silent,
) -> Plane:
    """Training loss and metrics on the plane through two runs' weights and a third direction.

    Arguments:
        first, second: parameters and buffers by name, at (0, 0) and (1, 0).
        third: a third run, at y = 1; without it a random direction with the first run's filter lengths.
    """
    with opened(task, recipe, samples, device) as surface:
        a, b = surface.load(first), surface.load(second)
        u = b - a
        runs = [(0.0, 0.0), (1.0, 0.0)]
        if third is None:
            v = filter_normalized(a, surface.shapes)
        else:
            v, along = perpendicular(surface.load(third) - a, u)
            runs.append((along, 1.0))
        grid = [(float(x), float(y)) for y in (ys or (AROUND if third is None else ACROSS)) for x in xs]
        notify(f"loss at {len(grid)} points of a plane through the runs")
        rows = tuple(PlanePoint(x, y, *_numbers(surface, a + x * u + y * v, ("train",))) for x, y in grid)
        lengths = float(np.linalg.norm(u)), float(np.linalg.norm(v))
        return Plane(surface.samples, "random" if third is None else "third run", lengths, tuple(runs), rows)


def _numbers(surface: Surface, weights: np.ndarray, parts: Sequence[str]) -> list[dict[str, float]]:
    surface.move(weights)
    with surface.right_statistics():
        return [surface.numbers(part) for part in parts]


def barrier(rows: Sequence[LinePoint]) -> float | None:
    """max over 0 ≤ α ≤ 1 of loss(α) − ((1 − α)·loss(0) + α·loss(1)); infinite where the loss is not finite."""
    losses = {row.alpha: row.train["loss"] for row in rows if 0 <= row.alpha <= 1}
    if 0.0 not in losses or 1.0 not in losses or len(losses) < 3:
        return None
    rises = [loss - (1 - alpha) * losses[0.0] - alpha * losses[1.0] for alpha, loss in losses.items()]
    return max(rises) if all(map(math.isfinite, rises)) else math.inf


def perpendicular(direction: np.ndarray, to: np.ndarray) -> tuple[np.ndarray, float]:
    """What is left of a direction without its part along another, and that part in units of the other.

    >>> perpendicular(np.array([2.0, 3.0]), to=np.array([4.0, 0.0]))
    (array([0., 3.]), 0.5)
    """
    along = float(direction @ to / (to @ to)) if to.any() else 0.0
    return direction - along * to, along


def filter_normalized(weights: np.ndarray, shapes: Sequence[torch.Size]) -> np.ndarray:
    """A random direction in which every filter has the length that it has in the weights.

    A filter is what makes one output: weights[i] of a matrix or kernel. Biases and norm weights, which have one
    dimension, do not move. The same in every call.
    """
    generator = np.random.Generator(np.random.PCG64(streams.key("direction")))
    parts = []
    place = 0
    for shape in shapes:
        own = weights[place : place + shape.numel()]
        place += shape.numel()
        if len(shape) < 2:
            parts.append(np.zeros_like(own))
            continue
        filters = generator.standard_normal((shape[0], own.size // shape[0]))
        lengths = np.linalg.norm(own.reshape(filters.shape), axis=1, keepdims=True)
        parts.append((filters / np.linalg.norm(filters, axis=1, keepdims=True) * lengths).reshape(-1))
    return np.concatenate(parts)
