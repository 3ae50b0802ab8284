"""`sw.watch`: see a training loop through hooks, and write down what `scalewise doctor` needs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from scalewise.doctor.diagnose import diagnose_folder, summary
from scalewise.doctor.evidence import Finding
from scalewise.doctor.observations import WatchedLabels, line
from scalewise.errors import UsageError
from scalewise.nn.batch_norm import averaging_layers
from scalewise.stats.noise_scale import NoiseEstimate
from scalewise.watch.fingerprints import SAMPLES, WeightSample, some_elements, tensors_of
from scalewise.watch.gradients import Halves, after_backward, norm, one_number, output_gradient, square_of
from scalewise.watch.steps import (
    OpenStep,
    close_file,
    describe,
    gap,
    group_of,
    observed,
    open_file,
    own_folder,
)

BUDGET = 0.005  # share of a step's time that looking closely may take: a quarter of what is promised in all
DETAILED_STEPS = 32  # at the start, looked at closely in any case
LONGEST_INTERVAL = 64
DEEP_INTERVAL = 64
LINES = 64  # that are written at a time
# Samples of a process whose fingerprints are taken; after them only a few of every step, to see whether they come in
# the same order again.
ALL_INPUTS = 100_000
HEAD = 8


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    out: str | os.PathLike[str] = "watch",
    every: int = 1,
    show: bool = False,
) -> Watcher:
    """Watch a training loop; `scalewise doctor <out>` then says what is wrong with it.

    >>> watcher = watch(model, optimizer)  # doctest: +SKIP

    Arguments:
        model: the model that the loop calls: wrapped in DistributedDataParallel, sharded by fully_shard, or plain.
        optimizer: whose step() ends a step; several backward passes before it are micro batches.
        out: a folder; each process writes its own file there. A second watcher takes one of its own beside it.
        every: look closely at most at every N-th step; N grows to stay within 0.5 % of a step's time.
        show: print `summary()` when watching ends, at the latest with the program.
    """
    inner: object = optimizer
    while not isinstance(inner, Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        if not hasattr(inner, "optimizer"):  # where other tools keep the optimizer that they wrap
            raise UsageError(
                f"sw.watch needs a model and its torch.optim.Optimizer, got a {type(optimizer).__name__}; pass the "
                f"optimizer whose step() the loop calls"
            )
        inner = inner.optimizer
    return Watcher(model, inner, Path(out), every, show)


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that never ends somebody's training: on an error watching stops with a warning. Its time is counted."""

    @functools.wraps(hook)
    def guarded(self: Watcher, *arguments: object) -> None:
        if self.closed:
            return
        began = time.perf_counter()
        try:
            hook(self, *arguments)
        except Exception as error:  # whatever a model or an optimizer may be
            self._stop()  # the hooks stay, idle: one cannot be removed while they are being called
            warnings.warn(f"sw.watch stopped watching: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        self._now.spent += time.perf_counter() - began

    return guarded


class Watcher:
    """Hooks on one model and one optimizer; use it as a context manager, or leave it until the program ends."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        out: Path,
        every: int = 1,
        show: bool = False,
        outputs: Sequence[nn.Module] = (),
    ) -> None:
        """Watch from now on, as `watch` does.

        For a model that returns its loss alone, `outputs` are modules inside of it, the last called of which makes the
        output that the loss is computed from.
        """
        self._show = show
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._layers = averaging_layers(model)
        self.process = describe(model, optimizer, self._layers)
        self._halves = Halves(model, self._parameters) if self.process.processes == 1 else None
        self._every = self._interval = max(1, every)
        self._step = 0  # steps that have ended
        self._now = OpenStep()
        self._begin()
        self._waiting: list[tuple[int, OpenStep]] = []
        self._inputs_seen = 0
        self._labels: Tensor | None = None
        self._refused_a_loss = False
        self._hooks = 0  # the number of the next hook, if only the watcher registers any in this step
        self._cost, self._step_seconds, self._ended_at = 0.0, 0.0, time.perf_counter()
        self._during_backward: list[RemovableHandle] = []
        self._during_forward: list[RemovableHandle] = []
        self._weights = WeightSample(model)
        self.out = own_folder(out, self.process.process)
        self._file = open_file(self.out, self.process.process)
        self._file.write(line(self.process) + "\n")
        self._file.flush()
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            optimizer.register_step_post_hook(self._after_step),
            *(module.register_forward_hook(self._inside_forward) for module in outputs),
        ]
        self.closed = False
        self.spent_seconds = 0.0  # by the hooks, from the end of the last step but one to that of the newest
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def loss(self, loss: Tensor | float) -> None:
        """Note the loss of a micro batch, as backward() is called on it, unless the model itself returns it."""
        if self.closed:
            return
        if (number := one_number(loss)) is not None:
            self._now.losses.append(number)
        elif not self._refused_a_loss:
            self._refused_a_loss = True
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            got = f"a {type(loss).__name__}{shape}"
            warnings.warn(
                f"watcher.loss needs one number, the mean loss of a micro batch, got {got}, which is not "
                f"noted; pass loss.mean()",
                RuntimeWarning,
                stacklevel=2,
            )

    def findings(self) -> list[Finding]:
        """What doctor says so far, from what all processes have written."""
        self._flush()
        return diagnose_folder(self.out).findings

    def noise(self) -> NoiseEstimate | None:
        """The noise scale so far, where it could be measured."""
        self._flush()
        return diagnose_folder(self.out).evidence.noise

    def summary(self) -> str:
        """The noise scale and the findings so far in a few lines, from what all processes have written."""
        self._flush()
        return summary(diagnose_folder(self.out))

    def close(self) -> None:
        """Remove the hooks and write what is left."""
        ends = not self.closed
        self._stop()
        for handles in (self._handles, self._during_backward, self._during_forward):
            self._unhook(handles)
        atexit.unregister(self.close)
        if ends and self._show and self.process.process == 0:
            with contextlib.suppress(Exception):  # files of other processes may be gone, or the disk full
                print(self.summary(), file=sys.stderr)

    def _stop(self) -> None:
        """Write what is left, and see nothing more."""
        if self.closed:
            return
        self.closed = True
        for last in (self._write_waiting, self._write_labels, lambda: close_file(self._file)):
            with contextlib.suppress(Exception):  # what cannot be read or written is left out: training continues
                last()

    @staticmethod
    def _unhook(handles: list[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    def _begin(self) -> None:
        """Begin a step: what is looked at in it follows from its number, so that processes look at the same steps.

        Weights and batch-norm statistics at powers of two, then every 64 steps.
        """
        number = self._step
        self._detailed = number % self._interval == 0 or (number < DETAILED_STEPS and number % self._every == 0)
        alone = len(self._now.samples) < 2  # several micro batches show the noise themselves
        self._halved = alone and self._halves is not None and self._halves.due(number)
        number += 1
        self._deep = number % DEEP_INTERVAL == 0 or (number < DEEP_INTERVAL and number & (number - 1) == 0)
        self._now = OpenStep()
        self._output: Tensor | None = None  # what the loss is computed from; kept from forward to backward only
        self._ends = False  # whether the end of this backward pass is waited for

    @_harmless
    def _before_forward(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._now.passed_back and self._thrown_away():
            self._now = OpenStep()
        tensors = tensors_of(arguments, named)
        first = not self._now.samples
        self._now.samples.append(len(tensors[0]) if tensors else 0)
        if tensors:
            self._now.inputs.append(self._some(tensors))
        if first and self._detailed and self.process.reduces and not self._during_backward:
            self._during_backward += [
                parameter.register_post_accumulate_grad_hook(self._local_gradient) for parameter in self._parameters
            ]
        if first and self._deep:
            self._during_forward += [
                layer.register_forward_pre_hook(self._through_batch_norm) for layer in self._layers
            ]
        if first:
            self._hooks = RemovableHandle.next_id

    def _thrown_away(self) -> bool:
        """Whether gradients were set to None without a step, as a gradient scaler does after an overflow."""
        return not self.process.sharded and all(parameter.grad is None for parameter in self._parameters)

    def _some(self, tensors: list[Tensor]) -> list[Tensor]:
        most = SAMPLES if self._inputs_seen < ALL_INPUTS else HEAD
        self._inputs_seen += min(most, len(tensors[0]))
        return some_elements(tensors, most)

    @_harmless
    def _through_batch_norm(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if layer.training:  # a frozen one neither takes statistics of the batch nor moves its own
            self._now.gaps.append(gap(layer, arguments[0]))  # type: ignore[arg-type]

    @_harmless
    def _after_forward(self, model: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        if self._during_forward:
            self._unhook(self._during_forward)
            most, processes = max(self._now.samples, default=0), self.process.processes
            self._now.norms = [(one, group_of(one, most, processes)) for one in self._layers if one.training]
        if not (self._now.samples and torch.is_grad_enabled()):
            return
        if (loss := _loss_in(output)) is not None:
            self._now.losses.append(loss.detach())
        widest = _widest(output)
        if self._output is None or (widest is not None and widest.ndim):
            self._output = widest
        if self._output is not None:
            self._output.register_hook(self._at_output)
            self._hooks += 1

    @_harmless
    def _inside_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        if module.training and torch.is_grad_enabled() and (widest := _widest(output)) is not None and widest.ndim:
            self._output = widest

    @_harmless
    def _at_output(self, gradient: Tensor) -> None:
        if self._halves is not None and self._halves.under_way:
            return  # these are our own passes
        output, self._output, self._now.passed_back = self._output, None, True
        if not (self._detailed or self._halved):
            return
        # Hooks of tensors cannot be seen in the graph, but every hook of the program has a number.
        others_hooks = RemovableHandle.next_id != self._hooks
        alone = gradient.ndim and self._now.samples == [len(gradient)] and not others_hooks
        if self._halved and self._halves is not None and output is not None and alone:
            began = time.perf_counter()
            self._halves.look(output, gradient)
            self._now.half_seconds = time.perf_counter() - began
        if gradient.ndim and self._detailed:
            found = output_gradient(gradient)
            self._now.outputs.append(found)
            if found.labels is not None:
                self._labels = found.labels.clone() if self._labels is None else self._labels + found.labels
        if not self._ends:  # a model that is called twice for one loss has two outputs in one pass
            self._ends = True
            after_backward(self._after_backward)

    @_harmless
    def _local_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._now.local_norms.append(norm(parameter.grad))

    @_harmless
    def _after_backward(self) -> None:
        self._ends = False
        self._unhook(self._during_backward)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._now.squares.append(square_of(gradients, self.process.processes, self.process.sharded))
        if self._halved and self._halves is not None:
            began = time.perf_counter()
            self._now.half = self._halves.squares()
            self._now.half_seconds += time.perf_counter() - began

    @_harmless
    def _after_step(self, optimizer: Optimizer, *arguments: object) -> None:
        if not self._now.samples:
            return  # nothing was computed: an optimizer that calls another's step
        self._now.seconds = time.perf_counter() - self._ended_at
        self._now.lr = max(float(group["lr"]) for group in optimizer.param_groups)
        if self._deep and self._weights.possible and not self.process.sharded:
            self._now.weights = self._weights.take()
        self._unhook(self._during_backward)
        self._waiting.append((self._step + 1, self._now))
        if len(self._waiting) >= LINES:
            self._write_waiting()
        self.spent_seconds = self._now.spent
        self._keep_within_budget(self._now)
        self._step += 1
        self._begin()
        self._ended_at = time.perf_counter()

    def _keep_within_budget(self, done: OpenStep) -> None:
        """Look closely less often where it takes more than its share; powers of two, so that processes meet."""
        blend = 0.2 if self._step else 1.0
        self._step_seconds += blend * (done.seconds - done.spent - self._step_seconds)
        if done.half is not None and self._halves is not None:
            self._halves.keep_within_budget(done.half_seconds, self._step_seconds)
        if done.squares and not done.weights and self._detailed:
            self._cost += (0.2 if self._cost else 1.0) * (done.spent - done.half_seconds - self._cost)
            wanted = self._cost / max(BUDGET * self._step_seconds, 1e-9)
            longer = 2 ** math.ceil(math.log2(max(1.0, wanted)))
            self._interval = max(self._every, min(LONGEST_INTERVAL, longer))

    @_harmless
    def _flush(self) -> None:
        self._write_waiting()

    def _write_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []  # first: a step that cannot be read is not tried again
        for step in observed(waiting):
            self._file.write(line(step) + "\n")
        self._file.flush()

    def _write_labels(self) -> None:
        if self._labels is not None:
            self._file.write(line(WatchedLabels(self._labels.tolist())) + "\n")


def _widest(output: object) -> Tensor | None:
    """The first tensor with dimensions, else the first of one number, that has a gradient."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return next((leaf for leaf in leaves if leaf.ndim), leaves[0]) if leaves else None


def _loss_in(output: object) -> Tensor | None:
    """The loss, of a model that returns it: alone, as output["loss"] or as output.loss."""
    if isinstance(output, Tensor):
        return output if not output.ndim and output.requires_grad else None
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and not found.ndim and found.requires_grad else None
