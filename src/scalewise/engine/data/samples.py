"""Training, validation and test samples: in memory as tensors, or a map-style data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import IterableDataset, default_collate

from scalewise.engine.data import streams
from scalewise.errors import NonFiniteData, TaskError
from scalewise.tasks.task import Augment, Batch, Data

HELD_OUT_SHARE = 10


class Samples(Protocol):
    """Samples that can be fetched by number."""

    @property
    def in_memory(self) -> bool:
        """Whether fetching only copies, and is not worth a process of its own."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """The samples `indices`, as one batch; `epochs` are the passes over the data that they are for."""

    def describe(self, index: int) -> str:
        """A sample in messages: its number in the task's data, and its file if it has one."""


class TensorSamples:
    """A tree of tensors whose first dimension counts samples."""

    in_memory = True

    def __init__(self, tree: Data, what: str) -> None:
        self.tree = tree_map(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
        leaves, self._structure = tree_flatten(self.tree)
        self._leaves = leaves
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
            raise TaskError(f"{what} data must be tensors (or a map-style Dataset), got {kinds}")
        lengths = sorted({len(leaf) for leaf in leaves})
        if len(lengths) > 1 or lengths[0] == 0:
            raise TaskError(
                f"{what} data must hold the same number of samples in each tensor, at least 1, got {lengths}"
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """Rows of every tensor."""
        rows = [leaf.index_select(0, indices if leaf.is_cpu else indices.to(leaf.device)) for leaf in self._leaves]
        return tree_unflatten(rows, self._structure)

    def describe(self, index: int) -> str:
        """The number."""
        return str(index)


class DatasetSamples:
    """A map-style data set; random numbers drawn in `__getitem__` are keyed by (seed, epoch, sample).

    Samples are read with one thread, here as in a loader process, so that their bytes do not depend on where.
    """

    in_memory = False

    def __init__(self, dataset: Any, seed: int) -> None:  # noqa: ANN401  (anything with len and [])
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """Samples one by one, collated as a DataLoader would."""
        cpu = torch.device("cpu")
        rows = []
        with streams.undisturbed(), one_thread():
            for index, epoch in zip(indices.tolist(), epochs.tolist(), strict=True):
                streams.seed_everything(streams.key("sample", self.seed, epoch, index), cpu)
                rows.append(self.dataset[index])
        return default_collate(rows)

    def describe(self, index: int) -> str:
        """The number, and the data set's own `describe(index)` where it has one."""
        known = getattr(self.dataset, "describe", None)
        return f"{index} ({known(index)})" if known else str(index)


class Augmented:
    """Samples changed by a task's `augment`, wherever they are fetched: here or in a loader process."""

    def __init__(self, samples: Samples, augment: Augment, seed: int) -> None:
        self.samples = samples
        self.in_memory = samples.in_memory
        self._augment, self._seed = augment, seed

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """The samples, each changed by its own key; data not in memory with one thread, here as in a loader."""
        batch = self.samples.fetch(indices, epochs)
        keys = streams.sample_keys(self._seed, epochs, indices)
        if self.in_memory:
            return self._augment(batch, keys)
        with streams.undisturbed(), one_thread():
            streams.seed_everything(int(keys[0]) & (2**63 - 1), torch.device("cpu"))
            return self._augment(batch, keys)

    def describe(self, index: int) -> str:
        """As before the change."""
        return self.samples.describe(index)


class Subset:
    """Some of the samples, renumbered from 0."""

    def __init__(self, samples: Samples, chosen: Tensor) -> None:
        self.samples = samples
        self.chosen = chosen
        self.in_memory = samples.in_memory

    def __len__(self) -> int:
        return len(self.chosen)

    def fetch(self, indices: Tensor, epochs: Tensor) -> Batch:
        """The chosen ones among the samples."""
        return self.samples.fetch(self.chosen[indices], epochs)

    def describe(self, index: int) -> str:
        """As among all samples."""
        return self.samples.describe(int(self.chosen[index]))


def targets(samples: Samples) -> Tensor | None:
    """The whole-numbered targets of data in memory, (inputs, target); None for any other data."""
    if isinstance(samples, Subset):
        chosen = targets(samples.samples)
        return None if chosen is None else chosen[samples.chosen]
    if not isinstance(samples, TensorSamples) or not isinstance(samples.tree, tuple | list) or len(samples.tree) != 2:
        return None
    target = samples.tree[1]
    whole = isinstance(target, Tensor) and target.ndim == 1 and target.dtype == torch.long
    return target if whole else None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_finite(samples: Samples, indices: list[int], epochs: list[int], what: str) -> None:
    """Refuse the first of some samples that holds a number that is not finite."""
    for index, epoch in zip(indices, epochs, strict=True):
        leaves = tree_flatten(samples.fetch(torch.tensor([index]), torch.tensor([epoch])))[0]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                value = leaf[~leaf.isfinite()][0].item()
                raise NonFiniteData(
                    f"{what} samples must hold finite numbers, got {value} in sample {samples.describe(index)}; "
                    f"correct or remove it"
                )


def open_samples(data: Data, seed: int, what: str) -> Samples:
    """The samples of a task's data."""
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise TaskError(
            f"{what} data must be indexable (tensors or a map-style Dataset with __len__ and __getitem__), got "
            f"{type(data).__name__}, which can only be iterated; load it into tensors, or index it by position"
        )
    if isinstance(data, Tensor | np.ndarray | tuple | list | dict):
        return TensorSamples(data, what)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TaskError(f"{what} data must be tensors or a map-style Dataset, got {type(data).__name__}")
    if len(data) == 0:
        raise TaskError(f"{what} data must hold at least 1 sample, got an empty {type(data).__name__}")
    return DatasetSamples(data, seed)


def hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Split off a fixed tenth for validation: the same samples whatever the seed."""
    if len(samples) < 2:
        raise TaskError(f"holding out validation data needs at least 2 training samples, got {len(samples)}")
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(len(samples)))
    cut = held_out_samples(len(samples))
    return Subset(samples, order[cut:].sort().values), Subset(samples, order[:cut].sort().values)


def some(samples: Samples, most: int) -> Samples:
    """Up to `most` samples, the same ones each time."""
    if len(samples) <= most:
        return samples
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(1)).permutation(len(samples)))
    return Subset(samples, order[:most].sort().values)


def held_out_samples(samples: int) -> int:
    """How many of some training samples are held out."""
    return max(1, samples // HELD_OUT_SHARE)
