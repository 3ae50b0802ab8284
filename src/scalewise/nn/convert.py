"""From batch norm of one kind to another, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = TypeVar("Norm", bound=_BatchNorm)


def convert(
    model: nn.Module, kinds: Mapping[type[nn.Module], type[Norm]], build: Callable[[_BatchNorm, type[Norm]], Norm]
) -> nn.Module:
    """The same model with every layer whose type is in `kinds` built anew; parameters, buffers and names are kept."""
    kind = kinds.get(type(model))
    if kind is None:
        for name, child in model.named_children():
            setattr(model, name, convert(child, kinds, build))
        return model
    assert isinstance(model, _BatchNorm)
    norm = build(model, kind)
    norm.train(model.training)
    for name, value in (*model._parameters.items(), *model._buffers.items()):
        setattr(norm, name, value)
    return norm
