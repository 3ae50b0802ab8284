from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scalewise.errors import TaskError
from scalewise.nn import GhostBatchNorm1d, GhostBatchNorm2d, to_ghost_batch_norm


def test_groups_are_normalized_alone_and_statistics_averaged():
    torch.manual_seed(0)
    x = torch.randn(12, 3, 4, 4) * 2 + 1
    ghost = GhostBatchNorm2d(3, ghost_batch=4)
    out = ghost(x)
    plain = [nn.BatchNorm2d(3) for _ in range(3)]
    parts = torch.cat([norm(part) for norm, part in zip(plain, x.split(4), strict=True)])
    assert torch.equal(out, parts)
    mean = torch.stack([norm.running_mean for norm in plain]).mean(0)
    variance = torch.stack([norm.running_var for norm in plain]).mean(0)
    assert torch.allclose(ghost.running_mean, mean)
    assert torch.allclose(ghost.running_var, variance)
    assert ghost.num_batches_tracked == 1


def test_conversion_keeps_names_parameters_and_evaluation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144)))
    model(torch.randn(8, 1, 8, 8))
    before = copy.deepcopy(model).eval()
    ghost = to_ghost_batch_norm(model, 4)
    assert isinstance(ghost[1], GhostBatchNorm2d)
    assert isinstance(ghost[2][1], GhostBatchNorm1d)
    assert list(ghost.state_dict()) == list(before.state_dict())
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(ghost.eval()(x), before(x))


def test_conversion_keeps_shared_layers_and_hooks_and_refuses_other_kinds():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(4)
            self.inner = nn.Sequential(self.first)
            self.again = self.first

    model, calls = Shared(), []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    model = to_ghost_batch_norm(to_ghost_batch_norm(model, 2), 4)
    assert isinstance(model.first, GhostBatchNorm1d)
    assert model.first is model.inner[0] is model.again
    assert model.first.ghost_batch == 4
    model.again(torch.randn(8, 4))
    assert calls == [1]
    with pytest.raises(TaskError, match="got SyncBatchNorm; put one of these in its place first"):
        to_ghost_batch_norm(mixed := nn.Sequential(nn.BatchNorm1d(4), nn.SyncBatchNorm(4)), 4)
    assert type(mixed[0]) is nn.BatchNorm1d  # not half converted


@pytest.mark.parametrize("ghost_batch", [0, -2])
def test_groups_of_no_samples_are_refused(ghost_batch):
    with pytest.raises(ValueError, match=f"ghost_batch must be at least 1 sample, got {ghost_batch}"):
        GhostBatchNorm2d(3, ghost_batch)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="ghost_batch=4, got 6 samples; choose a divisor, and drop_last=True"):
        GhostBatchNorm1d(3, ghost_batch=4)(torch.randn(6, 3))


def test_without_running_statistics():
    norm = GhostBatchNorm1d(3, ghost_batch=4, track_running_stats=False)
    assert norm(torch.randn(8, 3)).shape == (8, 3)


def test_statistics_that_are_switched_off_later_stay():
    layer = nn.BatchNorm1d(3)
    layer.track_running_stats = False
    ghost = to_ghost_batch_norm(layer, 4)
    before = ghost.running_mean.clone()
    ghost.train()(torch.randn(8, 3))
    assert torch.equal(ghost.running_mean, before)
    assert int(ghost.num_batches_tracked) == 0
