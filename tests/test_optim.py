"""Every optimizer in one table: it converges, repeats, leaves gradients alone, and may be cut anywhere."""

from __future__ import annotations

import pytest
import torch

from scalewise.optim import OPTIMIZERS
from scalewise.recipe import Recipe


def recipe(name: str) -> Recipe:
    return Recipe(optimizer=name, lr=0.05, weight_decay=0.01)


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
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_does_not_depend_on_where_the_tensor_is_cut(name, threads):
    whole = trained(name, [slice(None)], threads)
    for cuts in ([2048], [2048 * 7, 2048 * 20], [33, 1001, 77_777]):
        ends = [0, *cuts, 100_003]
        pieces = [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
        assert torch.equal(trained(name, pieces, threads), whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converges_and_leaves_gradients_untouched(name):
    weight = torch.tensor([3.0, -2.0], requires_grad=True)
    optimizer = OPTIMIZERS[name]([weight], recipe(name))
    for _ in range(400):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        before = weight.grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, before)
    assert weight.abs().max() < 0.05


def test_hand_derived_two_steps():
    def two_steps(name: str) -> float:
        weight = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
        optimizer = OPTIMIZERS[name]([weight], Recipe(optimizer=name, lr=0.1, momentum=0.5))
        for gradient in (1.0, 2.0):
            weight.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
        return weight.item()

    assert two_steps("sgd") == pytest.approx(1 - 0.1 - 0.2)
    assert two_steps("momentum") == pytest.approx(1 - 0.1 - 0.1 * 2.5)
    assert two_steps("nesterov") == pytest.approx(1 - 0.1 * 1.5 - 0.1 * (2 + 0.5 * 2.5))
    first, second = (0.1 * 0.9 + 0.2) / (1 - 0.81), (0.001 * 0.999 + 0.004) / (1 - 0.999**2)
    assert two_steps("adam") == pytest.approx(1 - 0.1 - 0.1 * first / second**0.5, rel=1e-6)
