"""Sharpness against maxima known in closed form, and landscapes against losses known at their points."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise.errors import TaskError
from scalewise.runs.measure import minima
from scalewise.runs.measure.minima import half_widths, largest_in_box, random_basis, sharpness
from scalewise.tasks.digits import digits, load

CURVATURES = (0.5, 3.0, 40.0, 0.01)
CENTRE = (1.0, -2.0, 0.25, 4.0)


def quadratic_task() -> sw.Task:
    """mean over 4 samples of (x·w − y)² = Σ cᵢ·(wᵢ − centreᵢ)²: sample i is 2·√cᵢ along axis i."""
    rows = torch.diag(2 * torch.tensor(CURVATURES, dtype=torch.float64).sqrt())
    targets = rows @ torch.tensor(CENTRE, dtype=torch.float64)
    return sw.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 1, bias=False), nn.Flatten(0)).double(),
        train=(rows, targets),
        test=(rows, targets),
        loss=F.mse_loss,
        recipe=sw.Recipe(worker_batch=4, threads=1),
    )


def weights(*values: float) -> dict[str, torch.Tensor]:
    return {"0.weight": torch.tensor([values], dtype=torch.float64)}


def loss(values: np.ndarray) -> float:
    return float(np.sum(np.array(CURVATURES) * (values - np.array(CENTRE)) ** 2))


@pytest.mark.parametrize("point", [(1.5, -2.0, 0.3, 3.0), CENTRE], ids=["on a slope", "at the minimum"])
@pytest.mark.parametrize("epsilon", [1e-3, 5e-4, 0.1])
def test_sharpness_of_a_quadratic_is_its_largest_value_in_the_box(point, epsilon):
    task, x = quadratic_task(), np.array(point)
    report = sharpness(task, task.recipe, weights(*point), epsilons=[epsilon])
    offset = np.abs(x - np.array(CENTRE)) + epsilon * (np.abs(x) + 1)
    largest = float(np.sum(np.array(CURVATURES) * offset**2))
    assert report.loss == pytest.approx(loss(x), abs=1e-12)
    assert report.rows[0].largest_loss == pytest.approx(largest, rel=1e-9)
    assert report.rows[0].value == pytest.approx(100 * (largest - loss(x)) / (1 + loss(x)), rel=1e-9)


@pytest.mark.parametrize(("shift", "defined"), [(-0.5, True), (-1.0, False), (-30.0, False)])
def test_sharpness_is_undefined_where_one_plus_the_loss_is_not_above_zero(shift, defined):
    base = quadratic_task()
    task = dataclasses.replace(base, loss=lambda output, target: F.mse_loss(output, target) + shift)
    report = sharpness(task, task.recipe, weights(*CENTRE), epsilons=[0.1])
    assert report.loss == shift
    assert [row.value > 0 for row in report.rows] == [True] * defined


def test_sharpness_in_a_subspace_of_one_dimension_is_at_an_end_of_the_segment():
    task, x, epsilon = quadratic_task(), np.array((1.5, -2.0, 0.3, 3.0)), 0.05
    report = sharpness(task, task.recipe, weights(*x), subspace=1, epsilons=[epsilon])
    axis = random_basis(4, 1)[:, 0].astype(float)
    width = epsilon * (abs(axis @ x) + 1)
    assert report.subspace == 1
    assert report.rows[0].largest_loss == pytest.approx(max(loss(x + s * width * axis) for s in (-1, 1)), rel=1e-6)


def test_the_box_of_a_subspace_follows_the_pseudo_inverse():
    x = np.linspace(-3, 5, 40)
    basis = random_basis(40, 7)
    assert np.linalg.norm(basis, axis=0) == pytest.approx(np.ones(7), rel=1e-6)
    expected = 1e-3 * (np.abs(np.linalg.pinv(basis.astype(float)) @ x) + 1)
    assert half_widths(x, basis, 1e-3) == pytest.approx(expected, rel=1e-5)
    assert random_basis(3, 7).shape == (3, 3)


@pytest.mark.parametrize(("size", "least"), [(1e-3, 1 - 1e-9), (1e-2, 0.8)])
def test_a_coupled_quadratic_is_maximised_among_the_corners(size, least):
    """Exactly in a box as small as the paper's; in a larger one, where every corner may be a peak, from below."""
    shares = []
    for seed in range(20):
        generator = np.random.default_rng(seed)
        factor, slope = generator.normal(size=(6, 6)), generator.normal(size=6)
        matrix, widths = factor @ factor.T, generator.uniform(0.5, 2, 6) * size

        def function(y: np.ndarray, slope=slope, matrix=matrix) -> tuple[float, np.ndarray]:
            return float(slope @ y + y @ matrix @ y / 2), slope + matrix @ y

        corners = [function(widths * np.array(signs))[0] for signs in itertools.product((-1, 1), repeat=6)]
        shares.append(largest_in_box(function, widths, 10) / max(corners))
    assert min(shares) >= least
    assert max(shares) <= 1 + 1e-9


def test_batch_norm_statistics_are_those_of_the_weights_whatever_was_stored():
    task = digits(bn=True)
    recipe = task.recipe.replace(threads=1)
    torch.manual_seed(0)
    model = task.model()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spoiled = {name: tensor + 3 if "running" in name else tensor for name, tensor in stored.items()}
    first, second = (sharpness(task, recipe, found, epsilons=[1e-3], iterations=2) for found in (stored, spoiled))
    assert first == second
    kept = sharpness(task, recipe.replace(statistics="running"), spoiled, epsilons=[1e-3], iterations=2)
    assert kept.loss != first.loss
    assert first.rows[0].value > 0


def test_weights_of_another_model_are_refused():
    task = quadratic_task()
    with pytest.raises(TaskError, match=r"0\.weight has shape \[1, 4\], got shape \[1, 3\]"):
        sharpness(task, task.recipe, {"0.weight": torch.zeros(1, 3)})


def test_a_line_between_weights_has_the_losses_of_its_points():
    task = quadratic_task()
    a, b = np.array((0.0, 0.0, 0.0, 0.0)), np.array((2.0, -1.0, 0.5, 1.0))
    found = minima.line(task, task.recipe, weights(*a), weights(*b))
    assert [found.rows[0].alpha, found.rows[-1].alpha] == [-1, 2]
    for row in found.rows:
        assert row.train["loss"] == pytest.approx(loss(a + row.alpha * (b - a)), rel=1e-9)
    assert found.rows[0].test == found.rows[0].train
    assert found.distance == pytest.approx(np.linalg.norm(b - a))
    assert found.barrier == pytest.approx(0, abs=1e-12)  # a convex loss has none


def permuted(model: nn.Sequential) -> dict[str, torch.Tensor]:
    """The same function with its hidden units in another order."""
    order = torch.arange(31, -1, -1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["1.weight"], state["1.bias"] = state["1.weight"][order], state["1.bias"][order]
    state["3.weight"] = state["3.weight"][:, order]
    return state


def test_two_networks_that_compute_the_same_have_a_barrier_between_them():
    (x, y), test = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    task = sw.Task(model=lambda: model, train=(x, y), test=test, loss=F.cross_entropy)
    ends = {name: tensor.clone() for name, tensor in model.state_dict().items()}, permuted(model)
    found = minima.line(task, sw.Recipe(threads=1), *ends, alphas=[0.0, 0.25, 0.5, 0.75, 1.0], samples=256)
    losses = [row.train["loss"] for row in found.rows]
    assert losses[0] == pytest.approx(losses[-1], rel=1e-4)
    assert found.barrier > 0.5
    assert found.barrier == pytest.approx(max(losses) - losses[0], abs=1e-3)


def test_a_plane_through_three_runs_holds_each_of_them():
    task = quadratic_task()
    points = [np.array(p) for p in ((0.0, 1.0, 0.0, 2.0), (2.0, -1.0, 0.5, 1.0), (1.0, 1.0, 3.0, -1.0))]
    stored = [weights(*point) for point in points]
    along = float((points[2] - points[0]) @ (points[1] - points[0]) / ((points[1] - points[0]) ** 2).sum())
    found = minima.plane(task, task.recipe, *stored, xs=[0.0, 1.0, along], ys=[0.0, 1.0])
    assert found.runs == ((0.0, 0.0), (1.0, 0.0), (pytest.approx(along), 1.0))
    at = {(row.x, row.y): row.train["loss"] for row in found.rows}
    for place, point in zip(((0.0, 0.0), (1.0, 0.0), (along, 1.0)), points, strict=True):
        assert at[place] == pytest.approx(loss(point), rel=1e-9)


def test_a_random_direction_has_the_lengths_of_the_filters_and_leaves_vectors_alone():
    shapes = [torch.Size((5, 2, 3, 3)), torch.Size((5,)), torch.Size((4, 5))]
    own = np.random.default_rng(1).normal(size=sum(shape.numel() for shape in shapes))
    direction = minima.filter_normalized(own, shapes)
    kernels = slice(0, 90)
    assert np.linalg.norm(direction[kernels].reshape(5, -1), axis=1) == pytest.approx(
        np.linalg.norm(own[kernels].reshape(5, -1), axis=1)
    )
    assert not direction[90:95].any()
    assert np.linalg.norm(direction[95:].reshape(4, 5), axis=1) == pytest.approx(
        np.linalg.norm(own[95:].reshape(4, 5), axis=1)
    )
    assert abs(direction @ own) < 0.5 * np.linalg.norm(direction) * np.linalg.norm(own)


def test_a_plane_with_a_random_direction_meets_the_line():
    task = quadratic_task()
    a, b = weights(0.0, 1.0, 0.0, 2.0), weights(2.0, -1.0, 0.5, 1.0)
    found = minima.plane(task, task.recipe, a, b)
    beside = minima.line(task, task.recipe, a, b, alphas=minima.ACROSS)
    assert found.direction == "random"
    on_the_line = [row.train["loss"] for row in found.rows if row.y == 0]
    assert on_the_line == pytest.approx([row.train["loss"] for row in beside.rows])
    assert len(found.rows) == len(minima.ACROSS) * len(minima.AROUND)
