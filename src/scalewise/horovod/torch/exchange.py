"""Gradients on their way: buckets that are reduced while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor, nn

from scalewise.engine.sums.flat import fold_one
from scalewise.engine.sums.tree import FoldPlan, own_plan
from scalewise.horovod import wire
from scalewise.horovod.negotiation import Handle, describe
from scalewise.horovod.processes import ProcessSet
from scalewise.horovod.torch.collectives import grouped_allreduce_async_, sparse_allreduce_async, synchronize
from scalewise.horovod.torch.compression import Compression, Compressor
from scalewise.horovod.torch.functions import broadcast_object, portions
from scalewise.horovod.wire import ReduceOp

Reduction = Literal["allreduce", "ordered"]

FIRST_BUCKET_BYTES = 2**20  # small, so that sending begins early
BUCKET_BYTES = 25 * 2**20


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together."""

    name: str
    parameters: list[nn.Parameter]
    flats: list[Tensor] = field(default_factory=list)  # one, or the tree's buffers in the ordered reduction
    views: list[list[Tensor]] = field(default_factory=list)
    ready: int = 0  # parameters whose last backward pass is done
    handle: Handle | None = None
    context: object = None

    def allocate(self, buffers: int) -> None:
        """Make room for all gradients, once."""
        if not self.flats:
            first = self.parameters[0]
            self.flats = [first.new_empty(sum(p.numel() for p in self.parameters)) for _ in range(buffers)]
            sizes = [parameter.numel() for parameter in self.parameters]
            for flat in self.flats:
                pieces = zip(flat.detach().split(sizes), self.parameters, strict=True)
                self.views.append([piece.view(parameter.shape) for piece, parameter in pieces])


def bucketed(parameters: Sequence[nn.Parameter], prefix: str) -> list[Bucket]:
    """Buckets of parameters of one type, in order; the first small, the others up to 25 MiB."""
    parts = portions(parameters, attrgetter("dtype", "device"), FIRST_BUCKET_BYTES, BUCKET_BYTES)
    return [Bucket(f"{prefix}.{number}", part) for number, part in enumerate(parts)]


class Exchange:
    """The gradients of one optimizer: counted as they come, reduced in buckets, written back.

    The buckets are made after the first step, when it is known in which order gradients come (process 0's counts) and
    which are sparse; with the ordered reduction at once, in reverse order of the parameters.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        passes: int,
        groups: list[list[nn.Parameter]] | int | None,
        compression: Compressor,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        reduction: Reduction,
    ) -> None:
        self.passes = passes
        self._compression, self._op, self._predivide = compression, op, predivide
        self._sparse_as_dense, self._process_set, self._ordered = sparse_as_dense, process_set, reduction == "ordered"
        # Gradients are divided as they are copied into a bucket, which saves a pass over their sum.
        self._divided_first = op is ReduceOp.Average and predivide == 1.0 and compression is Compression.none
        # optimizers may be under way together
        self._prefix = f"optimizer.{self._process_set.next_number('optimizer')}"
        self._names = {parameter: name for name, parameter in named.items()}
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._groups = groups
        self._left: dict[nn.Parameter, int] = {}  # backward passes that are still to come in this step
        self._order: list[str] = []
        self._buckets: list[Bucket] = []
        self._home: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._sparse: list[nn.Parameter] = []
        self.forget()
        if self._ordered:
            self._arrange(bucketed([*self._parameters.values()][::-1], f"{self._prefix}.ordered"))
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(self._came)

    @property
    def pending(self) -> bool:
        """Whether gradients came that were not written back yet."""
        return any(left < self.passes for left in self._left.values())

    def forget(self) -> None:
        """Begin a step."""
        self._left = dict.fromkeys(self._parameters.values(), self.passes)
        for bucket in self._buckets:
            if bucket.handle is not None:
                synchronize(bucket.handle)
            bucket.ready, bucket.handle = 0, None

    def _came(self, parameter: Tensor) -> None:
        """Note a gradient as backward has it; send its bucket when that is complete."""
        assert isinstance(parameter, nn.Parameter)
        if self._left[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times before call to step(): "
                f"{self._names[parameter]} came {self.passes + 1} times, {self.passes} are expected. Increase "
                f"backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] -= 1
        if not self._buckets:
            self._order.append(self._names[parameter])
            return
        if self._ordered:
            self._fold(parameter)
        if self._left[parameter] == 0 and parameter in self._home:
            bucket, _ = self._home[parameter]
            bucket.ready += 1
            if bucket.ready == len(bucket.parameters):
                self._send(bucket)

    def finish(self) -> None:
        """Reduce what is not yet on its way, wait, and write all gradients back."""
        if not self._buckets and not self._sparse:
            self._arrange_by_first_step()
        sparse = []
        for parameter in self._sparse:
            gradient = parameter.grad
            if gradient is None:  # this process did not use the parameter
                gradient = torch.zeros_like(parameter).to_sparse(1)
            name = f"{self._prefix}.{self._names[parameter]}"
            sparse.append((parameter, sparse_allreduce_async(gradient, name, self._op, self._process_set)))
        for bucket in self._buckets:
            if bucket.handle is None:
                self._complete(bucket)
                self._send(bucket)
        for bucket in self._buckets:
            self._receive(bucket)
        for parameter, handle in sparse:
            parameter.grad = synchronize(handle)
        self.forget()

    def _arrange(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        for bucket in buckets:
            self._home |= {parameter: (bucket, index) for index, parameter in enumerate(bucket.parameters)}

    def _arrange_by_first_step(self) -> None:
        """Make buckets as process 0 says, so that all processes have the same."""
        dense_only = self._sparse_as_dense
        sparse = [n for n, p in self._parameters.items() if p.grad is not None and p.grad.is_sparse and not dense_only]
        came = dict.fromkeys([*self._order, *self._parameters])
        assert self._process_set.ranks is not None
        root = self._process_set.ranks[0]
        order, sparse_names = broadcast_object(([*came], sparse), root, process_set=self._process_set)
        if set(order) != set(self._parameters):
            raise ValueError(
                f"every process must have the same parameters, got {sorted(set(order) ^ set(self._parameters))} on "
                f"some only; build the same model everywhere and name its parameters"
            )
        self._sparse = [self._parameters[name] for name in sparse_names]
        self._arrange(self._grouped([self._parameters[name] for name in order if name not in sparse_names]))

    def _grouped(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        """Buckets by size, or by the groups that the script asks for."""
        if self._groups is None:
            return bucketed(parameters, f"{self._prefix}.gradients")
        if isinstance(self._groups, int):
            each = -(-len(parameters) // self._groups)
            groups = [parameters[start : start + each] for start in range(0, len(parameters), each)]
        else:
            chosen = [[p for p in group if any(p is one for one in parameters)] for group in self._groups]
            grouped = {id(parameter) for group in chosen for parameter in group}
            groups = [*filter(None, chosen), *([p] for p in parameters if id(p) not in grouped)]
        return [
            bucket
            for number, group in enumerate(groups)
            for bucket in bucketed(group, f"{self._prefix}.group.{number}")
        ]

    def _fold(self, parameter: nn.Parameter) -> None:
        """Add one backward pass's gradient into the tree, and leave room for the next one's."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the ordered reduction needs dense gradients, got a sparse one for {self._names[parameter]}"
            )
        bucket, index = self._home[parameter]
        plan = self._plan()
        bucket.allocate(plan.buffers)
        fold_one(plan.steps[self.passes - self._left[parameter] - 1], bucket.views, index, parameter.grad)
        parameter.grad = None

    def _plan(self) -> FoldPlan:
        """How this process's backward passes are summed: its leaves of the tree over all processes' passes."""
        size = self._process_set.size()
        return own_plan(self._process_set.rank(), size, self.passes * size)

    def _complete(self, bucket: Bucket) -> None:
        """Gradients that did not come count as zeros, or as what there is."""
        for parameter in bucket.parameters:
            if self._ordered:
                while self._left[parameter] > 0:
                    self._left[parameter] -= 1
                    parameter.grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                    self._fold(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _send(self, bucket: Bucket) -> None:
        if self._ordered:
            plan = self._plan()
            divisor = self._process_set.size() if self._op is ReduceOp.Average else 1
            nodes = bucket.flats[: len(plan.nodes)]
            perform = partial(wire.reduce_ordered, nodes, self.passes, divisor)
            description = describe("ordered", [nodes[0]], self.passes)
            bucket.handle = self._process_set.ask(bucket.name, description, perform)
            return
        bucket.allocate(1)
        known = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
        gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in known]
        if self._divided_first:
            for gradient, view in zip(gradients, bucket.views[0], strict=True):
                torch.div(gradient, self._process_set.size(), out=view)
        else:
            torch._foreach_copy_(bucket.views[0], gradients)
        packed, bucket.context = self._compression.compress(bucket.flats[0])
        before, after = (1 / self._predivide, self._predivide) if self._op is ReduceOp.Average else (1.0, 1.0)
        op = ReduceOp.Sum if self._divided_first else self._op
        bucket.handle = grouped_allreduce_async_([packed], None, bucket.name, op, before, after, self._process_set)

    def _receive(self, bucket: Bucket) -> None:
        result = synchronize(bucket.handle) if bucket.handle is not None else None
        if self._ordered:
            for parameter, view in zip(bucket.parameters, bucket.views[0], strict=True):
                parameter.grad = view.clone()
            return
        assert result is not None
        flat = self._compression.decompress(result[0], bucket.context)
        if flat is not bucket.flats[0]:
            bucket.flats[0].copy_(flat)
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in bucket.parameters):
            for parameter, view in zip(bucket.parameters, bucket.views[0], strict=True):
                assert parameter.grad is not None
                parameter.grad = view.to_sparse(1) if parameter.grad.is_sparse else view.clone()
            return
        gradients = [parameter.grad for parameter in bucket.parameters if parameter.grad is not None]
        torch._foreach_copy_(gradients, bucket.views[0])
