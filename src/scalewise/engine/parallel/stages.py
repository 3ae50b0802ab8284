"""A model as a chain of layers, cut into stages of about equal cost.

A chain is what `stages()` of the model returns, the layers of an nn.Sequential, or the children of any other model in
the order in which they were registered. Whether a chain is the model is tried on a batch: both must give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scalewise.errors import PlacementError, TaskError
from scalewise.tasks.task import Batch, Task

NEEDED = (
    "--parallel pipeline needs a model that is a chain of layers: an nn.Sequential, or one with a method stages() that "
    "returns its layers in order, each called with what the one before returned"
)


@torch.no_grad()
def split(module: nn.Module, example: Tensor, count: int) -> tuple[list[nn.Sequential], list[Tensor]]:
    """The model as `count` stages that share its parameters, and what goes into each (and out of the last).

    `example`, a micro batch that it takes, shows whether the chain is the model, and what each layer costs.
    """
    module.eval()
    units = _units(_chain(module, example))
    if len(units) < count:
        raise PlacementError(
            f"--parallel pipeline needs a layer with trainable parameters for every process, got {len(units)} "
            f"layer{'' if len(units) == 1 else 's'} for {count} processes; lower --processes to {len(units)} or less"
        )
    bounds = balanced(_costs(units, example), count)
    stages = [nn.Sequential(*(layer for unit in units[start:stop] for layer in unit)) for start, stop in bounds]
    owners = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    if len(set().union(*owners)) < sum(map(len, owners)):
        raise TaskError(f"{NEEDED}; two stages share a parameter: give each its own, or lower --processes")
    flows = [example]
    for stage in stages:
        flows.append(stage(flows[-1]))
    for stage in stages:  # not before: stages may share a layer without parameters
        stage.train()
    return stages, flows


def _chain(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """The layers that make the model when they are called in turn."""
    own = getattr(model, "stages", None)
    children = [*model] if isinstance(model, nn.Sequential) else [*model.children()]  # a layer may come twice
    layers = _flattened([*own()] if callable(own) else children)
    if not all(isinstance(layer, nn.Module) for layer in layers):
        raise TaskError(f"{NEEDED}; its stages() returns something other than modules: wrap them in nn.Module")
    held = {id(tensor) for layer in layers for _, tensor in named(layer)}
    missing = [name for name, tensor in named(model) if id(tensor) not in held]
    kind = type(model).__name__
    if missing:
        raise TaskError(f"{NEEDED}; the layers of {kind} do not hold {missing[0]!r}: add stages() to it")
    expected = model(example)
    try:
        found = nn.Sequential(*layers)(example)
    except Exception:  # whatever happens when layers are called that were not made to be called in turn
        found = None
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or not torch.equal(found, expected):
        raise TaskError(
            f"{NEEDED}; the children of {kind}, called in turn, do not give what it gives: add stages() to it"
        )
    return layers


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module."""
    return [*module.named_parameters(), *module.named_buffers()]


def _flattened(layers: Sequence[nn.Module]) -> list[nn.Module]:
    return [inner for layer in layers for inner in (_flattened([*layer]) if type(layer) is nn.Sequential else [layer])]


def _units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Layers with parameters, each with those without that follow it; the first also with those before."""
    units: list[list[nn.Module]] = []
    before: list[nn.Module] = []
    for layer in layers:
        if any(parameter.requires_grad for parameter in layer.parameters()):
            units.append([*before, layer])
            before = []
        elif units:
            units[-1].append(layer)
        else:
            before.append(layer)
    return units


def _costs(units: list[list[nn.Module]], example: Tensor) -> list[float]:
    """Each unit's share of the operations and of the parameters, added: a stage takes both time and memory."""
    operations, parameters = [], []
    for unit in units:
        stage = nn.Sequential(*unit)
        with FlopCounterMode(display=False) as counter:
            example = stage(example)
        operations.append(counter.get_total_flops())
        parameters.append(sum(parameter.numel() for parameter in stage.parameters()))
    work, size = max(1, sum(operations)), sum(parameters)
    return [a / work + b / size for a, b in zip(operations, parameters, strict=True)]


def balanced(costs: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Ranges of neighbours, none empty, of which the most expensive is as cheap as can be.

    >>> balanced([1.0, 1.0, 1.0, 5.0], 2)
    [(0, 3), (3, 4)]
    """
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {(0, 0): (0.0, [])}
    for parts in range(1, count + 1):
        for stop in range(parts, len(costs) + 1):
            before = [(start, best[parts - 1, start]) for start in range(parts - 1, stop) if (parts - 1, start) in best]
            best[parts, stop] = min(
                (max(cost, sum(costs[start:stop])), [*bounds, (start, stop)]) for start, (cost, bounds) in before
            )
    return best[count, len(costs)][1]


ONE_CALL = "--parallel pipeline needs a task that calls the model once, with one tensor"


class _Called(Exception):
    """The model was called."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def _replaced(model: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """The context in which `forward` replaces the model's own; all its other attributes stay."""
    own = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def model_input(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """What a task calls the model with."""

    def catch(*arguments: object, **named: object) -> NoReturn:
        raise _Called((*arguments, *named.values()))  # leaves the task's step

    try:
        with _replaced(model, catch):
            task.evaluate(model, batch)
    except _Called as call:
        if len(call.arguments) == 1 and isinstance(call.arguments[0], Tensor):
            return call.arguments[0]
        kinds = ", ".join(type(argument).__name__ for argument in call.arguments) or "nothing"
        raise TaskError(f"{ONE_CALL}; got {kinds}: pass a single tensor, or use --parallel fsdp") from None
    raise TaskError(f"{ONE_CALL}; its step calls a part of the model, or nothing of it: use --parallel data")


@contextmanager
def given(model: nn.Module, output: Tensor) -> Iterator[None]:
    """The context in which the model, called once, returns this output."""
    outputs = [output]

    def forward(*arguments: object, **named: object) -> Tensor:
        if not outputs:
            raise TaskError(f"{ONE_CALL}; its step called it twice: use --parallel fsdp")
        return outputs.pop()

    with _replaced(model, forward):
        yield
