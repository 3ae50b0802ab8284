"""DistributedOptimizer on some processes against the loop of one process with the whole batch.

python -m torch.distributed.run --nproc-per-node N horovod_training.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scalewise as sw
import scalewise.horovod.torch as hvd
from scalewise.doctor.diagnose import diagnose_folder

STEPS, ROWS = 4, 12


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 5, generator=generator).double(), torch.randn(ROWS, 3, generator=generator).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alone(kind: type, clip: bool = False, **options: float) -> Tensor:
    """The whole batch on one process."""
    model = model_of()
    optimizer = kind(model.parameters(), **options)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return flat(model)


def together(kind: type, passes: int = 1, clip: bool = False, wrap: dict | None = None, **options: float) -> Tensor:
    """Every process has its part of the batch, in one or several backward passes."""
    model = model_of(hvd.rank())  # other weights on every process until they are broadcast
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = kind(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    wrapped = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **(wrap or {})
    )
    assert isinstance(wrapped, kind)
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert type(wrapped).__name__ == kind.__name__
    for step in range(STEPS):
        wrapped.zero_grad()
        parts = zip(*(tensor.chunk(hvd.size() * passes) for tensor in batch(step)), strict=True)
        for x, y in [*parts][hvd.rank() * passes : (hvd.rank() + 1) * passes]:
            (F.mse_loss(model(x), y) / passes).backward()
        if clip:
            wrapped.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with wrapped.skip_synchronize():
                wrapped.step()
        else:
            wrapped.step()
        scheduler.step()
    return flat(model)


def same_everywhere(weights: Tensor) -> bool:
    digests = hvd.allgather_object(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    return len(set(digests)) == 1


def check_equal_to_one_process() -> None:
    kinds = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]
    wraps: list[dict] = [
        {},
        {"groups": 2},
        {"gradient_predivide_factor": float(hvd.size())},
        {"reduction": "ordered"},
    ]
    for (kind, options), passes in itertools.product(kinds, (1, 2)):
        for wrap in wraps:
            weights = together(kind, passes, wrap=wrap, **options)
            assert same_everywhere(weights)
            assert torch.allclose(weights, alone(kind, **options), rtol=1e-12, atol=1e-13), (kind, passes, wrap)
    assert torch.allclose(together(torch.optim.SGD, clip=True, lr=1.0), alone(torch.optim.SGD, clip=True, lr=1.0))


def check_compression() -> None:
    exact = alone(torch.optim.SGD, lr=0.1)
    for compression, error in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
        weights = together(torch.optim.SGD, wrap={"compression": compression}, lr=0.1)
        assert same_everywhere(weights)
        difference = (weights - exact).abs().max().item()
        assert 1e-12 < difference < error
    for dtype in (torch.uint8, torch.int64):
        assert hvd.Compression.fp16.compress(torch.ones(2, dtype=dtype))[0].dtype == dtype


def check_sum_and_process_set() -> None:
    summed = together(torch.optim.SGD, wrap={"op": hvd.Sum}, lr=0.1 / hvd.size())
    assert torch.allclose(summed, alone(torch.optim.SGD, lr=0.1))
    first = hvd.add_process_set([0])
    model = model_of()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=first)
    F.mse_loss(model(batch(0)[0][hvd.rank() :]), batch(0)[1][hvd.rank() :]).backward()
    own = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(own, model[0].weight.grad), "a set of one, and processes outside it, average nothing"
    hvd.remove_process_set(first)


def check_adasum_steps() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    rank = hvd.rank()
    model = model_of()
    start = flat(model).clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    x, y = (tensor.chunk(hvd.size())[rank] for tensor in batch(0))
    F.mse_loss(model(x), y).backward()
    own = [-0.1 * parameter.grad for parameter in model.parameters()]
    wanted = torch.cat([hvd.allreduce(change, op=hvd.Adasum).flatten() for change in own])
    optimizer.step()
    assert torch.allclose(flat(model) - start, wanted)
    assert same_everywhere(flat(model))
    with pytest.raises(AssertionError, match="skip_synchronize"):
        optimizer.skip_synchronize()


class Branches(nn.Module):
    """Which parameters get a gradient depends on the process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        y = self.second(self.first(x))
        return y if short else self.third(y)


def check_branches() -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4), short=hvd.rank() == 0).sum().backward()
        optimizer.step()
        assert model.third.bias.grad.tolist() == pytest.approx([2 * (hvd.size() - 1) / hvd.size()] * 4)
    assert same_everywhere(flat(model))


def check_gradients_on_and_off() -> None:
    generator, critic = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1)
    first = hvd.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1), generator.named_parameters())
    second = hvd.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1), critic.named_parameters())
    image = torch.rand(1, 1, 8, 8)
    for step in range(6):
        trained, other = (generator, critic) if step % 2 else (critic, generator)
        trained.requires_grad_(True)
        other.requires_grad_(False)
        first.zero_grad()
        second.zero_grad()
        critic(generator(image)).sum().backward()
        (first if step % 2 else second).step()
    critic.requires_grad_(True)
    generator.requires_grad_(True)
    first.zero_grad()
    second.zero_grad()
    critic(generator(image)).sum().backward()  # both under way at once
    second.step()
    first.step()


def check_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dense in (False, True):
        torch.manual_seed(0)
        table, head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)
        parameters = [*table.parameters(), *head.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), sparse_as_dense=dense)
        for _ in range(2):
            optimizer.zero_grad()
            head(table(torch.tensor([rank, 5]))).sum().backward()
            own = hvd.allreduce(table.weight.grad.to_dense())
            optimizer.step()
            assert table.weight.grad.is_sparse
            assert torch.allclose(table.weight.grad.to_dense(), own)
    one = torch.eye(size)[rank].to_sparse()
    assert hvd.sparse_allreduce_async(one, op=hvd.Sum)().to_dense().tolist() == [1.0] * size


def check_mistakes() -> None:
    model = model_of()

    def wrap(**options: object) -> object:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    names = [*model.named_parameters()]
    for message, options in (
        ("duplicates: 0.weight", {"named_parameters": [*names, names[0]]}),
        ("were not named", {"named_parameters": names[:1]}),
        ("sequence of tuples", {"named_parameters": model.parameters()}),
        ("only appear once", {"groups": [[names[0][1]], [names[0][1]]]}),
        ("consist of torch.Tensor", {"groups": [["weight"]]}),
        ("positive number", {"groups": 0}),
        ("needs op=hvd.Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("hvd.Adasum, got Max", {"op": hvd.Max}),
    ):
        with pytest.raises(ValueError, match=message):
            wrap(**options)
    optimizer = wrap(named_parameters=model.named_parameters())
    x, y = batch(0)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        F.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(one.message)[:50] for one in seen] == ["optimizer.step() called without optimizer.skip_syn"]
    optimizer.zero_grad()
    assert optimizer.step(lambda: (loss := F.mse_loss(model(x), y), loss.backward())[0]).item() > 0
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
    optimizer.step()


def check_sync_batch_norm() -> None:
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(5)
    counts = [3 + one for one in range(size)]
    rows = torch.randn(sum(counts), 4, 2, generator=generator).double() + 1000.0
    weights = torch.randn(rows.shape, generator=generator).double()
    synced, whole = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    start = sum(counts[:rank])
    mine = rows[start : start + counts[rank]].clone().requires_grad_()
    everyone = rows.clone().requires_grad_()
    part = synced(mine)
    reference = whole(everyone)
    assert torch.allclose(part, reference[start : start + counts[rank]], atol=1e-9)
    (part * weights[start : start + counts[rank]]).sum().backward()
    (reference * weights).sum().backward()
    assert torch.allclose(mine.grad, everyone.grad[start : start + counts[rank]], atol=1e-8)
    assert torch.allclose(hvd.allreduce(synced.weight.grad, op=hvd.Sum), whole.weight.grad)
    assert torch.allclose(synced.running_mean, whole.running_mean)
    assert torch.allclose(synced.running_var, whole.running_var)
    synced.eval()
    whole.eval()
    assert torch.allclose(synced(rows), whole(rows))


def ordered_digest(workers: int) -> str:
    """The bytes of `workers` backward passes a step, on however many processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
    passes = workers // hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        backward_passes_per_step=passes,
        op=hvd.Sum,
        reduction="ordered",
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for worker in range(hvd.rank() * passes, (hvd.rank() + 1) * passes):
            generator = torch.Generator().manual_seed(1000 * step + worker)
            x, y = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)
            (F.mse_loss(model(x), y) / workers).backward()
        optimizer.step()
    assert same_everywhere(flat(model))
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def findings(out: Path) -> list[str]:
    """What doctor says of a script that forgets to broadcast and gives every process the same samples."""
    model = model_of(hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    with sw.watch(model, optimizer, out) as watcher:
        for step in range(20):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = F.mse_loss(model(x), y)
            watcher.loss(loss)
            loss.backward()
            optimizer.step()
    hvd.barrier()
    return [finding.cause for finding in diagnose_folder(out).findings]


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    if "ordered" not in sys.argv:
        for check in [value for name, value in globals().items() if name.startswith("check_")]:
            check()
            hvd.barrier()
            if hvd.rank() == 0:  # lines of several processes may run into each other
                print(check.__name__, flush=True)
    digest = ordered_digest(6)
    found = findings(Path("watch")) if "watch" in sys.argv else []
    if hvd.rank() == 0:
        print("digest", digest)
        print("findings", json.dumps(found))


if __name__ == "__main__":
    main()
