"""What adapters share: a method as a module that hooks see, a recipe from an optimizer, data as a task takes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch, Data
from scalewise.watch.watcher import Watcher


class Shell(nn.Module):
    """A module whose forward is a method of another one, and which takes that method's place.

    >>> class Net(nn.Linear):
    ...     def training_step(self, batch):
    ...         return self(batch)
    >>> net = Net(2, 1)
    >>> shell = Shell(net, "training_step")
    >>> handle = shell.register_forward_hook(lambda module, arguments, output: print("seen"))
    >>> output = net.training_step(torch.ones(2))
    seen
    >>> shell.remove()
    >>> output = net.training_step(torch.ones(2))
    """

    def __init__(self, inner: nn.Module, method: str) -> None:
        super().__init__()
        self.inner = inner
        self._method, self._original = method, getattr(inner, method)

        @functools.wraps(self._original)  # libraries ask which arguments the method takes
        def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            return self(*arguments, **named)

        inner.__dict__[method] = call

    @property
    def training(self) -> bool:
        """Whether the inner module is being trained."""
        return self.inner.training if "inner" in self._modules else True

    @training.setter
    def training(self, mode: bool) -> None:
        pass  # it has no mode of its own

    def forward(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        """Call the method."""
        return self._original(*arguments, **named)

    def remove(self) -> None:
        """Give the method its place back."""
        self.inner.__dict__.pop(self._method, None)


WAY_OUT = "say how it is learned with recipe=sw.Recipe(optimizer=…, lr=…, worker_batch=…, epochs=…)"


def recipe_of(optimizer: Optimizer, worker_batch: int, epochs: float) -> Recipe:
    """The single-worker recipe of SGD (with momentum or Nesterov's), Adam or AdamW.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    >>> recipe_of(optimizer, worker_batch=32, epochs=5.0).optimizer
    'momentum'
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    group = settings[0]
    if any(other != group for other in settings[1:]):
        raise _unreadable("parameter groups with different settings")
    fields: dict[str, Any] = {"worker_batch": worker_batch, "epochs": float(epochs), "lr": float(group["lr"])}
    fields["weight_decay"] = float(group.get("weight_decay", 0.0))
    if type(optimizer) is torch.optim.SGD:
        fields |= sgd_fields(group)
    elif type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = group["betas"]
        name = "adamw" if type(optimizer) is torch.optim.AdamW else "adam"
        fields |= {"optimizer": name, "beta1": float(beta1), "beta2": float(beta2), "epsilon": float(group["eps"])}
    else:
        raise _unreadable(f"a {type(optimizer).__name__}")
    if group.get("amsgrad") or group.get("maximize") or group.get("dampening"):
        raise _unreadable("amsgrad, maximize or dampening")
    return Recipe(**fields)


def sgd_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's fields for SGD's momentum and nesterov."""
    if not group["momentum"]:
        return {"optimizer": "sgd"}
    return {"optimizer": "nesterov" if group["nesterov"] else "momentum", "momentum": float(group["momentum"])}


def _unreadable(got: str) -> TaskError:
    return TaskError(
        f"a recipe can be read from torch.optim's SGD, Adam and AdamW with the same settings for all parameters, got "
        f"{got}; {WAY_OUT}"
    )


class Watching:
    """What the callbacks of all libraries share."""

    watcher: Watcher | None = None

    def __init__(self, out: str | Path = "watch", show: bool = True) -> None:
        """Nothing is watched yet.

        Arguments:
            out: a folder; each process writes its own file there.
            show: print the noise scale and the findings when training ends.
        """
        super().__init__()
        self._out, self._show = Path(out), show


def noise_values(watcher: Watcher) -> dict[str, float]:
    """value, low, high and enough (1 or 0) under `noise_scale/`; nothing where it was not measured."""
    noise = watcher.noise()
    known = {} if noise is None else noise.to_json()
    return {f"noise_scale/{name}": float(value) for name, value in known.items() if value is not None}


class Rows(Dataset[dict[str, Tensor]]):
    """A data set of dictionaries, such as a Hugging Face one, whose samples become dictionaries of tensors.

    What is not a number, such as a text, is left out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            name: torch.as_tensor(value)
            for name, value in self._rows[index].items()
            if isinstance(value, Tensor) or np.asarray(value).dtype.kind in "biuf"
        }


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


def parts_of(train: Data, test: Data, validation: Data | None) -> dict[str, Data]:
    """A task's data by the names of its fields; without validation data, none."""
    given = {"train": train, "test": test, "validation": validation}
    return {name: data_of(data) for name, data in given.items() if data is not None}


def _narrow(leaf: Any) -> Any:  # noqa: ANN401
    """Numbers as libraries give them to a model: float32 in place of numpy's float64."""
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(leaf, dtype=np.float32 if leaf.dtype == np.float64 else None))
    return leaf


def samples_in(batch: Batch) -> int:
    """How many samples a batch has: the length of its first tensor."""
    return len(next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim))
