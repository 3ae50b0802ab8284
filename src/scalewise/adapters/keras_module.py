"""A Keras model as a module that the engine can train: what training changes besides parameters is in buffers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.errors import TaskError
from scalewise.extras import require

os.environ.setdefault("KERAS_BACKEND", "torch")
require("keras")

import keras  # noqa: E402

NORMS: dict[int, type[_BatchNorm]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class KerasModule(nn.Module):
    """A Keras model whose weights are named by their place in it, `3/kernel`, not by how many models came before it.

    Keras holds all of its state in parameters; here batch normalisation's moving statistics are buffers of torch's own
    layers, which take the place of Keras's. Random layers draw from torch's generator, which the engine seeds for every
    step and worker, and not from counters of their own.
    """

    def __init__(self, model: Any, sample: Any) -> None:  # noqa: ANN401
        """Take over a model; its weights are shared, not copied.

        Arguments:
            model: the Keras model.
            sample: inputs of one sample, to build it with.
        """
        super().__init__()
        if not model.built:
            model(sample)
        self._hidden = [model]  # in a list, so that torch does not take it for a part
        for number, layer in enumerate(_norm_layers(model)):
            self._replace(layer, f"norm{number}")
        for name, variable in weight_names(model).items():
            if name.startswith("norm"):
                continue
            if variable.trainable:
                self.register_parameter(name, variable._value)
            else:
                variable._value = variable._value.detach()
                self.register_buffer(name, variable._value)
        known = {id(variable) for variable in model.weights}
        self._seeds = [variable for variable in model.variables if id(variable) not in known]

    @property
    def keras_model(self) -> Any:  # noqa: ANN401
        """The Keras model itself."""
        return self._hidden[0]

    def forward(self, inputs: Any) -> Any:  # noqa: ANN401
        """The model's output."""
        if self.training:
            for state in self._seeds:
                state.assign(torch.randint(2**31, tuple(state.shape)))
        return self.keras_model(inputs, training=self.training)

    def _replace(self, layer: Any, name: str) -> None:  # noqa: ANN401
        """Let torch's batch norm do what a layer of Keras does, with the same weights and statistics."""
        norm: Any = NORMS[layer.input_spec.ndim](
            layer.moving_mean.shape[0], eps=layer.epsilon, momentum=1 - layer.momentum
        )
        for kind, there, variable in (("weight", layer.scale, layer.gamma), ("bias", layer.center, layer.beta)):
            if there:
                setattr(norm, kind, variable._value)
            else:
                getattr(norm, kind).requires_grad_(False)
        for kind, variable in (("running_mean", layer.moving_mean), ("running_var", layer.moving_variance)):
            variable._value = variable._value.detach()
            setattr(norm, kind, variable._value)
        self.add_module(name, norm)

        def call(inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Tensor:
            if mask is not None:
                raise TaskError("batch normalisation here cannot leave masked positions out, got a mask; remove it")
            return getattr(self, name)(inputs.movedim(layer.axis, 1)).movedim(1, layer.axis)

        object.__setattr__(layer, "call", call)


def _norm_layers(model: Any) -> list[Any]:  # noqa: ANN401
    """The layers that take statistics of the batch."""
    layers = [one for one in model._flatten_layers() if isinstance(one, keras.layers.BatchNormalization)]
    if any(layer.renorm for layer in layers):
        raise TaskError(
            "batch normalisation with renorm=True cannot be had here, got a layer with it; use renorm=False"
        )
    return [layer for layer in layers if layer.trainable]


def weight_names(model: Any) -> dict[str, Any]:  # noqa: ANN401
    """The model's weights by the names that they have in a run folder."""
    statistics = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
    found = {f"{number}/{variable.name}": variable for number, variable in enumerate(model.weights)}
    places = {id(variable): name for name, variable in found.items()}
    for number, layer in enumerate(_norm_layers(model)):
        for variable in layer.weights:
            del found[places[id(variable)]]
            found[f"norm{number}.{statistics[variable.name]}"] = variable
    return found
