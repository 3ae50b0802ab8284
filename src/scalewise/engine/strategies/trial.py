"""A model in parts, tried on one micro batch before training: it must do what the whole one does.

Whether a model can be split cannot be seen from its layers alone: what its `forward` or the task's step does with them,
beside calling one after another, decides. So both are tried, with the same random numbers, and compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalewise.engine import streams
from scalewise.engine.feed import Feed
from scalewise.engine.strategies.protocol import Setup
from scalewise.engine.workers import numbers_of, precision
from scalewise.errors import ScalewiseError, TaskError
from scalewise.tasks.task import Batch

CLOSE = 0.05  # far above what another order of sums does, also in bf16, and far below what another model does
TINY = 1e-300


@dataclass(frozen=True)
class Tried:
    """The loss of a micro batch (its sum over samples), and every output of the model on the way."""

    loss: float
    outputs: list[Tensor]


def example(setup: Setup) -> Batch:
    """The first micro batch, from a feed of its own."""
    return Feed(setup.task, setup.recipe, setup.samples, setup.cuts, setup.team.device, range(1), 0).batch(0, 0, 0)


def tried(setup: Setup, module: nn.Module, batch: Batch) -> Tried:
    """What the task's step makes of a micro batch, with layers as they are in evaluation."""
    outputs: list[Tensor] = []
    trains = module.training

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        outputs.extend([output.detach()] if isinstance(output, Tensor) else [])

    module.eval()
    handle = module.register_forward_hook(keep)
    try:
        with precision(setup.recipe, setup.team.device), streams.undisturbed():
            streams.seed_everything(streams.key("trial", setup.recipe.seed), setup.team.device)
            loss = setup.task.evaluate(module, batch, setup.recipe.label_smoothing)
    finally:
        handle.remove()
        module.train(trains)
    return Tried(float(numbers_of(loss)[1][0]), outputs)


def check_parts(setup: Setup, whole: Tried, parts: nn.Module, batch: Batch, needed: str) -> None:
    """Refuse parts that do not do what the whole did; `needed` says what would."""
    try:
        found = tried(setup, parts, batch)
    except ScalewiseError:
        raise
    except Exception as error:  # whatever happens in a forward that was not written for parts
        raise TaskError(f"{needed}; split, it fails with {first_line(error)}: use --parallel data") from error
    distance = _distance(whole, found)
    if distance > CLOSE:
        raise TaskError(f"{needed}; split, it computes something else (off by {distance:.0%}): use --parallel data")


def _distance(whole: Tried, found: Tried) -> float:
    """The largest relative distance of outputs and losses, as vectors; what is not finite in both says nothing."""
    pairs = [*zip(whole.outputs, found.outputs, strict=False), (torch.tensor(whole.loss), torch.tensor(found.loss))]
    if len(whole.outputs) != len(found.outputs) or any(first.shape != second.shape for first, second in pairs):
        return 1.0
    wide = [(first.double().nan_to_num(), second.double().nan_to_num()) for first, second in pairs]
    return max(float((first - second).norm() / first.norm().clamp(min=TINY)) for first, second in wide)


def first_line(error: Exception) -> str:
    """What an error is, to be quoted within a sentence.

    >>> first_line(RuntimeError("no such size!\\nSee the manual."))
    'RuntimeError: no such size'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.!')}" if lines else type(error).__name__
