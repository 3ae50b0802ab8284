"""One worker's micro batches through a pipeline of stages, one per process, on torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from scalewise.engine.team import Team

Precision = Callable[[], AbstractContextManager[object]]
Loss = Callable[[Tensor, int], Tensor]


class MeasuredStage(PipelineStage):
    """A stage that takes each micro batch's gradient by itself: its norms, and the sum, micro batch by micro batch."""

    def __init__(
        self, module: nn.Module, parameters: Sequence[Tensor], flow: tuple[Tensor, Tensor], team: Team, under: Precision
    ) -> None:
        """Nothing is computed yet.

        Arguments:
            module, parameters: the layers of this process and what is trained of them.
            flow: what a micro batch is when it comes here and when it leaves, as examples.
            team: the processes, one stage each.
            under: makes the context in which layers run forward.
        """
        super().__init__(module, team.rank, team.size, team.device, input_args=flow[0], output_args=flow[1])
        self._trained, self._under = parameters, under
        self.measures = False
        self.norms: list[Tensor] = []  # of each micro batch's gradient: (parameter,)
        self.sums: list[Tensor] = []

    def begin(self, measures: bool) -> None:
        """Forget the worker before."""
        self.measures, self.norms, self.sums = measures, [], []
        for parameter in self._trained:
            parameter.grad = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own signature
        """As torch does it, in the recipe's precision."""
        with self._under():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """As torch does it; then the gradient is taken away."""
        super().backward_one_chunk(*args, **kwargs)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        if self.measures:
            self.norms.append(torch.stack(torch._foreach_norm(gradients)))
        if self.sums:
            torch._foreach_add_(self.sums, gradients)
        else:
            self.sums = gradients
        for parameter in self._trained:
            parameter.grad = None


class Passage:
    """The stages of all processes, through which one worker's micro batches pass."""

    def __init__(self, make_stage: Callable[[], MeasuredStage]) -> None:
        self._make_stage = make_stage
        self._schedules: dict[int, tuple[MeasuredStage, Schedule1F1B | ScheduleGPipe]] = {}
        self._loss: Loss | None = None

    def run(self, count: int, inputs: Sequence[Tensor], loss: Loss, measures: bool) -> MeasuredStage:
        """Pass `count` micro batches forward and backward; the stage has their gradient.

        Arguments:
            count: how many.
            inputs: what goes into the first stage; not needed elsewhere.
            loss: where backward starts, from the last stage's output and the number of the micro batch.
            measures: whether to take the norms of every micro batch's gradient.
        """
        if count not in self._schedules:
            stage = self._make_stage()
            self._schedules[count] = stage, _schedule(stage, count, self._root)
        stage, schedule = self._schedules[count]
        self._loss = loss
        stage.begin(measures)
        if stage.is_first:
            schedule.step(torch.cat([*inputs]) if count > 1 else inputs[0], return_outputs=False)
        else:
            numbers = torch.arange(count) if stage.is_last else None  # torch hands the loss its part of the target
            schedule.step(target=numbers, return_outputs=False)
        return stage

    def _root(self, output: Tensor, number: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, int(number))


def _schedule(
    stage: PipelineStage, micro_batches: int, root: Callable[[Tensor, Tensor], Tensor]
) -> Schedule1F1B | ScheduleGPipe:
    """1F1B; with fewer micro batches than stages, for which torch has no 1F1B, all forward and then all backward."""
    kind = Schedule1F1B if micro_batches >= stage.num_stages else ScheduleGPipe
    return kind(stage, micro_batches, loss_fn=root, scale_grads=False)
