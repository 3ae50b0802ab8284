"""`horovod.keras` for Keras 3 on torch: change the import, start with torchrun.

import scalewise.horovod.keras as hvd
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalewise.extras import require
from scalewise.horovod import processes as _processes
from scalewise.horovod.processes import *  # noqa: F403
from scalewise.horovod.processes import ProcessSet, global_process_set
from scalewise.horovod.torch import Adasum, Average, Compression, Max, Min, Product, Sum, collectives
from scalewise.horovod.torch.compression import Compressor
from scalewise.horovod.torch.functions import allgather_object, broadcast_object, overwrite
from scalewise.horovod.wire import ReduceOp

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is first imported
require("keras")

import keras  # noqa: E402

if keras.backend.backend() != "torch":
    raise ImportError(
        f"scalewise.horovod.keras needs Keras on torch, got the backend {keras.backend.backend()!r}; set "
        f"KERAS_BACKEND=torch before keras is first imported"
    )

from scalewise.horovod.keras import callbacks, elastic  # noqa: E402


class Averaging:
    """What `DistributedOptimizer` puts before the script's own class of optimizer."""

    def apply(self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over processes, then apply them; with several passes a step, only after the last."""
        how: _Manner = self._scalewise  # type: ignore[attr-defined]
        variables = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        summed = how.summed(grads)
        if summed is not None:
            how.reduce([*zip(summed, variables, strict=True)])
            super().apply(summed, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:  # noqa: ANN401
        """Leave this variable's gradient to this process."""
        self._scalewise.local[id(var)] = var  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """An optimizer like this one, distributed, too."""
        optimizer = super().from_config(config, custom_objects)  # type: ignore[misc]
        object.__setattr__(optimizer, "_scalewise", _Manner(*cls._options))  # type: ignore[attr-defined]
        return optimizer


@dataclass
class _Manner:
    """How an optimizer's gradients are reduced, and those of passes before the last."""

    compression: Compressor
    op: ReduceOp
    predivide: float
    passes: int
    mean: bool
    process_set: ProcessSet
    scale_local: bool
    local: dict[int, Any] = field(default_factory=dict)  # variables whose gradients stay here
    _sums: list[Tensor | None] | None = None
    _count: int = 0

    def summed(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """The sum over the passes of a step; None while passes are to come."""
        if self.passes == 1:
            return gradients
        if self._sums is None:
            self._sums = [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)
        self._count += 1
        if self._count < self.passes:
            return None
        done, self._sums, self._count = self._sums, None, 0
        for total in done if self.mean else ():
            if total is not None:
                total.div_(self.passes)
        return done

    def reduce(self, pairs: Sequence[tuple[Tensor | None, Any]]) -> None:
        """Reduce gradients in place; those that stay here are divided alone, as if the others had none."""
        if self.process_set.size() == 1:
            return
        present = [(gradient, id(variable)) for gradient, variable in pairs if gradient is not None]
        gradients = [gradient for gradient, variable in present if variable not in self.local]
        if self.scale_local:
            for gradient in (gradient for gradient, variable in present if variable in self.local):
                gradient.div_(self.process_set.size())
        packed = [self.compression.compress(gradient) for gradient in gradients]
        collectives.grouped_allreduce_(
            [tensor for tensor, _ in packed], None, None, self.op, 1 / self.predivide, self.predivide, self.process_set
        )
        for gradient, (tensor, context) in zip(gradients, packed, strict=True):
            if tensor is not gradient:
                gradient.copy_(self.compression.decompress(tensor, context))


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,  # noqa: ANN401
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.Average,
    num_groups: int = 0,
    groups: object = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # noqa: ANN401
    """The Keras optimizer, which from now on averages its gradients over processes before it applies them.

    It stays an instance of its class and keeps its state. All gradients of a step go together, so groups and devices
    change nothing.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer must be a Keras optimizer, got a {type(optimizer).__name__}")
    if gradient_predivide_factor != 1.0 and op != ReduceOp.Average:
        raise ValueError(f"gradient_predivide_factor needs op=hvd.Average, got op={ReduceOp(op).name}")
    if isinstance(optimizer, Averaging):
        raise ValueError("the optimizer is distributed already; wrap it once")
    kind = type(optimizer)
    same_name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # models are saved by it
    passes, mean = backward_passes_per_step, average_aggregated_gradients
    how = (compression, op, gradient_predivide_factor, passes, mean, process_set, scale_local_gradients)
    object.__setattr__(optimizer, "_scalewise", _Manner(*how))
    optimizer.__class__ = type(kind.__name__, (Averaging, kind), {**same_name, "_options": how})
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any,  # noqa: ANN401
    *arguments: Any,  # noqa: ANN401
    local_layers: Any = None,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A `DistributedOptimizer` that leaves the gradients of some built layers to each process."""
    wrapped = DistributedOptimizer(optimizer, *arguments, **options)
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    for variable in (variable for layer in layers for variable in layer.trainable_variables):
        wrapped.register_local_var(variable)
    return wrapped


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite Keras variables with one process's."""
    overwrite([variable.value for variable in variables], root_rank, process_set)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:  # noqa: ANN401
    """Overwrite a model's variables, and its optimizer's, with one process's."""
    if model is None:
        raise ValueError(
            "Keras 3 keeps no list of all variables; call broadcast_global_variables(root_rank, model), or give fit() "
            "callbacks.BroadcastGlobalVariablesCallback(root_rank)"
        )
    broadcast_variables(callbacks.variables_of(model, getattr(model, "optimizer", None)), root_rank)


def _tensor(value: Any) -> Tensor:  # noqa: ANN401
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


def allreduce(
    value: Any,  # noqa: ANN401
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compressor = Compression.none,
) -> Any:  # noqa: ANN401
    """A number or array reduced over processes."""
    factors = prescale_factor, postscale_factor
    return collectives.allreduce(_tensor(value), average, name, compression, op, *factors).cpu().numpy()


def allgather(value: Any, name: str | None = None) -> Any:  # noqa: ANN401
    """Every process's rows, in process order."""
    return collectives.allgather(_tensor(value), name).cpu().numpy()


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:  # noqa: ANN401
    """One process's number or array."""
    return collectives.broadcast(_tensor(value), root_rank, name).cpu().numpy()


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.Average) -> Any:  # noqa: ANN401
    """This process's rows of an array reduced over processes."""
    return collectives.reducescatter(_tensor(value), name, op=op).cpu().numpy()


def load_model(
    filepath: Any,  # noqa: ANN401
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Compressor = Compression.none,
) -> Any:  # noqa: ANN401
    """A saved model, its optimizer distributed again."""
    known = {kind.__name__: kind for kind in custom_optimizers or []} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None and not isinstance(model.optimizer, Averaging):
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _processes.__all__
