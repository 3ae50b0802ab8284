"""Every optimizer in one table: it converges, repeats, keeps its state, and leaves gradients alone."""

from __future__ import annotations

import copy
import json
import math
import os
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import scalewise as sw
from conftest import together
from scalewise.engine.update.optimizer import ELEMENT_WISE
from scalewise.errors import RecipeError
from scalewise.optim import OPTIMIZERS, layerwise, native
from scalewise.optim.muon import Muon, orthogonal
from scalewise.optim.rules import local_rate, local_rates, matrices, norm, trust_ratio, trust_ratios
from scalewise.recipe import Recipe

JOB = Path(__file__).parent / "jobs" / "fully_shard.py"
DOUBLE = torch.float64


def recipe(name: str) -> Recipe:
    lr = 0.2 if name == "lars" else 0.05
    return Recipe(optimizer=name, lr=lr, weight_decay=0.01, trust_coefficient=0.1)


def trained(name: str, pieces: list[slice], threads: int = 1, steps: int = 12) -> torch.Tensor:
    """A long vector, optimized in pieces that share its memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(100_003, generator=generator)
    leaves = [whole[piece].detach().requires_grad_() for piece in pieces]
    optimizer = OPTIMIZERS[name](leaves, recipe(name))
    for _ in range(steps):
        gradient = torch.randn(whole.shape, generator=generator)
        for leaf, piece in zip(leaves, pieces, strict=True):
            leaf.grad = gradient[piece]
        optimizer.step()
    torch.set_num_threads(before)
    return whole


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", sorted(ELEMENT_WISE))
def test_the_update_does_not_depend_on_where_the_tensor_is_cut(name, threads):
    whole = trained(name, [slice(None)], threads)
    for cuts in ([2048], [2048 * 7, 2048 * 20], [33, 1001, 77_777]):
        ends = [0, *cuts, 100_003]
        pieces = [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
        assert torch.equal(trained(name, pieces, threads), whole)


@pytest.mark.parametrize("start", [[3.0, -2.0], [[3.0, -2.0], [1.0, 2.0]]], ids=["vector", "matrix"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converges_and_leaves_gradients_untouched(name, start):
    weight = torch.tensor(start, requires_grad=True)
    optimizer = OPTIMIZERS[name]([weight], recipe(name))
    for _ in range(400):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        gradient = weight.grad
        before = gradient.clone()
        optimizer.step()
        assert weight.grad is gradient
        assert torch.equal(gradient, before)
    assert weight.abs().max() < 0.05


class Problem:
    """A small network with matrices, a convolution kernel, biases, norm weights and a parameter that is not used."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        self.model.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
        self.optimizer = OPTIMIZERS[name](self.model.parameters(), recipe(name))
        self.x, self.y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        return loss

    def run(self, steps: int) -> Problem:
        for _ in range(steps):
            self.loss()
            self.optimizer.step()
        return self

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_repeats_and_round_trips_its_state(name):
    whole = Problem(name).run(8)
    first = Problem(name).run(5)
    second = Problem(name)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert torch.equal(second.run(3).weights(), whole.weights())
    assert torch.equal(first.run(3).weights(), whole.weights())
    assert torch.equal(whole.model.unused, torch.ones(2, 2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_optimizer_works(name):
    problem = Problem(name).run(2)
    twin = copy.deepcopy(problem)
    assert torch.equal(twin.run(2).weights(), problem.run(2).weights())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_takes_a_closure(name):
    problem = Problem(name)
    losses = [problem.optimizer.step(problem.loss).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    assert torch.equal(problem.weights(), Problem(name).run(4).weights())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_a_scheduler_from_zero(name):
    problem = Problem(name)
    schedule = LambdaLR(problem.optimizer, lambda step: step / 2)
    before = problem.weights()
    problem.run(1)
    assert torch.equal(problem.weights(), before)
    schedule.step()
    problem.run(1)
    moved = problem.weights() - before
    assert moved.abs().max() > 0
    assert moved.isfinite().all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_takes_parameter_groups(name):
    problem = Problem(name)
    early, late = problem.model[0], problem.model[4]
    groups = [{"params": early.parameters(), "lr": 0.0}, {"params": late.parameters()}]
    problem.optimizer = OPTIMIZERS[name](groups, recipe(name).replace(weight_decay=0.0))
    before = [copy.deepcopy(layer.state_dict()) for layer in (early, late)]
    problem.run(2)
    assert torch.equal(early.weight, before[0]["weight"])
    assert not torch.equal(late.weight, before[1]["weight"])


def test_hand_derived_two_steps():
    def two_steps(name: str) -> float:
        weight = torch.tensor([1.0], dtype=DOUBLE, requires_grad=True)
        optimizer = OPTIMIZERS[name]([weight], Recipe(optimizer=name, lr=0.1, momentum=0.5))
        for gradient in (1.0, 2.0):
            weight.grad = torch.tensor([gradient], dtype=DOUBLE)
            optimizer.step()
        return weight.item()

    assert two_steps("sgd") == pytest.approx(1 - 0.1 - 0.2)
    assert two_steps("momentum") == pytest.approx(1 - 0.1 - 0.1 * 2.5)
    assert two_steps("nesterov") == pytest.approx(1 - 0.1 * 1.5 - 0.1 * (2 + 0.5 * 2.5))
    first, second = (0.1 * 0.9 + 0.2) / (1 - 0.81), (0.001 * 0.999 + 0.004) / (1 - 0.999**2)
    assert two_steps("adam") == pytest.approx(1 - 0.1 - 0.1 * first / second**0.5, rel=1e-6)


PATHS = ["in C", "in batches", "together"]


def take(path: str, patch: pytest.MonkeyPatch) -> None:
    """Choose a way through the parameters; the last one is for accelerators and DTensors, here on the CPU."""
    if path == "in C" and native.compiled(DOUBLE) is None:
        pytest.skip("there is no C compiler here")
    if path == "in batches":
        patch.setattr(layerwise, "compiled", lambda dtype: None)
    if path == "together":
        patch.setattr(layerwise, "_is_plain", lambda weight, others: False)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> str:
    take(request.param, monkeypatch)
    return request.param


def stepped(optimizer, weight: torch.Tensor, gradients: list[list[float]]) -> list[float]:
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=weight.dtype)
        optimizer.step()
    return weight.detach().flatten().tolist()


def test_lars_by_hand(path):
    """w = (3, 4), ‖w‖ = 5; g = (0, 2), then (1, 0)."""
    weight = torch.tensor([[3.0, 4.0]], dtype=DOUBLE, requires_grad=True)
    optimizer = sw.optim.LARS([weight], lr=10, momentum=0.5, weight_decay=0.1, trust_coefficient=0.01)
    rate = 0.01 * 5 / (2 + 0.1 * 5)
    assert rate == pytest.approx(0.02)
    buffer = (0.02 * 0.3, 0.02 * 2.4)
    assert stepped(optimizer, weight, [[0.0, 2.0]]) == pytest.approx([2.94, 3.52])
    size = math.sqrt(2.94**2 + 3.52**2)
    rate = 0.01 * size / (1 + 0.1 * size)
    buffer = (0.5 * buffer[0] + rate * (1 + 0.294), 0.5 * buffer[1] + rate * 0.352)
    expected = [2.94 - 10 * buffer[0], 3.52 - 10 * buffer[1]]
    assert stepped(optimizer, weight, [[1.0, 0.0]]) == pytest.approx(expected)


def test_lamb_by_hand(path):
    """w = (3, 4), ‖w‖ = 5; g = (1, −2), then (1, 2)."""
    weight = torch.tensor([[3.0, 4.0]], dtype=DOUBLE, requires_grad=True)
    optimizer = sw.optim.LAMB([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.1)
    ratio = 5 / math.sqrt(1.3**2 + 0.6**2)  # r = (1, −1), u = (1.3, −0.6)
    first = [3 - 0.1 * ratio * 1.3, 4 + 0.1 * ratio * 0.6]
    assert stepped(optimizer, weight, [[1.0, -2.0]]) == pytest.approx(first)
    direction = [1.0, (0.9 * 0.1 * -2 + 0.1 * 2) / (1 - 0.81) / 2]  # the second moments are 1 and 4 in both steps
    update = [r + 0.1 * w for r, w in zip(direction, first, strict=True)]
    ratio = math.hypot(*first) / math.hypot(*update)
    expected = [w - 0.1 * ratio * u for w, u in zip(first, update, strict=True)]
    assert stepped(optimizer, weight, [[1.0, 2.0]]) == pytest.approx(expected)


def side_by_side(mine, other, steps: int = 12, feed=None, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that two optimizers reach on the same gradients, with a rate that rises from 0 and falls again."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 5), (5,), (4, 3, 3, 3), ()]
    start = [scale * torch.randn(shape, dtype=DOUBLE, generator=generator) for shape in shapes]
    left, right = ([value.clone().requires_grad_() for value in start] for _ in range(2))
    ours, theirs = mine(left), other(right)
    for step in range(steps):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.1 * math.sin(math.pi * step / steps)
        for a, b in zip(left, right, strict=True):
            a.grad = torch.randn(a.shape, dtype=DOUBLE, generator=generator)
            b.grad = a.grad.clone() if feed is None else feed(b.detach(), a.grad)
        ours.step()
        theirs.step()
    return tuple(torch.cat([value.detach().flatten() for value in values]) for values in (left, right))


def test_lars_with_ratio_one_is_momentum(path):
    mine, theirs = side_by_side(
        lambda values: sw.optim.LARS(values, weight_decay=0.05, adapt=False, adapt_vectors=True),
        lambda values: torch.optim.SGD(values, momentum=0.9, weight_decay=0.05),
    )
    assert torch.allclose(mine, theirs, rtol=1e-12)


def test_lars_is_momentum_on_gradients_times_the_rate(path):
    def feed(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if weight.ndim < 2:
            return gradient
        rate = 0.02 * weight.norm() / (gradient.norm() + 0.05 * weight.norm())
        return rate * (gradient + 0.05 * weight)

    mine, theirs = side_by_side(
        lambda values: sw.optim.LARS(values, weight_decay=0.05, trust_coefficient=0.02),
        lambda values: torch.optim.SGD(values, momentum=0.9),
        feed=feed,
    )
    assert torch.allclose(mine, theirs, rtol=1e-10)


@pytest.mark.parametrize("option", [{"adapt": False}, {"largest_ratio": 1.0}])
def test_lamb_with_ratio_one_is_adamw(path, option):
    """A layer of large weights has a ratio above 1: clipped at 1, it takes LAMB's own path with AdamW's steps."""
    mine, theirs = side_by_side(
        lambda values: sw.optim.LAMB(values, eps=1e-8, weight_decay=0.05, adapt_vectors=True, **option),
        lambda values: torch.optim.AdamW(values, eps=1e-8, weight_decay=0.05),
        scale=100.0,
    )
    assert torch.allclose(mine, theirs, rtol=1e-10)


def test_vectors_adapt_only_when_asked(path):
    for optimizer in (sw.optim.LARS, sw.optim.LAMB):
        plain, adapted = side_by_side(
            lambda values, make=optimizer: make(values, weight_decay=0.1),
            lambda values, make=optimizer: make(values, weight_decay=0.1, adapt_vectors=True),
        )
        matrix, kernel = slice(0, 85), slice(90, 198)
        same = plain == adapted
        assert same[matrix].all()
        assert same[kernel].all()
        assert not same[85:90].any()
        assert not same[198:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_all_paths_agree(name, dtype, monkeypatch):
    first, *others = (taken(path, name, dtype, monkeypatch) for path in PATHS)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    for other in others:
        assert torch.allclose(first, other, rtol=tolerance, atol=tolerance)


def taken(path: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The weights after some steps on one of the paths."""
    with monkeypatch.context() as patch:
        take(path, patch)
        torch.manual_seed(0)
        weights = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((40, 30), (7,), (600, 700))]
        optimizer = OPTIMIZERS[name](weights, recipe(name))
        for _ in range(4):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).to(dtype)
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_in_c_threads_change_nothing(name, monkeypatch):
    alone = taken("in C", name, torch.float32, monkeypatch)
    monkeypatch.setattr(native, "ELEMENTS_PER_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(taken("in C", name, torch.float32, monkeypatch), alone)


def test_in_c_autograd_notices_the_update(monkeypatch):
    take("in C", monkeypatch)
    weight = torch.ones(3, 3, requires_grad=True)
    loss = weight.square().sum()
    weight.grad = torch.ones_like(weight)
    sw.optim.LARS([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def clear_state(optimizer, weights):
    optimizer.state.clear()


def forget_states(optimizer, weights):
    optimizer.state = defaultdict(dict)


def restart_a_state(optimizer, weights):
    optimizer.state[weights[0]] = {name: value.clone().zero_() for name, value in optimizer.state[weights[0]].items()}


def exchange_a_buffer(optimizer, weights):
    state = optimizer.state[weights[2]]
    name = next(name for name, value in state.items() if value.ndim)
    state[name] = 2 * state[name]


def drop_a_gradient(optimizer, weights):
    weights[2].grad = None


def change_the_decay(optimizer, weights):
    optimizer.param_groups[0]["weight_decay"] = 0.3


def adapt_no_more(optimizer, weights):
    optimizer.param_groups[0]["adapt"] = False


def move_a_weight(optimizer, weights):
    weights[2].data = weights[2].data.clone()


def turn_a_layout(optimizer, weights):
    weights[2].grad = weights[2].grad.t().contiguous().t()


def leave_a_weight_out(optimizer, weights):
    del optimizer.param_groups[0]["params"][0]


EVENTS = [
    clear_state, forget_states, restart_a_state, exchange_a_buffer, drop_a_gradient, change_the_decay, adapt_no_more,
    move_a_weight, turn_a_layout, leave_a_weight_out,
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_what_is_kept_from_step_to_step_is_never_stale(name, event):
    def after(forgets: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(shape).requires_grad_() for shape in ((40, 30), (7,), (60, 60))]
        optimizer = OPTIMIZERS[name](weights, recipe(name))
        for step in range(6):
            for weight in weights:
                weight.grad = torch.randn(weight.shape)
            if step in (2, 4):
                event(optimizer, weights)
            if forgets:
                optimizer._plans.clear()
            optimizer.step()
        return [weight.detach() for weight in weights]

    for kept, fresh in zip(after(forgets=False), after(forgets=True), strict=True):
        assert torch.equal(kept, fresh)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_gradients_are_freed_when_the_caller_lets_go_of_them(name, path, monkeypatch):
    take(path, monkeypatch)
    weights = [torch.ones(40, 30, requires_grad=True), torch.ones(7, requires_grad=True)]
    optimizer = OPTIMIZERS[name](weights, recipe(name))
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        held = [weakref.ref(weight.grad) for weight in weights]
        optimizer.step()
        optimizer.zero_grad()
        assert all(gradient() is None for gradient in held)


@pytest.mark.parametrize("words", ["false", "nothing-of-this-name"])
def test_a_compiler_that_fails_is_done_without(words, monkeypatch):
    monkeypatch.setenv("CC", words)
    monkeypatch.setenv("PATH", "" if words.startswith("nothing") else os.environ["PATH"])
    assert native.compiled.__wrapped__(torch.float32) is None


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_memory_layout_does_not_matter(name):
    found = []
    for weight_format, gradient_format in (("contiguous_format",) * 2, ("channels_last",) * 2, ("channels_last", None)):
        torch.manual_seed(0)
        weight = torch.randn(8, 4, 3, 3).to(memory_format=getattr(torch, weight_format)).requires_grad_()
        optimizer = OPTIMIZERS[name]([weight], recipe(name))
        for _ in range(3):
            gradient = torch.randn(8, 4, 3, 3)
            weight.grad = gradient.to(memory_format=getattr(torch, gradient_format)) if gradient_format else gradient
            optimizer.step()
        found.append(weight.detach())
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_state_from_another_layout_dtypes_side_by_side_and_nothing_at_all(name):
    def layers(layout: torch.memory_format) -> list[torch.Tensor]:
        torch.manual_seed(0)
        kernel = torch.randn(8, 4, 3, 3).to(memory_format=layout)
        others = [torch.randn(5), torch.randn(5, dtype=DOUBLE), torch.randn(3, 5, dtype=DOUBLE), torch.randn(0, 4)]
        return [value.requires_grad_() for value in (kernel, *others)]

    def step(weights: list[torch.Tensor], optimizer) -> None:
        for number, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(number)
            gradient = torch.randn(weight.shape, dtype=weight.dtype, generator=generator)
            weight.grad = torch.empty_like(weight).copy_(gradient)
        optimizer.step()

    first, second = layers(torch.contiguous_format), layers(torch.channels_last)
    one, two = OPTIMIZERS[name](first, recipe(name)), OPTIMIZERS[name](second, recipe(name))
    step(first, one)
    step(second, two)
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # its kernel's moments are contiguous, the weights are not
    step(first, one)
    step(second, two)
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_where_a_norm_is_zero_the_ratio_is_one(path):
    zero, gradient = torch.zeros(3, 2), torch.tensor([[1.0, -2.0], [3.0, 0.5], [1.0, 1.0]])

    def step(optimizer, weight: torch.Tensor, gradient: torch.Tensor, **options: float) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        weight.grad = gradient.clone()
        optimizer([weight], lr=0.1, **options).step()
        return weight.detach()

    assert torch.allclose(step(sw.optim.LARS, zero, gradient), -0.1 * gradient)
    assert torch.allclose(step(sw.optim.LAMB, zero, gradient), -0.1 * gradient.sign(), atol=1e-6)
    for optimizer in (sw.optim.LARS, sw.optim.LAMB):
        assert torch.equal(step(optimizer, gradient, zero), gradient)
        assert torch.equal(step(optimizer, zero, zero, weight_decay=0.1), zero)
    assert torch.allclose(step(sw.optim.LARS, gradient, zero, weight_decay=0.1), gradient * (1 - 0.1 * 0.1))
    assert torch.allclose(step(sw.optim.LAMB, gradient, zero, weight_decay=0.1), gradient * (1 - 0.1))


def test_the_rules_for_many_layers_are_those_for_one():
    sizes, lengths = torch.tensor([0.0, 2.0, 3.0, 50.0], dtype=DOUBLE), torch.tensor([1.0, 0.0, 4.0, 2.0], dtype=DOUBLE)
    pairs = list(zip(sizes.tolist(), lengths.tolist(), strict=True))
    assert trust_ratios(sizes, lengths, 10.0).tolist() == [trust_ratio(*pair, 10.0) for pair in pairs]
    assert trust_ratios(sizes, lengths).tolist() == [trust_ratio(*pair) for pair in pairs] == [1, 1, 0.75, 25]
    assert local_rates(sizes, lengths, 0.01, 0.1).tolist() == [local_rate(*pair, 0.01, 0.1) for pair in pairs]


def test_norms_of_long_vectors_are_accurate():
    vector = torch.rand(3_000_000, generator=torch.Generator().manual_seed(0))
    assert norm(vector.numpy()) == pytest.approx(float(vector.double().norm()), rel=2e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda weights: sw.optim.LAMB(weights, lr=-1.0), "lr must be at least 0, got -1.0"),
        (lambda weights: sw.optim.LARS([{"params": weights, "lr": -1.0}]), "lr must be at least 0, got -1.0"),
        (lambda weights: sw.optim.LAMB(weights, betas=(0.9, 1.0)), "betas"),
        (lambda weights: sw.optim.LAMB(weights, betas=(0.9,)), "betas must be two numbers"),
        (lambda weights: sw.optim.LAMB(weights, eps=0.0), "eps must be above 0"),
        (lambda weights: sw.optim.LARS(weights, weight_decay=-0.1), "weight_decay"),
        (lambda weights: sw.optim.LARS(weights, momentum=1.0), "momentum"),
        (lambda weights: sw.optim.LARS(weights, trust_coefficient=0.0), "trust_coefficient"),
        (lambda weights: sw.optim.SOAP(weights, every=0), "every must be at least 1 step, got 0"),
        (lambda weights: sw.optim.ScheduleFree(weights, betas=(0.0, 0.9)), "above 0 and below 1, got 0.0"),
    ],
)
def test_options_that_cannot_be(make, words):
    with pytest.raises(RecipeError, match=words):
        make([torch.zeros(2, 2, requires_grad=True)])


def test_lars_without_momentum_by_hand(path):
    matrix = torch.tensor([[3.0, 4.0]], requires_grad=True)
    vector = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = sw.optim.LARS([matrix, vector], lr=0.5, momentum=0.0, weight_decay=0.1, trust_coefficient=0.01)
    for _ in range(2):
        matrix.grad, vector.grad = torch.tensor([[0.0, 2.0]]), torch.tensor([1.0, -1.0])
        weights = matrix.detach().clone()
        optimizer.step()
        rate = 0.01 * weights.norm() / (2 + 0.1 * weights.norm())
        expected = weights - 0.5 * rate * (torch.tensor([[0.0, 2.0]]) + 0.1 * weights)
        torch.testing.assert_close(matrix.detach(), expected)
    torch.testing.assert_close(vector.detach(), torch.tensor([0.0, 3.0]))  # plain steps without decay


@pytest.mark.parametrize("make", [sw.optim.LAMB, sw.optim.Muon, sw.optim.SOAP, sw.optim.ScheduleFree])
def test_half_precision_weights_are_refused(make):
    weight = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    weight.sum().backward()
    with pytest.raises(RecipeError, match=r"got float16, .* torch\.autocast"):
        make([weight]).step()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RecipeError, match="sparse=False"):
        sw.optim.LAMB(embedding.parameters()).step()


def test_muon_takes_matrices_and_leaves_vectors_to_adamw():
    """torch's own Muon iterates in bfloat16: it shows in the one of ten directions without a gradient (softmax)."""
    found = dict(Problem("muon").run(1).model.named_parameters())
    twin = Problem("momentum")
    start = {name: value.detach().clone() for name, value in twin.model.named_parameters()}
    matrices = [parameter for parameter in twin.model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in twin.model.parameters() if parameter.ndim == 1]
    twin.loss()
    torch.optim.Muon(matrices, lr=0.05, momentum=0.9, weight_decay=0.01, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(vectors, lr=0.05, weight_decay=0.0).step()
    for name, wanted in twin.model.named_parameters():
        if wanted.ndim == 1:
            assert torch.equal(found[name], wanted), name
        elif wanted.ndim == 2:
            assert (found[name] - wanted).norm() <= 0.2 * (wanted - start[name]).norm(), name


def test_muon_moves_every_direction_by_about_the_same_length():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(orthogonal(matrix), full_matrices=False)
    assert 0.65 < float(values.min()) <= float(values.max()) < 1.25
    wanted_left, _, wanted_right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose(orthogonal(matrix.T), orthogonal(matrix).T, atol=1e-5)
    nearest, found = wanted_left @ wanted_right, left @ right
    assert (found - nearest).norm() < 0.01 * nearest.norm()


def test_muon_treats_a_kernel_as_the_matrix_from_inputs_to_outputs():
    torch.manual_seed(0)
    kernel, momentum, lr, decay = nn.Conv2d(3, 8, 3, bias=False), 0.9, 0.1, 0.5
    matrix = nn.Linear(27, 8, bias=False)
    matrix.weight.data = kernel.weight.detach().flatten(1).clone()
    by_hand, buffer = matrix.weight.detach().clone(), torch.zeros(8, 27)
    both = [sw.optim.Muon(layer.parameters(), lr, momentum, weight_decay=decay) for layer in (kernel, matrix)]
    for step in range(2):
        gradient = torch.randn(8, 27, generator=torch.Generator().manual_seed(step))
        kernel.weight.grad, matrix.weight.grad = gradient.view(8, 3, 3, 3), gradient.clone()
        for optimizer in both:
            optimizer.step()
        buffer = momentum * buffer + (1 - momentum) * gradient
        update = orthogonal((1 - momentum) * gradient + momentum * buffer)
        by_hand = (1 - lr * decay) * by_hand - lr * 0.2 * 27**0.5 * update
    assert torch.equal(kernel.weight.flatten(1), matrix.weight)
    assert torch.allclose(matrix.weight, by_hand, atol=1e-6)


def test_muon_takes_named_parameters_and_refuses_other_rules():
    model = torch.nn.Linear(3, 3)
    found = sw.optim.Muon(model.named_parameters())
    assert [(group["rule"], group["param_names"]) for group in found.param_groups] == [
        ("muon", ["weight"]),
        ("adamw", ["bias"]),
    ]
    with pytest.raises(ValueError, match="must be muon or adamw, got 'adam'"):
        sw.optim.Muon([{"params": [model.weight], "rule": "adam"}])
    with pytest.raises(ValueError, match=r"below 1, got 1.5"):
        sw.optim.Muon(model.parameters(), momentum=1.5)


def test_muon_leaves_matrices_to_adamw_where_asked():
    layers = nn.Linear(3, 2), nn.Linear(2, 2)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "rule": "adamw"}]
    optimizer = sw.optim.Muon(groups, lr=0.1)
    assert [(group["rule"], len(group["params"])) for group in optimizer.param_groups] == [
        ("muon", 1),
        ("adamw", 1),
        ("adamw", 2),
    ]


def soap_steps(start: torch.Tensor, gradients: list[torch.Tensor], **options: float) -> torch.Tensor:
    weight = start.clone().requires_grad_()
    optimizer = sw.optim.SOAP([weight], lr=0.1, betas=(0.9, 0.95), **options)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def rotation(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))).Q


def some_gradients(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=DOUBLE, generator=generator) for _ in range(count)]


def test_soap_in_its_own_coordinates_is_adamw():
    start, *gradients = some_gradients(9, 5, 3)
    found = soap_steps(start, gradients, largest=2, weight_decay=0.1)  # both sides are longer
    weight = start.clone().requires_grad_()
    twin = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in gradients:
        weight.grad = gradient
        twin.step()
    torch.testing.assert_close(found, weight.detach())


def test_soap_on_a_rotated_quadratic_is_adam_on_the_plain_one():
    """½·Σhᵢ·mᵢ² of the diagonal matrix M, which SOAP sees as L·M·Rᵀ and finds L and R in the first gradient."""
    curvatures, left, right = torch.tensor([9.0, 1.0, 0.1], dtype=DOUBLE), rotation(3, 1), rotation(3, 2)
    plain = torch.tensor([1.0, -2.0, 3.0], dtype=DOUBLE, requires_grad=True)
    turned = (left @ plain.detach().diag() @ right.T).requires_grad_()
    adam = torch.optim.Adam([plain], lr=0.1, betas=(0.9, 0.95))
    soap = sw.optim.SOAP([turned], lr=0.1, betas=(0.9, 0.95), every=3)
    for step in range(41):
        seen = (left.T @ turned.detach() @ right).diag()
        turned.grad = left @ (curvatures * seen).diag() @ right.T
        soap.step()
        if step:  # the first gradient gives SOAP its basis
            plain.grad = curvatures * plain.detach()
            adam.step()
    torch.testing.assert_close(left.T @ turned.detach() @ right, plain.detach().diag(), rtol=1e-6, atol=1e-6)
    assert plain.detach().abs().max() < 1.0


@pytest.mark.parametrize(("rows", "largest", "sides"), [(4, 9, ("left", "right")), (6, 4, ("right",))])
def test_soap_follows_a_rotation_of_the_sides_that_it_turns(rows, largest, sides):
    start, *gradients = some_gradients(26, rows, 4)
    left, right = rotation(rows, 1) if "left" in sides else torch.eye(rows, dtype=DOUBLE), rotation(4, 2)
    found = soap_steps(left @ start @ right.T, [left @ g @ right.T for g in gradients], largest=largest, every=4)
    torch.testing.assert_close(found, left @ soap_steps(start, gradients, largest=largest, every=4) @ right.T)
    optimizer = sw.optim.SOAP([start.requires_grad_()], largest=largest)
    start.grad = gradients[0]
    optimizer.step()
    assert {name for name in optimizer.state[start] if name.endswith("_basis")} == {f"{side}_basis" for side in sides}


def test_soap_does_not_depend_on_the_scale_of_gradients():
    start, *gradients = some_gradients(16, 4, 5)
    found = soap_steps(start, [1000 * gradient for gradient in gradients], every=2)
    torch.testing.assert_close(found, soap_steps(start, gradients, every=2), rtol=1e-5, atol=1e-6)


def test_soap_treats_a_kernel_as_the_matrix_from_inputs_to_outputs():
    start, *gradients = some_gradients(8, 8, 3, 2, 2)
    kernel = soap_steps(start, gradients, every=2)
    matrix = soap_steps(start.flatten(1), [gradient.flatten(1) for gradient in gradients], every=2)
    assert torch.equal(kernel.flatten(1), matrix)
    assert (kernel - start).abs().max() > 0.1


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_soap_takes_round_off_for_no_reason_to_move(scale):
    """Inputs that are always 0, and the sum over outputs below a softmax, have no gradient in any basis."""
    generator, weight = torch.Generator().manual_seed(0), torch.zeros(10, 40, requires_grad=True)
    optimizer = sw.optim.SOAP([weight], lr=0.01)
    for _ in range(40):
        errors, inputs = torch.randn(2, 64, 40, generator=generator).unbind()
        inputs[:, :8] = 0
        weight.grad = scale * (errors[:, :10] - errors[:, :10].mean(1, keepdim=True)).T @ inputs
        optimizer.step()
    moved = weight.detach()
    assert moved[:, :8].abs().mean() < 1e-3 * moved[:, 8:].abs().mean()
    assert moved.sum(0).norm() < 0.02 * moved.norm()


def test_soap_keeps_an_orthogonal_basis_near_the_eigenvectors():
    mix, weight = rotation(5, 3) @ torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5])).double(), torch.zeros(5, 40)
    weight = weight.double().requires_grad_()
    optimizer = sw.optim.SOAP([weight], betas=(0.9, 0.95), every=1)
    for gradient in some_gradients(60, 5, 40):
        weight.grad = mix @ gradient
        optimizer.step()
    state = optimizer.state[weight]
    basis = state["left_basis"]
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=DOUBLE), atol=1e-10, rtol=0)
    seen = basis.T @ state["left"] @ basis
    assert (seen - seen.diag().diag()).norm() < 0.05 * seen.norm()
    assert seen.diag().diff().max() < 0  # from the largest down


def test_soap_refuses_weights_without_room_for_a_basis():
    weight = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    weight.sum().backward()
    with pytest.raises(RecipeError, match=r"got bfloat16, .* torch\.autocast"):
        sw.optim.SOAP([weight]).step()


@pytest.mark.parametrize("make", [sw.optim.SOAP, sw.optim.ScheduleFree])
def test_vectors_and_embeddings_do_not_decay(make):
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make(make.groups(model), lr=0.1, weight_decay=0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):  # SOAP's first step only finds a basis
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == [False, True, False, False, False]


def test_schedule_free_by_hand():
    """Rate 0.1, β = (0.5, 0), so that the direction is the sign of the gradient; the second step at rate 0.2.

    z: 1 → 0.9 → 0.7. c: 1, then 0.04 ÷ (0.01 + 0.04) = 0.8. x: 0.9 → 0.2·0.9 + 0.8·0.7 = 0.74. y: 0.9 → 0.72.
    """
    weight = torch.tensor([1.0], dtype=DOUBLE, requires_grad=True)
    optimizer = sw.optim.ScheduleFree([weight], lr=0.1, betas=(0.5, 0.0))
    found = []
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.tensor([3.0], dtype=DOUBLE)
        optimizer.step()
        found.append(weight.item())
        optimizer.eval()
        found.append(weight.item())
        optimizer.train()
    assert found == pytest.approx([0.9, 0.9, 0.72, 0.74], abs=1e-8)
    assert optimizer.state[weight]["z"].item() == pytest.approx(0.7, abs=1e-8)


def test_schedule_free_is_the_recursion_of_three_sequences():
    """z, x and y as the paper writes them, with AdamW's step, decay at y, a warm-up and a rate that falls."""
    rates = [0.02, 0.06, 0.1, 0.1, 0.1, 0.05, 0.02]
    start, *gradients = some_gradients(1 + len(rates), 4, 3)
    beta1, beta2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    weight = start.clone().requires_grad_()
    optimizer = sw.optim.ScheduleFree([weight], betas=(beta1, beta2), eps=eps, weight_decay=decay)
    z, x, y, v, total = start.clone(), start.clone(), start.clone(), torch.zeros_like(start), 0.0
    for step, (rate, noise) in enumerate(zip(rates, gradients, strict=True), 1):
        y = (1 - beta1) * z + beta1 * x
        gradient = 2 * y + noise
        v = beta2 * v + (1 - beta2) * gradient**2
        z = z - rate * (gradient / ((v / (1 - beta2**step)).sqrt() + eps) + decay * y)
        total += max(rates[:step]) ** 2
        x = x + max(rates[:step]) ** 2 / total * (z - x)
        weight.grad = 2 * weight.detach() + noise
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    torch.testing.assert_close(weight.detach(), (1 - beta1) * z + beta1 * x)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), x)


def test_schedule_free_evaluates_without_a_trace():
    undisturbed, looked_at = Problem("schedule-free"), Problem("schedule-free")
    undisturbed.run(5)
    for step in range(5):
        looked_at.optimizer.train()
        looked_at.run(1)
        before = looked_at.weights()
        looked_at.optimizer.eval()
        looked_at.optimizer.eval()  # no-op
        assert not torch.equal(looked_at.weights(), before) or step == 0
    with pytest.raises(RecipeError, match="call train"):
        looked_at.optimizer.step()
    stored = copy.deepcopy((looked_at.model.state_dict(), looked_at.optimizer.state_dict()))
    resumed = Problem("schedule-free")
    resumed.model.load_state_dict(stored[0])
    resumed.optimizer.load_state_dict(stored[1])
    resumed.optimizer.train()
    assert torch.equal(resumed.weights(), undisturbed.weights())


def test_fully_sharded_parameters_on_two_processes(tmp_path):
    outcome = together(tmp_path, 2, JOB)
    assert outcome.code == 0, outcome.stderr[-4000:]
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert found.keys() == {"LARS", "LARS, all", "LAMB", "LAMB, all", "Muon", "SOAP", "ScheduleFree"}
    for name, run in found.items():
        assert run["moved"] > 0.01, name
        assert run["difference"] < 1e-5 * run["moved"], name
        assert run["resumed"] == 0.0, name
        assert run["local_share"] < 1.0, name


@pytest.mark.parametrize(("layer", "stacked"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_muon_makes_the_gates_of_a_recurrent_layer_orthogonal_one_by_one(layer, stacked):
    torch.manual_seed(0)
    model = layer(6, 5)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = Muon(Muon.groups(model), lr=0.1, momentum=0.0)
    model(torch.randn(7, 2, 6))[0].square().sum().backward()
    gradient = model.weight_ih_l0.grad.clone()
    optimizer.step()
    moved = (before["weight_ih_l0"] - model.weight_ih_l0.detach()) / (0.1 * 0.2 * 6**0.5)
    for own, expected in zip(moved.chunk(stacked), gradient.chunk(stacked), strict=True):
        torch.testing.assert_close(own, orthogonal(expected), rtol=1e-4, atol=1e-5)


def test_torchs_attention_stacks_three_matrices():
    model = nn.TransformerEncoderLayer(8, 2)
    assert matrices(model) == {
        "self_attn.in_proj_weight": 3, "self_attn.out_proj.weight": 1, "linear1.weight": 1, "linear2.weight": 1
    }  # fmt: skip
