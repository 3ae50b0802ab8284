"""A method of somebody's object as a module of its own, so that hooks see its calls."""

from __future__ import annotations

import functools
from typing import Any

import torch  # noqa: F401  (for the example)
from torch import nn


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
