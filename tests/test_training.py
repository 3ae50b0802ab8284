"""The generator itself: what it yields, and what it leaves behind."""

from __future__ import annotations

import copy
import dataclasses
import platform
import resource
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import models
import scalewise as sw
from scalewise.engine.loop import Training
from scalewise.engine.pace import Progress, Selection
from scalewise.engine.parallel.model import sha256
from scalewise.engine.processes import memory
from scalewise.engine.processes.failures import translated
from scalewise.errors import PlacementError, RecipeError, TaskError

CPU = sw.Placement(device="cpu")


def test_records_come_in_order():
    recipe = sw.Recipe(workers=2, worker_batch=50, epochs=2.0, threads=1)
    records = list(sw.train(models.double_mlp(), recipe, CPU))
    assert [type(record).__name__ for record in records] == ["Step", "Epoch", "Step", "Epoch", "Result"]
    assert [record.step for record in records[:-1]] == [1, 1, 2, 2]


def test_a_global_batch_may_be_larger_than_the_data():
    recipe = sw.Recipe(workers=4, worker_batch=64, epochs=5.0, threads=1)
    *_, result = sw.train(models.double_mlp(), recipe, CPU)
    assert (result.steps, result.samples) == (2, 512)


def test_settings_of_the_process_are_put_back():
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    records = sw.train(models.double_mlp(), sw.Recipe(threads=2, steps=3, worker_batch=10), CPU)
    next(records)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (2, True)
    records.close()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_seeds_matter_and_repeat():
    def weights(seed: int) -> str:
        *_, result = sw.train(models.double_mlp(), sw.Recipe(seed=seed, steps=3, worker_batch=10, threads=1), CPU)
        return result.weights_sha256

    assert weights(1) == weights(1) != weights(2)


def test_evaluation_leaves_the_training_state_untouched():
    task = sw.load_task("digits", ["bn=true", "dropout=0.2"])
    recipe = sw.Recipe(worker_batch=32, steps=90, threads=1, seed=1)
    *_, plain = sw.train(task, recipe, CPU)
    with_validation = dataclasses.replace(task, validation=task.test)
    *_, evaluated = sw.train(with_validation, recipe, CPU)
    assert evaluated.validation == evaluated.test
    assert plain.weights_sha256 == evaluated.weights_sha256


def test_the_hash_is_of_names_in_order_and_raw_bytes():
    import hashlib

    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(3)}
    raw = tensors["a"].numpy().tobytes() + tensors["b"].numpy().tobytes()
    assert sha256(tensors) == hashlib.sha256(raw).hexdigest()
    rows = torch.arange(6.0).view(2, 3)
    assert sha256({"w": rows.t().contiguous().t()}) == sha256({"w": rows})  # the layout in memory does not count


def test_noise_off_gives_the_same_weights():
    recipe = sw.Recipe(workers=4, worker_batch=8, steps=5, threads=1)
    *_, on = sw.train(models.double_mlp(), recipe, CPU)
    *_, off = sw.train(models.double_mlp(), recipe, sw.Placement(device="cpu", noise=False))
    assert off.noise_scale is None
    assert on.weights_sha256 == off.weights_sha256


def test_declared_buffers_are_averaged_over_workers():
    task = models.counting()
    with Training(task, sw.Recipe(workers=4, worker_batch=8, steps=1, lr=0.0, threads=1), CPU) as training:
        list(training.records())
        seen = training.strategy.model.tensors()["seen"].clone()
        indices, _ = training.strategy.feed.stream.take(0, 32)
    assert torch.allclose(seen, 0.1 * task.train[0][indices].flatten(1).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("task", "recipe", "error", "words"),
    [
        (models.counting(declared=False), sw.Recipe(workers=2, steps=2), TaskError, "buffer 'seen' changed"),
        (models.wide_mlp(), sw.Recipe(worker_batch=8, micro_batch=1, steps=1), RecipeError, "at least 2 samples"),
        (sw.load_task("digits", ["bn=true"]), sw.Recipe(worker_batch=1, steps=1), RecipeError, "at least 2 samples"),
    ],
)
def test_what_cannot_be_trained_is_refused(task, recipe, error, words):
    with pytest.raises(error, match=words):
        list(sw.train(task, recipe, CPU))


def test_mixed_dtypes_and_frozen_models_are_refused():
    def mixed() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).double())

    def frozen() -> torch.nn.Module:
        return torch.nn.Linear(3, 2).requires_grad_(False)

    data = (torch.randn(8, 3), torch.zeros(8, dtype=torch.long))
    for model, words in ((mixed, "one dtype"), (frozen, "at least one trainable parameter")):
        task = sw.Task(model=model, train=data, test=data, loss=torch.nn.functional.cross_entropy)
        with pytest.raises(TaskError, match=words):
            list(sw.train(task, sw.Recipe(worker_batch=4, steps=1), CPU))


def test_frozen_and_tied_parameters_are_fine():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.frozen = torch.nn.Linear(4, 2).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.second(self.first(x)))

    data = (torch.randn(16, 4), torch.zeros(16, dtype=torch.long))
    task = sw.Task(model=Tied, train=data, test=data, loss=torch.nn.functional.cross_entropy)
    with Training(task, sw.Recipe(workers=2, worker_batch=4, steps=3, lr=0.5), CPU) as training:
        before = {name: value.clone() for name, value in training.strategy.model.tensors().items()}
        list(training.records())
        after = training.strategy.model.tensors()
    assert torch.equal(before["frozen.weight"], after["frozen.weight"])
    assert not torch.equal(before["first.weight"], after["first.weight"])


def test_a_placement_that_contradicts_itself_is_refused():
    with pytest.raises(PlacementError, match="needs --reduce ordered"):
        sw.Placement(shard_optimizer=True, reduce="server")


def test_a_validation_metric_that_is_not_a_number_is_never_the_best():
    task = dataclasses.replace(models.double_mlp(), metric="loss", higher_is_better=False)
    selection, progress = Selection(task, sw.Recipe(worker_batch=10)), Progress()
    found = [selection.observe(progress, {"loss": value}) for value in (float("nan"), 2.0, float("nan"), 1.0)]
    assert found == [False, True, False, True]


def test_sparse_embeddings_are_refused_by_name():
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Flatten(), torch.nn.Linear(6, 2))

    data = torch.randint(5, (20, 2)), torch.randint(2, (20,))
    task = sw.Task(model=model, train=data, test=data, loss=F.cross_entropy)
    with pytest.raises(TaskError, match=r"layer '0' \(Embedding\) has sparse=True; build it with sparse=False"):
        list(sw.train(task, sw.Recipe(worker_batch=10, steps=1, threads=1), CPU))


def test_growing_batches_are_a_plain_loop_over_larger_ones():
    task = models.double_mlp()
    recipe = sw.Recipe(workers=2, worker_batch=5, epochs=4.0, lr=0.1, optimizer="sgd", schedule="growth", drop=2,
                       threads=1)  # fmt: skip
    with Training(task, recipe, sw.Placement(device="cpu")) as training:
        model = copy.deepcopy(training.strategy.model.module)
        found = [record for record in training.records() if isinstance(record, sw.Step)]
        cuts, stream = training.cuts, training.strategy.feed.stream
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = task.train
    for record in found:
        indices, _ = stream.take(cuts.start(record.step - 1), cuts.start(record.step))
        loss = F.cross_entropy(model(x[indices]), y[indices])
        assert record.loss == pytest.approx(loss.item(), rel=1e-10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [cuts.parts(step) for step in (0, 19, 20, 25)] == [1, 1, 2, 5]  # 10 are left: two steps of 5, not of 4


FREED = """
import torch
from scalewise.engine.processes.memory import held, keep_freed_memory, return_freed_memory

before = held().own
keep_freed_memory()
torch.ones(16 << 20)  # 64 MiB, freed at once
print(held().own - before > 48 << 20)
return_freed_memory()
print(held().own - before > 48 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone can be told")
def test_freed_memory_is_kept_or_given_back():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_freed_memory_is_kept_only_where_there_is_room_for_as_much_again(monkeypatch):
    enough = 2 * memory.held().highest
    monkeypatch.setattr(memory, "free_memory", lambda: memory.Free(enough, "free memory of this machine"))
    assert memory.has_room_to_keep(processes=1)
    assert not memory.has_room_to_keep(processes=3)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory.held().writable + (1 << 20), before[1]))
    try:
        found = memory.has_room_to_keep(processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert not found


def test_a_shortage_of_memory_without_words_is_one_too():
    assert str(translated(MemoryError())).startswith("a step must fit into memory, got: MemoryError; lower")
