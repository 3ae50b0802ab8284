"""What is learned: model factory, data, loss and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.errors import TaskError
from scalewise.recipe import Recipe

# A tree (tuple, list, dict) of tensors whose first dimension counts samples, or a map-style Dataset.
Data = Any
Batch = Any
Metric = Callable[[Tensor, Tensor], Tensor]
StepFunction = Callable[[nn.Module, Batch], "Loss"]
Augment = Callable[[Batch, Tensor], Batch]
Number = Tensor | float


@dataclass(frozen=True)
class Loss:
    """A loss as a sum and its weight (samples, tokens, …), so that averages over workers come out right.

    `metrics` holds further (sum, weight) pairs by name.
    """

    total: Tensor
    weight: Tensor | float
    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.total, Tensor) or self.total.ndim:
            got = f"shape {tuple(self.total.shape)}" if isinstance(self.total, Tensor) else type(self.total).__name__
            raise TaskError(f"a Loss needs its total as a tensor of one number (shape ()), got {got}; sum it first")

    def root(self, unit: float) -> Tensor:
        """Where backward starts: total ÷ unit."""
        return self.total * (1 / unit)

    def pairs(self) -> dict[str, tuple[Number, Number]]:
        """(sum, weight) of the loss and of every metric."""
        known = {"loss": (self.total, self.weight), **self.metrics}
        return {name: (_read(total), _read(weight)) for name, (total, weight) in known.items()}


@dataclass(slots=True)
class MeanLoss:
    """A loss and metrics known by their means over `samples`.

    Starting backward at the mean makes one worker's bytes those of `mean.backward()`.
    """

    mean: Tensor
    samples: int
    metrics: dict[str, Number]

    def root(self, unit: float) -> Tensor:
        """Where backward starts: the sum over samples ÷ unit, which is the mean when unit is the samples."""
        return self.mean if self.samples == unit else self.mean * (self.samples / unit)

    def pairs(self) -> dict[str, tuple[Number, Number]]:
        """(sum, weight) of the loss and of every metric."""
        known = {"loss": self.mean, **self.metrics}
        return {name: (_read(mean) * self.samples, self.samples) for name, mean in known.items()}


def _read(value: Number) -> Number:
    """A plain number where reading it does not wait, that is on a CPU; else a tensor of one."""
    if not isinstance(value, Tensor):
        return value
    return float(value.detach()) if value.is_cpu else value.detach()


@dataclass(frozen=True)
class Origin:
    """Where a task was loaded from, so that another process can load it again: arguments of `load_task`."""

    spec: str
    settings: tuple[str, ...]
    data: Path | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned.

    Simple form: `loss(model(x), y)` over data `(x, y)`, the loss a mean over samples. General form: `step(model,
    batch)` returns a `Loss`; a batch is any tree of tensors.

    Arguments:
        model: makes the model; called once per process, seeded.
        train, test: trees of tensors (or numpy arrays) whose first dimension counts samples, or map-style data sets.
        validation: likewise; where it is missing and something is selected by it, a tenth of train is held out.
        loss: the simple form, a mean over samples.
        step: the general form; exactly one of loss and step is given.
        metrics: functions of (output, target), means over samples; the first is the one that counts, unless `metric`
            names another; `higher_is_better` says which way.
        recipe: the task's own single-worker recipe, where flags and auto start from.
        augment: changes a training batch; gets one 64-bit key per sample, from (seed, epoch, sample).
        buffers: buffers that training changes: "mean" (averaged over workers) or "same" (equal on all).
    """

    model: Callable[[], nn.Module]
    train: Data
    test: Data
    validation: Data | None = None
    loss: Callable[..., Tensor] | None = None
    step: StepFunction | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    metric: str | None = None
    higher_is_better: bool = True
    recipe: Recipe = field(default_factory=Recipe)
    augment: Augment | None = None
    buffers: Mapping[str, Literal["mean", "same"]] = field(default_factory=dict)
    name: str = "task"
    # set by `load_task` alone: a copy with other fields is another task, which `dataclasses.replace` leaves without it
    origin: Origin | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise TaskError(
                "a task's model must be a function that makes the model, got a model; write model=lambda: …"
            )
        if (self.loss is None) == (self.step is None):
            raise TaskError(
                f"a task needs either loss (simple form) or step (general form), got "
                f"{'both' if self.loss else 'neither'}; pass exactly one"
            )
        if getattr(self.loss, "reduction", "mean") == "sum":
            raise TaskError(
                "the task's loss must be a mean over samples, got one with reduction='sum'; leave reduction out, or "
                "use the general form with step="
            )
        if self.metric is None:
            object.__setattr__(self, "metric", next(iter(self.metrics), "loss"))
        if self.metric == "loss":  # whatever else is reported, training lowers it
            object.__setattr__(self, "higher_is_better", False)

    @property
    def weight_is_samples(self) -> bool:
        """Whether a batch's weight is known without running the model."""
        return self.step is None and not _weighs_classes(self.loss)

    def smooths_labels(self) -> bool:
        """Whether the loss takes `label_smoothing`."""
        return self.loss is not None and "label_smoothing" in inspect.signature(self.loss).parameters

    def evaluate(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Loss | MeanLoss:
        """Loss and metrics of one batch."""
        if self.step is not None:
            loss = self.step(model, batch)
            if not isinstance(loss, Loss):
                raise TaskError(f"the task's step must return scalewise.Loss(total, weight), got {type(loss).__name__}")
            return loss
        assert self.loss is not None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            got = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise TaskError(
                f"the simple form of a task needs data of two parts, (inputs, target), got {got}; use the "
                f"general form with step="
            )
        inputs, target = batch
        output = model(inputs)
        mean = (
            self.loss(output, target, label_smoothing=label_smoothing) if label_smoothing else self.loss(output, target)
        )
        if mean.ndim:
            raise TaskError(
                f"the task's loss must return one number, its mean over samples, got shape {tuple(mean.shape)}; "
                f"remove reduction='none' or use the general step form"
            )
        with torch.no_grad():
            metrics: dict[str, Number] = {name: metric(output, target) for name, metric in self.metrics.items()}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TaskError(
                    f"the task's metric {name} must return one number, its mean over samples, got shape "
                    f"{tuple(value.shape)}; end it with .mean()"
                )
        if not _weighs_classes(self.loss):
            return MeanLoss(mean, len(target), metrics)
        weight = _divisor(self.loss, target)
        return Loss(
            mean * weight, weight, {name: (value * len(target), len(target)) for name, value in metrics.items()}
        )


def _weighs_classes(loss: Callable[..., Tensor] | None) -> TypeGuard[nn.CrossEntropyLoss | nn.NLLLoss]:
    """Whether a loss divides by the weights of the classes in a batch, or leaves some out: not by its samples."""
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and (loss.weight is not None or loss.ignore_index >= 0)


def _divisor(loss: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor) -> Number:
    """What torch divides such a loss by; with probabilities as targets it is the samples after all."""
    if target.is_floating_point():
        return len(target)
    counted = target[target != loss.ignore_index]
    return counted.numel() if loss.weight is None else loss.weight[counted].sum()


def classifier(
    name: str,
    model: Callable[[], nn.Module],
    data: tuple[Data, Data],
    recipe: Recipe,
    augment: Augment | None = None,
) -> Task:
    """A task with cross-entropy and accuracy on (train, test) data, for a model that gives a logit per class."""
    train, test = data
    return Task(
        name=name,
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": accuracy},
        recipe=recipe,
        augment=augment,
    )


def convolution(inputs: int, outputs: int, bn: bool, bias: bool = True) -> list[nn.Module]:
    """A 3×3 convolution, its batch norm if it has one, and a ReLU."""
    norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if bn else []
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias), *norm, nn.ReLU()]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose largest logit (or the sign of a single one) is right.

    >>> accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])).item()
    0.5
    """
    single = output.ndim == 1 or output.shape[1] == 1
    guess = output.flatten() > 0 if single else output.argmax(1)
    wide = torch.float32 if output.device.type == "mps" else torch.float64  # MPS has no float64
    return (guess == target.view_as(guess)).mean(dtype=wide)
