"""A task's model on this process's device, and the numerics that it runs under."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from scalewise.engine.data import streams
from scalewise.engine.parallel.workers import Buffers
from scalewise.engine.processes.team import Team
from scalewise.engine.sums.flat import is_dense
from scalewise.errors import RecipeError, TaskError
from scalewise.nn import to_ghost_batch_norm
from scalewise.nn.batch_norm import _GlobalBatchNorm, to_global_batch_norm
from scalewise.optim.rules import matrices
from scalewise.recipe import Recipe
from scalewise.tasks.task import Task

ALLOW, REFUSE = 0, 2  # operations without a deterministic version: torch's debug modes


@contextmanager
def numerics(recipe: Recipe, device: torch.device, exact: bool) -> Iterator[None]:
    """Threads and deterministic kernels as the recipe needs them; put back afterwards."""
    assert recipe.threads is not None
    before = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        _set(recipe.threads, REFUSE if exact else ALLOW, False, False)
        if recipe.compile:
            torch.use_deterministic_algorithms(exact)  # imports torch's compiler and sets it there too
        yield
    finally:
        if not sys.is_finalizing():  # a generator that was never finished is closed when Python ends
            _set(*before)


def _set(threads: int, unrepeatable: int, fill: bool, benchmark: bool) -> None:
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(unrepeatable)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = benchmark


class PlacedModel:
    """The model, its trainable parameters, and its buffers by what training does to them.

    averages: the new value is the mean over workers (batch-norm statistics).
    counters: change alike on every worker.
    Any other buffer must not change.
    """

    def __init__(self, task: Task, recipe: Recipe, team: Team) -> None:
        streams.seed_everything(recipe.seed, team.device)
        model = task.model()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the task's model must be a function that makes a torch.nn.Module, it made a {type(model).__name__}"
            )
        _check_dense(model)
        if recipe.ghost_batch:
            model = to_ghost_batch_norm(model, recipe.ghost_batch)
        if recipe.batch_norm == "sync":
            model = to_global_batch_norm(model)
            _check_sync(model, recipe, task)
        model = model.to(team.device)
        if recipe.layout == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module: nn.Module = model.train()
        self.call: nn.Module = torch.compile(model) if recipe.compile else model  # type: ignore[assignment]
        self.parameters = _trainable(model)
        self.matrices = matrices(model)
        self.averages, self.counters = _changing_buffers(model, task)
        _check_batch_norm(model, recipe)
        if team.size > 1:  # every process takes the first one's start weights, should the factory draw from elsewhere
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, 0)
        self.buffers = Buffers(model, self.averages, self.counters)

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers, in name order."""
        found = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: found[name].detach() for name in sorted(found)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self.buffers.accept()


def sha256(tensors: dict[str, Tensor]) -> str:
    """The hash of tensors in name order, raw bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        raw = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def _check_dense(model: nn.Module) -> None:
    """Refuse layers whose gradients are sparse: those of workers are summed in one dense vector."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise TaskError(
                f"gradients must be dense, layer {name!r} ({type(module).__name__}) has sparse=True; build it with "
                f"sparse=False"
            )


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise TaskError("the model must have at least one trainable parameter, got none; check requires_grad")
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}
    if len(kinds) > 1:
        raise TaskError(f"all trainable parameters must have one dtype, got {sorted(kinds)}; convert the model to one")
    for parameter in parameters.values():
        if not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
    return parameters


def _changing_buffers(model: nn.Module, task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    averages: dict[str, Tensor] = {}
    counters: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                (averages if buffer.is_floating_point() else counters)[name] = buffer
    buffers = dict(model.named_buffers())
    for name, meaning in task.buffers.items():
        if name not in buffers:
            raise TaskError(
                f"buffers= of the task names {name!r}, which the model does not have; it has {sorted(buffers)}"
            )
        (averages if meaning == "mean" else counters)[name] = buffers[name]
    dtype = next(model.parameters()).dtype
    wrong = [name for name, buffer in averages.items() if buffer.dtype != dtype]
    if wrong:
        raise TaskError(f"averaged buffers must have the parameters' dtype {dtype}, got another for {wrong}")
    return averages, counters


def _check_batch_norm(model: nn.Module, recipe: Recipe) -> None:
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise TaskError(
            "SyncBatchNorm takes statistics over processes, which are not part of the recipe; use nn.BatchNorm, whose "
            "statistics are per worker here"
        )
    group = recipe.ghost_batch or recipe.rows * (recipe.workers if recipe.batch_norm == "sync" else 1)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if group < 2 and any(norm.training for norm in norms):  # a frozen one takes no statistics
        cure = "raise N of --batch-norm ghost:N" if recipe.ghost_batch else "raise --worker-batch or --micro-batch"
        raise RecipeError(
            f"batch norm needs at least 2 samples per group, got {group}; {cure}, or use a model without batch norm"
        )


def _check_sync(model: nn.Module, recipe: Recipe, task: Task) -> None:
    """Refuse what cannot be shared by workers that run in lockstep."""
    if recipe.compile:
        raise RecipeError(
            "--batch-norm sync stops in the middle of the model, which --compile cannot; drop one of them"
        )
    others = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and not isinstance(module, _GlobalBatchNorm)
    ]
    if others or task.buffers:
        name = [*others, *task.buffers][0]
        raise TaskError(
            f"--batch-norm sync runs all workers through the model at once, and {name} keeps values of each of them; "
            f"use --batch-norm worker"
        )
