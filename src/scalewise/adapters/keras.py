"""Keras 3 on torch: a callback that watches `model.fit`, and a task made of a compiled Keras model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from scalewise.adapters.common import (
    WAY_OUT,
    Shell,
    Watching,
    noise_values,
    parts_of,
    samples_in,
    sgd_fields,
)
from scalewise.engine.data.samples import open_samples
from scalewise.errors import RunFolderError, TaskError, UsageError
from scalewise.extras import require
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch, Data, Loss, Task
from scalewise.watch.watcher import Watcher

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is first imported
require("keras")

import keras  # noqa: E402

if keras.backend.backend() != "torch":
    raise UsageError(
        f"Keras must run on torch here, got {keras.backend.backend()}; set KERAS_BACKEND=torch before Keras is imported"
    )

EPOCHS = 5.0


class Scalewise(Watching, keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not there for a type checker
    """Watches `model.fit`: `model.fit(…, callbacks=[Scalewise()])`.

    At the end the noise scale stands in the history, and the findings are printed; `scalewise doctor <out>` shows them
    again.
    """

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Begin to watch, before the first step."""
        self._shell = Shell(self.model, "call")
        self._update = _Update(self.model.optimizer, [one.value for one in self.model.trainable_variables])
        self.watcher = Watcher(self._shell, self._update, self._out, show=self._show)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Note the noise scale, print what was found."""
        if self.watcher is None:
            return
        self.watcher.close()
        self._shell.remove()
        self._update.remove()
        values = noise_values(self.watcher)
        self.model.history.history.update({name: [value] for name, value in values.items()})


class _Update(Optimizer):
    """A Keras optimizer's updates as steps of a torch optimizer, so that hooks see them; it changes nothing itself."""

    def __init__(self, optimizer: Any, parameters: list[Tensor]) -> None:  # noqa: ANN401
        super().__init__(parameters, {"lr": 0.0})
        self._keras, self._apply = optimizer, optimizer.apply
        object.__setattr__(optimizer, "apply", self._apply_and_tell)
        self.name = type(optimizer).__name__

    def _apply_and_tell(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        self._apply(*arguments, **named)
        self.param_groups[0]["lr"] = float(self._keras.learning_rate)
        self.step()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Call the hooks."""

    def remove(self) -> None:
        """Give the optimizer its method back."""
        object.__delattr__(self._keras, "apply")


def task(
    model: Callable[[], keras.Model],
    train: Data,
    test: Data,
    validation: Data | None = None,
    *,
    worker_batch: int = 32,
    epochs: float = EPOCHS,
    recipe: Recipe | None = None,
    **fields: Any,  # noqa: ANN401  (checked by Task)
) -> Task:
    """A task that trains a compiled Keras model by its own losses, metrics and optimizer.

    >>> task(make_model, (x, y), (test_x, test_y), worker_batch=128, epochs=12)  # doctest: +SKIP

    Metrics that are means over samples (accuracies, errors) are taken; those that are not, such as AUC, are left out.
    Batch normalisation becomes torch's, with the same weights, so that `--batch-norm` means what it says; its moving
    variance is torch's, n ÷ (n − 1) times that of Keras. `load` brings trained weights back.

    Arguments:
        model: makes the compiled model.
        train, test, validation: (inputs, targets) or (inputs, targets, sample weights), of arrays or tensors.
        worker_batch, epochs: as `fit` takes them.
        recipe: in place of what the compiled optimizer says.
        fields: further fields of `sw.Task`.
    """
    built = model()
    if built.optimizer is None or not built.compiled:
        raise TaskError("a task needs a compiled Keras model, got one without loss and optimizer; call compile() on it")
    data = parts_of(train, test, validation)
    first = torch.zeros(1, dtype=torch.long)  # a model may not know its shapes yet, nor its metrics' names
    inputs, target, *_ = open_samples(data["train"], 0, "training").fetch(first, first)
    if recipe is None:
        recipe = recipe_of(built.optimizer, worker_batch, epochs)
    metric, higher = _metric_that_counts(built, inputs, target)
    known: dict[str, Any] = {"name": "keras", "recipe": recipe, "metric": metric, "higher_is_better": higher}
    return Task(model=lambda: KerasModule(model(), inputs), step=_step, **data, **(known | fields))


@torch.no_grad()
def _metric_that_counts(model: Any, inputs: Any, target: Any) -> tuple[str, bool]:  # noqa: ANN401
    """The name of the first compiled metric that is a mean, and whether more of it is better; else the loss."""
    compiled = model._compile_metrics
    if compiled is not None:
        compiled.update_state(target, model(inputs, training=False))
        for name, metric in _means(compiled).items():
            return name, getattr(metric, "_direction", "up" if "acc" in name.lower() else "down") == "up"
    return "loss", False


def _means(compiled: Any) -> dict[str, Any]:  # noqa: ANN401
    """The compiled metrics that are means, by Keras's names for them: with several outputs these begin with its."""
    found: dict[str, Any] = {}
    for group in filter(None, (*compiled._flat_metrics, *compiled._flat_weighted_metrics)):
        prefix = f"{group.output_name}_" if group.output_name else ""
        found |= {prefix + one.name: one for one in group.metrics if isinstance(one, keras.metrics.Mean)}
    return found


def _step(module: nn.Module, batch: Batch) -> Loss:
    inputs, target, sample_weight = (*batch, None)[:3]
    output = module(inputs)
    model: Any = module.keras_model
    mean = model.compute_loss(x=inputs, y=target, y_pred=output, sample_weight=sample_weight, training=module.training)
    count = samples_in(batch)
    mask = getattr(output, "_keras_mask", None)
    weight = count if mask is None else mask.sum()
    return Loss(mean * weight, weight, _metrics(model, target, output))


@torch.no_grad()
def _metrics(model: Any, target: Any, output: Any) -> dict[str, tuple[Tensor, float]]:  # noqa: ANN401
    """(sum, weight) of the compiled metrics that are means."""
    compiled = model._compile_metrics
    if compiled is None:
        return {}
    compiled.reset_state()
    compiled.update_state(target, output)
    return {name: (one.total.value.detach().clone(), float(one.count.value)) for name, one in _means(compiled).items()}


def recipe_of(optimizer: Any, worker_batch: int, epochs: float) -> Recipe:  # noqa: ANN401
    """The single-worker recipe of a compiled SGD (with momentum or Nesterov's), Adam or AdamW."""
    settings = optimizer.get_config()
    name, lr = type(optimizer).__name__.lower(), settings["learning_rate"]
    refused = [key for key in ("clipnorm", "clipvalue", "use_ema", "amsgrad") if settings.get(key)]
    if name not in ("sgd", "adam", "adamw") or not isinstance(lr, float | int) or refused:
        raise TaskError(
            f"a recipe can be read from Keras's SGD, Adam and AdamW with a number as learning rate and without "
            f"clipnorm, clipvalue, use_ema and amsgrad, got {[type(optimizer).__name__, lr, *refused]}; {WAY_OUT}"
        )
    lr = float(f"{lr:.7g}")  # Keras holds it in float32
    fields: dict[str, Any] = {"worker_batch": worker_batch, "epochs": float(epochs), "lr": lr}
    fields["weight_decay"] = float(settings.get("weight_decay") or 0.0)
    fields["clip_norm"] = settings.get("global_clipnorm")
    if name == "sgd":
        fields |= sgd_fields(settings)
    else:
        fields |= {"optimizer": name, "beta1": settings["beta_1"], "beta2": settings["beta_2"]}
        fields["epsilon"] = settings["epsilon"]
    return Recipe(**fields)


def load(model: keras.Model, run: str | Path) -> keras.Model:
    """Give a Keras model the trained weights of a run folder.

    >>> load(make_model(), "runs/my_task-20261116-101500")  # doctest: +SKIP
    """
    path = Path(run) / "model.safetensors"
    if not path.is_file():
        raise RunFolderError(f"{run} must be the folder of a finished run, found no model.safetensors; check the path")
    stored, weights = load_file(path), weight_names(model)
    wanted = {name: tuple(variable.shape) for name, variable in weights.items()}
    found = {name: tuple(stored[name].shape) for name in wanted if name in stored}
    if wanted != found:
        wrong = next(name for name in wanted if wanted[name] != found.get(name))
        raise TaskError(
            f"{path} must hold the weights of this model, got {found.get(wrong, 'none')} for {wrong} of shape "
            f"{wanted[wrong]}; build the model that was trained"
        )
    for name, variable in weights.items():
        variable.assign(stored[name])
    return model


NORMS: dict[int, type[_BatchNorm]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class KerasModule(nn.Module):
    """A Keras model whose weights are named by their place in it, `3/kernel`, not by how many models came before it.

    Keras holds all of its state in parameters; here batch normalisation's moving statistics are buffers of torch's own
    layers, which take the place of Keras's. Random layers draw from torch's generator, which the engine seeds for every
    step and worker, and not from counters of their own.
    """

    def __init__(self, model: Any, sample: Any) -> None:  # noqa: ANN401
        """Take over a model, built with the inputs of one sample; its weights are shared, not copied."""
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
        raise TaskError("batch normalisation with renorm=True is not supported, got a layer with it; use renorm=False")
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
