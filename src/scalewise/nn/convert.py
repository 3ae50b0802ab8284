"""From batch norm of one kind to another, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.errors import TaskError

Norm = TypeVar("Norm", bound=_BatchNorm)


def convert(
    model: nn.Module, kinds: Mapping[type[nn.Module], type[Norm]], build: Callable[[_BatchNorm, type[Norm]], Norm]
) -> nn.Module:
    """The same model with every layer whose type is in `kinds` built anew; parameters, buffers, names, hooks are kept.

    A layer that stands in several places stays one layer.
    """
    for module in model.modules():  # before anything changes
        if isinstance(module, _BatchNorm) and type(module) not in kinds:
            raise TaskError(
                f"batch norm must be one of {', '.join(kind.__name__ for kind in kinds)} to be converted, got "
                f"{type(module).__name__}; put one of these in its place first"
            )
    found: dict[nn.Module, nn.Module] = {}

    def converted(module: nn.Module) -> nn.Module:
        if module not in found:
            found[module] = module  # a module may hold itself
            kind = kinds.get(type(module))
            if kind is not None:
                assert isinstance(module, _BatchNorm)
                found[module] = _rebuilt(module, build(module, kind))
            else:
                for name, child in [*module._modules.items()]:
                    if child is not None:
                        module._modules[name] = converted(child)
        return found[module]

    return converted(model)


def _rebuilt(module: _BatchNorm, norm: Norm) -> Norm:
    """The new layer with the tensors and hooks of the old one."""
    norm.train(module.training)
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        setattr(norm, name, value)
    for name, value in vars(module).items():
        if "_hook" in name:
            setattr(norm, name, value)
    return norm
