"""The loss on the line between two runs' weights, and on a plane through them: numbers to plot.

    line    w(α) = a + α·(b − a)
    plane   w(x, y) = a + x·u + y·v,   u = b − a

v is a third run's difference from a, made perpendicular to u (Garipov et al. 2018), or a random direction whose filters
have the lengths of a's own (Li et al. 2018; biases and norm weights stay). Batch-norm statistics are recomputed from
training samples at every point: averages of the two runs' statistics belong to neither's activations and show a barrier
where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from scalewise.engine.data import streams
from scalewise.engine.placement import DeviceName
from scalewise.recipe import Recipe
from scalewise.records import finite
from scalewise.runs.measure.minima.surface import SAMPLES, Surface, Weights, opened
from scalewise.runs.request import Notify, silent
from scalewise.tasks.task import Task

LINE = tuple(np.linspace(-1, 2, 25).tolist())
ACROSS = tuple(np.linspace(-0.5, 1.5, 9).tolist())  # of a plane, where the runs are at 0 and 1 …
AROUND = tuple(np.linspace(-1, 1, 9).tolist())  # … and where a random direction leaves the line at 0


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

    Arguments:
        distance: ‖b − a‖ over the trainable weights.
        barrier: how far the training loss rises between the runs above the straight line between their losses
            (Frankle et al. 2020); about 0 when they lie in one basin. None where no point between them was taken.
        rows: the points.
    """

    samples: int
    distance: float
    barrier: float | None
    rows: tuple[LinePoint, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands under `landscape` of the document."""
        document: dict[str, Any] = finite(asdict(self))
        return document


@dataclass(frozen=True)
class Plane:
    """The plane through two runs.

    Arguments:
        direction: what v is: "third run" or "random".
        lengths: ‖u‖ and ‖v‖, for a plot in which distances are true.
        runs: the coordinates (x, y) of the runs in the plane.
        rows: the points.
    """

    samples: int
    direction: str
    lengths: tuple[float, float]
    runs: tuple[tuple[float, float], ...]
    rows: tuple[PlanePoint, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands under `landscape` of the document."""
        document: dict[str, Any] = finite(asdict(self))
        return document


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
        task, recipe: what the weights were trained on, and how.
        first, second: parameters and buffers by name; alpha is 0 at the first and 1 at the second.
        alphas: the points.
        samples: fixed training samples, and as many test samples, that the numbers are means over.
        device: where it is computed.
        notify: told what is being done.
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
        task, recipe: what the weights were trained on, and how.
        first, second: parameters and buffers by name, at (0, 0) and (1, 0).
        third: a third run, at y = 1; without it a random direction with the first run's filter lengths.
        xs, ys: the grid.
        samples: fixed training samples that the numbers are means over.
        device: where it is computed.
        notify: told what is being done.
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
