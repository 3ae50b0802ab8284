"""A task's own step, cut where it calls the model: what goes in on the first stage, what comes out on the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor, nn

from scalewise.engine.strategies.protocol import Setup
from scalewise.engine.workers import added, numbers_of, precision
from scalewise.errors import TaskError
from scalewise.tasks.task import Batch, Number, Task

NEEDED = "--parallel pipeline needs a task that calls the model once, with one tensor"


class _Called(Exception):
    """The model was called."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def _answering(model: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """The context in which a call of the model is answered by `forward`; all else that it has is there as ever."""
    own = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _catch(*arguments: object, **named: object) -> NoReturn:
    """Leave the task's step with what it calls the model with."""
    raise _Called((*arguments, *named.values()))


def model_input(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """What a task calls the model with."""
    try:
        with _answering(model, _catch):
            task.evaluate(model, batch)
    except _Called as call:
        if len(call.arguments) == 1 and isinstance(call.arguments[0], Tensor):
            return call.arguments[0]
        kinds = ", ".join(type(argument).__name__ for argument in call.arguments) or "nothing"
        raise TaskError(f"{NEEDED}; got {kinds}: pass a single tensor, or use --parallel fsdp") from None
    raise TaskError(f"{NEEDED}; its step calls a part of the model, or nothing of it: use --parallel data")


@contextmanager
def given(model: nn.Module, output: Tensor) -> Iterator[None]:
    """The context in which the model, called once, gives this output."""
    outputs = [output]

    def answer(*arguments: object, **named: object) -> Tensor:
        if not outputs:
            raise TaskError(f"{NEEDED}; its step called it twice: use --parallel fsdp")
        return outputs.pop()

    with _answering(model, answer):
        yield


class LastStage:
    """The loss of one worker's micro batches, from the pipeline's outputs."""

    def __init__(self, setup: Setup, batches: list[Batch]) -> None:
        self._setup, self._batches = setup, batches
        self.names: list[str] = []
        self.numbers: list[Number] = []
        self.weights: list[Number] = []

    def root(self, output: Tensor, micro: int) -> Tensor:
        """Where backward starts; the numbers are kept."""
        task, recipe, model = self._setup.task, self._setup.recipe, self._setup.model.module
        with precision(recipe, self._setup.team.device), given(model, output):
            loss = task.evaluate(model, self._batches[micro], recipe.label_smoothing)
        self.names, row = numbers_of(loss)
        self.numbers = added(self.numbers, row)
        self.weights.append(row[1])
        return loss.root(recipe.worker_batch)
