"""Throughput against the worker batch: the engine's own step, timed in rounds by turns, beside this device's peak.

MFU, the share of the device's floating-point peak that training uses, is

    FLOPs per sample (forward and backward) × samples per second ÷ FLOPs per second of the best matrix product

with the peak measured here and now, on the same threads and in the recipe's precision, not taken from a data sheet.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from scalewise.engine.data.feed import placed
from scalewise.engine.data.samples import open_samples
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import numerics
from scalewise.engine.parallel.workers import precision
from scalewise.engine.placement import Placement, available_cores
from scalewise.engine.processes.memory import STATUS, free_memory, held, is_out_of_memory
from scalewise.engine.processes.team import choose_device
from scalewise.recipe import Recipe, resolve
from scalewise.runs.measure.memory.steps import smallest_batch, take_step, trial_recipe
from scalewise.runs.request import Notify, silent
from scalewise.stats.timing import Knee, Rate, find_knee, rate
from scalewise.tasks.task import Task

ROUNDS = 9
ROUND_SECONDS = 0.06  # of one worker batch in one round, or one step if that takes longer
COLD_SECONDS = 0.05  # a step shorter than this feels what others have left in the caches
LEAST_TRIES = 3  # of a first step, of which the shortest counts: one of them may fall into another program's time slice
MOST_STEP_SECONDS = 1.0  # a worker batch whose step takes longer ends the curve …
FLAT_DOUBLINGS, FLAT_GAIN = 3, 1.05  # … as do so many doublings in a row that bring less than this
MOST_STEPS = 1 << 20
PRODUCT_SIDES = (256, 512, 1024, 2048)
PRODUCT_SECONDS = 0.3  # of each size


@dataclass(frozen=True)
class ThroughputReport:
    """Samples per second of one worker against its worker batch, in training and in inference.

    Fetching samples from memory counts; reading and decoding them from elsewhere does not, since loaders do that.

    flops_per_sample: floating-point operations of forward and backward, an addition and a multiplication being two.
    mfu: the share of that peak that training uses at its best worker batch; null when a model has no such operations.
    """

    rows: tuple[Rate, ...]
    knee: int  # the smallest worker batch with 90 % of the best throughput; `knee_interval` says what noise leaves open
    knee_interval: Knee
    best_worker_batch: int
    inference: tuple[Rate, ...]
    flops_per_sample: float
    peak_flops_per_second: float  # of this device's best matrix product, on `threads`, in the recipe's precision
    mfu: float | None
    device: str
    threads: int


def throughput(
    task: Task,
    recipe: Recipe,
    *,
    largest: int | None = None,
    placement: Placement | None = None,
    notify: Notify = silent,
) -> ThroughputReport:
    """Measure samples per second of one worker, at worker batches that double up to `largest` or while they rise."""
    complete, _ = resolve(recipe, {}, "plain", available_cores())
    where = placement or Placement()
    device = choose_device(where.device, 0)
    samples = len(open_samples(task.train, complete.seed, "training"))
    smallest = smallest_batch(task, complete)
    with ExitStack() as stack:
        bench = _Bench(task, complete, where, stack)
        notify("throughput: counting operations and measuring the device's peak")
        flops = bench.flops_per_sample(smallest)
        with numerics(complete, device, where.exact):
            peak = matrix_product_peak(device, torch.bfloat16 if complete.precision == "bf16" else torch.float32)
        contestants = bench.climb(smallest, min(largest or samples, samples), notify)
        training, inference = bench.rounds(contestants, notify)
    rows = tuple(rate(batch, values) for batch, values in training.items())
    best = max(rows, key=lambda row: row.samples_per_second)
    knee = find_knee(training)
    assert complete.threads is not None
    return ThroughputReport(
        rows=rows,
        knee=knee.worker_batch,
        knee_interval=knee,
        best_worker_batch=best.worker_batch,
        inference=tuple(rate(batch, values) for batch, values in inference.items()),
        flops_per_sample=flops,
        peak_flops_per_second=peak,
        mfu=flops * best.samples_per_second / peak if flops else None,
        device=device.type,
        threads=complete.threads,
    )


def matrix_product_peak(device: torch.device, dtype: torch.dtype, seconds: float = PRODUCT_SECONDS) -> float:
    """FLOPs per second of the fastest product of two square matrices, over a few sizes: 2·n³ ÷ its shortest time."""
    return max(_product_rate(side, device, dtype, seconds) for side in PRODUCT_SIDES)


def _product_rate(side: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.mm(left, right)
    shortest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        shortest = min(shortest, timed(lambda: torch.mm(left, right, out=out), device))
    return 2 * side**3 / shortest


def count_operations(work: Callable[[], object]) -> int:
    """Floating-point operations of some work, an addition and a multiplication being two.

    torch counts attention in one piece on CUDA only, so the formulas for a CPU's are given here. As there, a causal
    mask saves nothing, and backward computes the scores again.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas: dict[Any, Callable[..., int]] = {
        attention: lambda query, key, value, *rest, **named: sdpa_flop_count(query, key, value),
        backward: lambda *shapes, **named: sdpa_backward_flop_count(*shapes[:4]),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        work()
    return counter.get_total_flops()


def timed(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Mean seconds until the work is done, also on a device that answers before it is."""
    finish(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    finish(device)
    return (time.perf_counter() - began) / times


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few tries, or of fewer if they take long."""
    tries = [timed(work, device)]
    while len(tries) < LEAST_TRIES and sum(tries) < MOST_STEP_SECONDS:
        tries.append(timed(work, device))
    return min(tries)


def own_bytes() -> int:
    """What this process holds; 0 where the system does not say."""
    return held().own if STATUS.is_file() else 0


def gpu_share(device: torch.device) -> float | None:
    """How busy a GPU is, as its driver reports; None without NVIDIA's Python bindings."""
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):
        return None


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass
class _Contestant:
    """A worker batch with its own training, ready for another round, and how long its steps take."""

    worker_batch: int
    training: Training
    batch: Any
    step_seconds: float
    inference_seconds: float = ROUND_SECONDS
    opened: ExitStack = field(default_factory=ExitStack)  # closing it gives back what the training holds


class _Bench:
    """Trainings of one worker at several worker batches, which stay open and take turns."""

    def __init__(self, task: Task, recipe: Recipe, placement: Placement, stack: ExitStack) -> None:
        self._task, self._recipe, self._placement, self._stack = task, recipe, placement, stack

    def flops_per_sample(self, batch: int) -> float:
        """Floating-point operations of forward and backward, counted in one step."""
        recipe = self._trial(batch).replace(compile=False)
        with self._training(recipe) as training:
            return count_operations(lambda: training.gradients()) / recipe.worker_batch

    def climb(self, smallest: int, largest: int, notify: Notify) -> list[_Contestant]:
        """Worker batches that double, each with a first idea of its speed, while that is worth the time."""
        found: list[_Contestant] = []
        speeds: list[float] = []
        batch = smallest
        while batch <= max(largest, smallest) and not _flat(speeds):
            notify(f"throughput: worker batch {batch:,}")
            before = own_bytes()
            try:
                found.append(self._enter(batch))
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error) and found:  # the failed one's memory is free again
                    break
                raise
            speeds.append(batch / found[-1].step_seconds)
            next_bytes = 2 * (own_bytes() - before)  # of twice the samples, at most
            has_room = next_bytes <= 0 or free_memory().bytes >= next_bytes  # Linux would kill this process, not refuse
            if found[-1].step_seconds > MOST_STEP_SECONDS or not has_room:
                break
            batch *= 2
        return found

    def rounds(
        self, contestants: list[_Contestant], notify: Notify
    ) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        """Samples per second by worker batch and round, of training and of inference.

        All trainings are open at once and hold more than any of them alone. Where that is too much the curve ends
        earlier: the largest worker batch leaves, and the round is done again.
        """
        found: list[dict[int, tuple[float, float]]] = []
        while len(found) < ROUNDS:
            notify(f"throughput: round {len(found) + 1} of {ROUNDS}")
            rates = self._round(contestants, len(found))
            if rates is None:
                contestants.pop().opened.close()
                gc.collect()  # cycles hold the memory of a training
            else:
                found.append(rates)
        training, inference = (
            {one.worker_batch: [rates[one.worker_batch][kind] for rates in found] for one in contestants}
            for kind in range(2)
        )
        return training, inference

    def _round(self, contestants: list[_Contestant], number: int) -> dict[int, tuple[float, float]] | None:
        """Samples per second of training and of inference by worker batch; None when memory was short."""
        start = number % len(contestants)  # none is always first
        try:
            return {
                one.worker_batch: (self._training_rate(one), self._inference_rate(one))
                for one in contestants[start:] + contestants[:start]
            }
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error) and len(contestants) > 1:
                return None
            raise

    def _enter(self, batch: int) -> _Contestant:
        """A training at this worker batch, after a few steps of which all but the first were timed."""
        with ExitStack() as opening:
            training = opening.enter_context(self._training(self._trial(batch)))
            device = training.team.device
            take_step(training)
            seconds = _shortest(lambda: take_step(training), device)
            first = torch.arange(batch) % len(training.samples)
            fetched = training.samples.fetch(first, torch.zeros_like(first))
            inputs = placed(fetched, device, self._recipe.layout)
            contestant = _Contestant(batch, training, inputs, seconds)
            contestant.inference_seconds = _shortest(lambda: self._infer(contestant), device)
            contestant.opened = self._stack.enter_context(opening.pop_all())
        return contestant

    def _training_rate(self, contestant: _Contestant) -> float:
        training = contestant.training
        if contestant.step_seconds < COLD_SECONDS:
            take_step(training)
        waited = training.strategy.feed.waited_seconds
        steps = _fitting(contestant.step_seconds)
        seconds = timed(lambda: take_step(training), training.team.device, steps)
        if not training.samples.in_memory:
            seconds -= (training.strategy.feed.waited_seconds - waited) / steps
        return training.recipe.worker_batch / seconds

    def _inference_rate(self, contestant: _Contestant) -> float:
        device = contestant.training.team.device
        seconds = timed(lambda: self._infer(contestant), device, _fitting(contestant.inference_seconds))
        return contestant.worker_batch / seconds

    @torch.no_grad()
    def _infer(self, contestant: _Contestant) -> None:
        """One batch forward, as at evaluation: with loss and metrics."""
        model = contestant.training.strategy.model
        model.module.eval()
        try:
            with precision(self._recipe, contestant.training.team.device):
                self._task.evaluate(model.module, contestant.batch)
        finally:
            model.module.train()

    def _trial(self, batch: int) -> Recipe:
        return trial_recipe(self._recipe, batch, 1, MOST_STEPS)

    def _training(self, recipe: Recipe) -> Training:
        return Training(self._task, recipe, replace(self._placement, loaders=0), alone=True)


def _fitting(seconds: float) -> int:
    """How often what takes so long is done in a round."""
    return max(1, round(ROUND_SECONDS / seconds))


def _flat(speeds: list[float]) -> bool:
    """Whether the last doublings have brought nothing any more."""
    if len(speeds) <= FLAT_DOUBLINGS:
        return False
    return max(speeds[-FLAT_DOUBLINGS:]) < FLAT_GAIN * max(speeds[:-FLAT_DOUBLINGS])
