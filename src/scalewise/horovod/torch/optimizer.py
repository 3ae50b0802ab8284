"""`DistributedOptimizer`: anyone's optimizer, whose gradients are averaged over processes before it steps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scalewise.errors import UsageError
from scalewise.horovod.processes import ProcessSet, global_process_set, size
from scalewise.horovod.torch.collectives import grouped_allreduce_
from scalewise.horovod.torch.compression import Compression, Compressor
from scalewise.horovod.torch.exchange import Exchange, Reduction
from scalewise.horovod.wire import ReduceOp

TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class Averaging(Optimizer):
    """What `DistributedOptimizer` puts before the script's own class of optimizer."""

    _exchange: Exchange | None  # None where there is nothing to exchange
    _parameter_names: dict[nn.Parameter, str]  # scripts read it
    _synchronized = False
    _should_synchronize = True

    def synchronize(self) -> None:
        """Wait until the gradients are those of all processes: before clipping them, for example."""
        if self._exchange is not None:
            self._exchange.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step()` does not synchronize, as `synchronize()` was called by hand."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average the gradients, then step; a closure, which computes gradients, is called first."""
        loss = None
        if closure is not None and self._exchange is not None:
            with torch.enable_grad():
                loss, closure = closure(), None
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        result: float | None = super().step(closure)
        return loss if loss is not None else result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are on their way."""
        if self._exchange is not None and self._exchange.pending:
            raise AssertionError(TOO_EARLY)
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: ANN401
        """Load, and forget gradients of before."""
        if self._exchange is not None:
            self._exchange.forget()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are summed here before gradients are exchanged."""
        return self._exchange.passes if self._exchange is not None else 1

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum this many backward passes before gradients are exchanged."""
        if self._exchange is not None:
            self._exchange.passes = passes
            self._exchange.forget()


class AdasumSteps(Optimizer):
    """Each process steps by its own gradients; the differences that makes are combined by Adasum.

    Maleki et al. 2020: the learning rate need not be scaled with the number of processes.
    """

    _compression: Compressor
    _process_set: ProcessSet
    _parameter_names: dict[nn.Parameter, str]
    backward_passes_per_step = 1

    def synchronize(self) -> None:
        """Nothing: Adasum exchanges what the step changes."""

    def skip_synchronize(self) -> NoReturn:
        """Adasum exchanges within the step, so that cannot be skipped."""
        raise AssertionError("skip_synchronize() does not go with op=hvd.Adasum, which exchanges within step()")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and move on from the start by what Adasum makes of all processes' steps."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            starts = [parameter.detach().clone() for parameter in parameters]
        loss: float | None = super().step(closure)
        with torch.no_grad():
            moved = [parameter - start for parameter, start in zip(parameters, starts, strict=True)]
            packed = [self._compression.compress(change) for change in moved]
            grouped_allreduce_([change for change, _ in packed], op=ReduceOp.Adasum, process_set=self._process_set)
            for parameter, start, (change, context) in zip(parameters, starts, packed, strict=True):
                parameter.copy_(start + self._compression.decompress(change, context))
        return loss


def DistributedOptimizer(  # noqa: N802
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: list[list[nn.Parameter]] | int | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    reduction: Reduction = "allreduce",
) -> Any:  # noqa: ANN401
    """The optimizer with its gradients averaged over processes before each step, while backward still runs.

    It stays an instance of its class, with the same parameters, state and hooks.

    Arguments:
        optimizer: any torch optimizer.
        named_parameters: `model.named_parameters()`, for messages; all parameters must be in it.
        compression: `Compression.fp16` or `bf16` send gradients in half as many bytes.
        backward_passes_per_step: this many backward passes are summed before gradients are exchanged.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: divide by it before the sum and by the rest of the processes after it.
        num_groups: older scripts' word for a number as `groups`.
        groups: how many messages, or which parameters go together; by size when not given.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: the processes that average.
        reduction: `"ordered"` sums every process's backward passes in scalewise's fixed tree: P processes with k
            passes each give the bytes of one process with P × k passes, for powers of two.
    """
    _check_options(op, gradient_predivide_factor, groups, reduction, compression)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = groups if groups is not None else num_groups
    named = _checked_names(optimizer, named_parameters)
    adasum = op is ReduceOp.Adasum and size() > 1
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (AdasumSteps if adasum else Averaging, kind), {}))
    # A scheduler may have put its own step(), which would pass ours by, into the instance, and asks whether it ran.
    vars(optimizer)["_opt_called"] = True
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._parameter_names = {parameter: name for name, parameter in named.items()}
    if adasum:
        wrapped._compression, wrapped._process_set = compression, process_set
        wrapped.backward_passes_per_step = backward_passes_per_step
        return wrapped
    exchanges = process_set.included() and (process_set.size() > 1 or reduction == "ordered")
    how = compression, ReduceOp(op), gradient_predivide_factor, sparse_as_dense, process_set, reduction
    wrapped._exchange = Exchange(named, backward_passes_per_step, groups, *how) if exchanges else None
    return wrapped


def _check_options(
    op: ReduceOp,
    predivide: float,
    groups: list[list[nn.Parameter]] | int | None,
    reduction: Reduction,
    compression: Compressor,
) -> None:
    if predivide != 1.0 and op != ReduceOp.Average:
        raise ValueError(f"gradient_predivide_factor needs op=hvd.Average, got op={ReduceOp(op).name}")
    if op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
        raise ValueError(f"op must be hvd.Average, hvd.Sum or hvd.Adasum, got {ReduceOp(op).name}")
    if reduction not in ("allreduce", "ordered"):
        raise UsageError(f"reduction must be 'allreduce' or 'ordered', got {reduction!r}")
    plain = predivide == 1.0 and groups is None and compression is Compression.none and op != ReduceOp.Adasum
    if reduction == "ordered" and not plain:
        raise UsageError(
            "reduction='ordered' goes with op=hvd.Average or hvd.Sum and without compression, groups and "
            "gradient_predivide_factor; leave those out"
        )
    if isinstance(groups, list):
        members = [parameter for group in groups for parameter in group]
        if not all(isinstance(parameter, Tensor) for parameter in members):
            raise ValueError("groups must consist of torch.Tensor")
        if len({id(parameter) for parameter in members}) < len(members):
            raise ValueError("a parameter can only appear once in groups")
    elif groups is not None and groups <= 0:
        raise ValueError(f"groups must be a positive number or a list of lists of torch.Tensor, got {groups}")


def _checked_names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, in the optimizer's order."""
    if named_parameters is None:
        return {
            f"allreduce.noname.{number}.{index}": parameter
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    pairs: list[Any] = [*named_parameters]
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unnamed = [number for number, parameter in enumerate(parameters) if id(parameter) not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: numbers {unnamed} of "
            f"the optimizer; pass model.named_parameters() of the whole model"
        )
    return {names[id(parameter)]: parameter for parameter in parameters}
