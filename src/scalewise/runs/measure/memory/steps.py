"""A trial's step: the engine's own at any worker batch, as it is in the middle of training, and what its parts need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.engine.data import streams
from scalewise.engine.loop import Training
from scalewise.engine.placement import Placement
from scalewise.engine.sums.tree import fold_plan, share
from scalewise.recipe import Recipe
from scalewise.tasks.task import Origin, Task

WORKERS_OF_A_PROCESS = 2  # in a trial: they run one after another, so that a third one needs no more memory
MOST_STEPS, RISE = 6, 1.005  # settled: a step raises the peak by less
GROWTH_SHARE, GROWTH_BYTES = 4, 500_000_000  # doubling ends when the peak has risen by that part of the room or this


@dataclass(frozen=True)
class Job:
    """What to try, with the complete recipe.

    batch: samples at once through the model; None begins with the fewest and doubles them until the growth is known.
    """

    task: Origin | bytes  # where to load it from, or the pickled task
    recipe: Recipe
    placement: Placement
    processes: int
    allowed: int  # bytes that each process may hold of its own
    batch: int | None
    most: int  # the most samples of interest


@dataclass(frozen=True)
class Parts:
    """Bytes that a process needs whatever the worker batch, by counting, and those that backward keeps per sample."""

    weights: int
    gradients: int
    optimizer: int
    saved_per_sample: float


@dataclass(frozen=True)
class Note:
    """What a process reports of its trial."""

    ended: str = "running"  # "running", "done", "out of memory" or "failed"; with `message` and `exit_code` when failed
    baseline: int = 0  # bytes of its own that it held before training: Python, torch and the task's data
    points: list[list[int]] = field(default_factory=list)  # samples at once, and the peak above the baseline they took
    smallest: int = 1  # the fewest samples that can go through the model at once
    parts: Parts | None = None  # after a trace
    message: str = ""
    exit_code: int = 0
    lost_contact: bool = False


def accumulates(recipe: Recipe) -> bool:
    """Whether a worker adds up the gradients of several passes through the model."""
    return recipe.micro_batches > 1 or recipe.schedule == "growth"


def trial_recipe(recipe: Recipe, batch: int, workers: int, steps: int = 1) -> Recipe:
    """The recipe with `batch` samples at once through the model: as worker batch, or as micro batch if it has those."""
    adds_up = accumulates(recipe)
    return recipe.replace(
        workers=workers,
        worker_batch=batch * (2 if adds_up else 1),
        micro_batch=batch if adds_up else None,
        steps=steps,
        lr=0.0,  # a trial must not diverge
        schedule="constant",
        warmup_epochs=0.0,
        patience=None,
        target=None,
    )


def smallest_batch(task: Task, recipe: Recipe) -> int:
    """The fewest samples that can go through the model at once: batch norm needs two."""
    if recipe.ghost_batch:
        return recipe.ghost_batch
    return 2 if has_batch_norm(task) else 1


def has_batch_norm(task: Task) -> bool:
    """Whether the model normalizes over its batch."""
    with streams.undisturbed():
        model = task.model()
    return isinstance(model, nn.Module) and any(isinstance(module, _BatchNorm) for module in model.modules())


def take_step(training: Training) -> None:
    """The engine's own step: every worker's gradient, their mean, the update."""
    training.take_step().read()


@contextmanager
def settled(job: Job, task: Task, batch: int) -> Iterator[Training]:
    """A training of the job in the state that it has after its first steps, without taking them.

    An update by gradients of 0 at rate 0 makes the optimizer's state; the gradients of an earlier step, the best
    weights and the buffers in which more workers are summed are put beside it. The workers are a few per process, whose
    step needs the memory of all, or all where they run at the same time.
    """
    workers = job.recipe.workers
    if job.recipe.batch_norm != "sync":
        workers = min(workers, WORKERS_OF_A_PROCESS * job.processes)
    with _begun(job, task, trial_recipe(job.recipe, batch, workers, MOST_STEPS)) as training:
        strategy = training.strategy
        strategy.update(0.0)
        parameters = [*strategy.model.parameters.values()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        if training.validation is not None:
            training.best = {name: tensor.clone() for name, tensor in strategy.model.tensors().items()}
        missing = _fold_buffers(job.recipe.workers, training) - _fold_buffers(training.recipe.workers, training)
        elements = sum(parameter.numel() for parameter in parameters)
        kept = [parameters[0].new_zeros(elements) for _ in range(missing)]
        yield training
        del kept


def settled_peak(training: Training, highest: Callable[[], int]) -> int:
    """The highest figure after steps until it rises no more.

    The first step's is a little lower than that of the second, and by far where malloc keeps what is freed: the gaps
    that one step leaves do not fit the next one's needs (docs/log.md).
    """
    peak = 0
    for _ in range(MOST_STEPS):
        take_step(training)
        before, peak = peak, max(peak, highest())
        if peak < RISE * before:
            break
    return peak


def doubling(peak: Callable[[int], int], smallest: int, most: int, room: int) -> Iterator[list[list[int]]]:
    """Peaks (samples, bytes) at numbers of samples that double, until their growth is known well; all so far each time.

    They double from `smallest` to at most `most` samples, in `room` bytes.
    """
    enough = min(room // GROWTH_SHARE, GROWTH_BYTES)
    points: list[list[int]] = []
    batch = smallest
    while not points or (points[-1][1] - points[0][1] < enough and batch <= most):
        points.append([batch, peak(batch)])
        yield points
        batch *= 2


def explore(job: Job, task: Task, peak: Callable[[int], int], room: int, write: Callable[..., object]) -> None:
    """Measure the peak of the job's batch, or trace how it grows; `write` stores fields of the note."""
    if job.batch is not None:
        write(points=[[job.batch, peak(job.batch)]])
        return
    smallest = smallest_batch(task, job.recipe)
    write(smallest=smallest, parts=count_parts(job, task, smallest))
    for points in doubling(peak, smallest, job.most, room):
        write(points=points)


def count_parts(job: Job, task: Task, smallest: int) -> Parts:
    """Bytes by counting, and those that are kept for backward by tracing two steps of one worker per process."""
    saved = [_saved_for_backward(job, task, batch) for batch in (smallest, 2 * smallest)]
    with settled(job, task, smallest) as training:
        model, workers = training.strategy.model, job.recipe.workers
        first, last = share(training.team.rank, training.team.size, workers)
        together = last - first if job.recipe.batch_norm == "sync" else 1
        exchanged = 2 if training.team.size > 1 else 0  # what is received and its sum
        vectors = together + _fold_buffers(workers, training) + accumulates(job.recipe) + exchanged
        return Parts(
            weights=_bytes(model.tensors().values()) + _bytes(training.best.values()),
            gradients=vectors * _bytes(model.parameters.values()),
            optimizer=_bytes(entry.tensor for entry in training.strategy.state()),
            saved_per_sample=together * max(0, saved[1] - saved[0]) / smallest,
        )


def _saved_for_backward(job: Job, task: Task, batch: int) -> int:
    """Bytes that one pass of one worker through the model keeps for backward; weights are not among them."""
    norms = "worker" if job.recipe.batch_norm == "sync" else job.recipe.batch_norm
    alone = job.recipe.replace(batch_norm=norms, micro_batch=None, schedule="constant")
    found: dict[int, int] = {}
    with _begun(job, task, trial_recipe(alone, batch, job.processes)) as training:
        weights = {tensor.untyped_storage().data_ptr() for tensor in training.strategy.model.parameters.values()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            take_step(training)
    return sum(found.values())


def _begun(job: Job, task: Task, recipe: Recipe) -> Training:
    return Training(task, recipe, job.placement, hold_out=job.recipe.selects, alone=job.processes == 1)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _fold_buffers(workers: int, training: Training) -> int:
    first, last = share(training.team.rank, training.team.size, workers)
    return fold_plan([(worker, worker + 1) for worker in range(first, last)], workers).buffers
