"""Ways to train on one process, from a loop written by hand to frameworks that own the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from peers import Loader, accelerate, keras, lightning
from rounds import (
    LEARNING_RATE,
    MOMENTUM,
    WARM_UP_STEPS,
    Contestant,
    Ready,
    Round,
    Seconds,
    Work,
    endless,
    images,
    now,
    per_step,
)
from scalewise import Placement, Recipe
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import numerics
from scalewise.engine.processes.memory import keep_freed_memory

FOR_EVER = 10**9


def hand_written(work: Work) -> Iterator[None]:
    model = work.model()
    optimizer = work.optimizer(model)
    x, y = work.data
    while True:
        order = torch.randperm(len(x))
        for start in range(0, len(x) - work.batch + 1, work.batch):
            indices = order[start : start + work.batch]
            optimizer.zero_grad()
            loss = work.loss(model(images(x[indices])), y[indices])
            loss.backward()
            optimizer.step()
            yield


def scalewise(workers: int = 1, worker_batch: int | None = None, placement: Placement | None = None) -> Ready:
    """`Training`, whose records are read as they come; nothing is left out."""
    where = placement or Placement(device="cpu")

    @contextmanager
    def ready(work: Work) -> Iterator[Round]:
        recipe = Recipe(
            workers=workers,
            worker_batch=worker_batch or work.batch,
            steps=FOR_EVER,
            optimizer="momentum",
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
            layout="channels_last",
            threads=work.threads,
        )
        with Training(work.task, recipe, where) as training:
            records = training.records()

            def take(count: int) -> int:
                before = training.progress.step
                while training.progress.step < before + count:
                    next(records)
                return training.progress.step - before  # one more if an epoch ended before: its records came at once

            def round(count: int) -> Seconds:
                with numerics(recipe, training.team.device, where.exact):
                    take(WARM_UP_STEPS)
                    started = now()
                    taken = take(count)
                    return per_step(started, now(), taken)

            yield round

    return ready


def sample_by_sample(work: Work) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*work.data), batch_size=work.batch, shuffle=True, drop_last=True)


def keeping_freed_memory(ready: Ready) -> Ready:
    """The same in a process whose C library keeps a step's memory for the next one, as scalewise has it."""

    @contextmanager
    def with_setting(work: Work) -> Iterator[Round]:
        keep_freed_memory()
        with ready(work) as round:
            yield round

    return with_setting


class WholeBatches(TensorDataset):
    """Gives a batch by indexing each tensor once, through the method that a DataLoader's fetcher prefers."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[indices]


def batch_by_index(work: Work) -> DataLoader[Any]:
    dataset = WholeBatches(*work.data)
    return DataLoader(dataset, batch_size=work.batch, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)


def data_loader(loader: Loader) -> Ready:
    def steps(work: Work) -> Iterator[None]:
        model = work.model()
        optimizer = work.optimizer(model)
        batches = loader(work)
        while True:
            for x, y in batches:
                optimizer.zero_grad()
                work.loss(model(images(x)), y).backward()
                optimizer.step()
                yield

    return endless(steps)


HAND_WRITTEN = "hand-written loop"
ONE_WORKER = [
    Contestant(
        HAND_WRITTEN,
        "plain PyTorch: data in memory, a permutation per epoch, batches by index; the loss is never read",
        endless(hand_written),
    ),
    Contestant(
        "the same again (control)",
        "the hand-written loop a second time: what differs from 1.00 here is noise",
        endless(hand_written),
    ),
    Contestant(
        "hand-written loop, freed memory kept",
        "the hand-written loop with the C library's setting that scalewise makes, which most people do not know of",
        keeping_freed_memory(endless(hand_written)),
    ),
    Contestant(
        "scalewise",
        "`Training(…).records()`, every record taken: loss and accuracy of each step are computed and read, and every "
        "loss is checked",
        scalewise(),
    ),
    Contestant(
        "DataLoader loop",
        "the usual loop over a DataLoader (TensorDataset, shuffled, no loader processes): samples one by one, collated",
        data_loader(sample_by_sample),
    ),
    Contestant(
        "DataLoader loop, by index",
        "the same with a data set that is indexed once per batch (`__getitems__`)",
        data_loader(batch_by_index),
    ),
    Contestant(
        "Accelerate",
        "`Accelerator(cpu=True)` around model, optimizer and the usual DataLoader; the loss is never read",
        accelerate(sample_by_sample),
        "accelerate",
    ),
    Contestant(
        "Accelerate, by index",
        "the same with the DataLoader that indexes once per batch",
        accelerate(batch_by_index),
        "accelerate",
    ),
    Contestant(
        "Lightning",
        "`Trainer.fit` on the usual DataLoader, without logger, checkpoints, progress bar and summary; timed between "
        "batch ends",
        lightning(sample_by_sample),
        "lightning",
    ),
    Contestant(
        "Lightning, by index",
        "the same with the DataLoader that indexes once per batch",
        lightning(batch_by_index),
        "lightning",
    ),
    Contestant(
        "Keras on torch",
        "`fit` of a Sequential model with the same layers on the tensors in memory, channels first (the faster of its "
        "layouts on torch here), no metrics, no compilation; it reads each loss; timed between batch ends",
        keras,
        "keras",
    ),
]

QUICK = {HAND_WRITTEN, "scalewise", "DataLoader loop", "Accelerate", "Lightning", "Keras on torch"}
EIGHT, EIGHT_QUIET, ONE_LARGE = "8 workers × 32", "8 workers × 32, noise scale off", "1 worker × 256"
MANY_WORKERS = [
    Contestant(ONE_LARGE, "scalewise with one worker", scalewise()),
    Contestant(EIGHT, "scalewise with eight workers, one after another, noise scale measured", scalewise(8, 32)),
    Contestant(EIGHT_QUIET, "the same without the noise scale", scalewise(8, 32, Placement(device="cpu", noise=False))),
    Contestant("hand-written loop × 256", "plain PyTorch with the global batch at once", endless(hand_written)),
]
