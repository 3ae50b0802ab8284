"""Data as other libraries hold them, in a form that a task takes: tensors, or a map-style Dataset of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from scalewise.errors import TaskError
from scalewise.tasks.task import Batch, Data


class Rows(Dataset[dict[str, Tensor]]):
    """A data set of dictionaries, such as a Hugging Face one, whose samples become dictionaries of tensors.

    What is not a number, such as a text, is left out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value) for name, value in self._rows[index].items() if _is_numeric(value)}


def _is_numeric(value: object) -> bool:
    return isinstance(value, Tensor) or np.asarray(value).dtype.kind in "biuf"


def data_of(data: Any) -> Data:  # noqa: ANN401  (whatever a library takes)
    """The samples of a DataLoader, of a data set of dictionaries, or of anything that a task takes anyway."""
    if isinstance(data, DataLoader):
        if data.collate_fn is not default_collate:
            raise TaskError(
                "samples must go together as torch's default_collate puts them, got a DataLoader with a collate_fn of "
                "its own; pass a Dataset whose samples have equal shapes (pad them)"
            )
        data = data.dataset
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return default_collate([*map(Rows(data).__getitem__, range(len(data)))])
    if isinstance(data, Tensor | np.ndarray | tuple | list | dict) or not hasattr(data, "__getitem__"):
        return tree_map(_narrow, data)
    return Rows(data) if len(data) and isinstance(data[0], Mapping) else data


def _narrow(leaf: Any) -> Any:  # noqa: ANN401
    """Numbers as libraries give them to a model: float32 in place of numpy's float64."""
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(leaf, dtype=np.float32 if leaf.dtype == np.float64 else None))
    return leaf


def first_sample(data: Data) -> Batch:
    """The first sample of what `data_of` gives, as a batch of one."""
    if _is_tree(data):
        return tree_map(lambda leaf: torch.as_tensor(leaf)[:1], data)
    return default_collate([data[0]])


def length_of(data: Data) -> int:
    """How many samples there are in what `data_of` gives."""
    return samples_in(data) if _is_tree(data) else len(data)


def _is_tree(data: Data) -> bool:
    """Whether the data are tensors, not a data set of samples."""
    return isinstance(data, Tensor | tuple | list | dict)


def samples_in(batch: Batch) -> int:
    """How many samples a batch has: the length of its first tensor."""
    return len(next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim))
