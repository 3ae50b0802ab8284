"""What Horovod's scripts give to `model.fit(callbacks=…)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from scalewise.horovod.processes import global_process_set, rank, size
from scalewise.horovod.torch.collectives import allreduce
from scalewise.horovod.torch.functions import overwrite
from scalewise.horovod.wire import ReduceOp

Logs = dict[str, Any] | None


def variables_of(model: Any, optimizer: Any) -> list[Any]:  # noqa: ANN401
    """The variables of a model and of its optimizer, if it has one that is built."""
    return [*model.variables, *(optimizer.variables if optimizer is not None and optimizer.built else [])]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Start every process from one process's weights.

    Weights are sent before the first step, and with the optimizer's state after it, when every model is built. Every
    process keeps its own `local_variables`.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or []}
        self.broadcast_done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Send the weights, if there are any yet."""
        if self.model.built and not self.broadcast_done:
            self._send(self.model.variables)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """After the first step, send everything."""
        if not self.broadcast_done:
            self._send(variables_of(self.model, self.model.optimizer))
            self.broadcast_done = True

    def _send(self, variables: list[Any]) -> None:
        shared = [variable.value for variable in variables if id(variable) not in self._local]
        overwrite(shared, self.root_rank, global_process_set)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over processes; callbacks after this one see the averages."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average all numbers, in order of their names."""
        names = sorted(logs or {})
        if logs and names and size() > 1:
            own = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
            logs.update(zip(names, allreduce(own, op=ReduceOp.Average).tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Learning rate = initial_lr × multiplier(epoch), from start_epoch until end_epoch.

    Arguments:
        initial_lr: where it starts; the optimizer's own when not given.
        multiplier: a number, or a function of the epoch, which without staircase has fractions.
        staircase: change it at the start of an epoch only.
        momentum_correction: scale momentum with the rate in the step in which that changes (Goyal et al. 2017).
        steps_per_epoch: of this process; known to Keras in most cases.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: float | None = None  # to put back after the step

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find out what was not given."""
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
        if self.steps_per_epoch is None and not self.staircase:
            raise ValueError("steps_per_epoch must be given, as the data do not tell; pass steps_per_epoch=…")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of this step."""
        past = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or past:
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        assert self.initial_lr is not None
        before, after = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, float) and before > 0:
            self._momentum = momentum
            optimizer.momentum = momentum * after / before

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Put momentum back."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the rate to the metrics."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Rise from initial_lr ÷ processes to initial_lr, step by step over the first epochs (Goyal et al. 2017).

    With N processes the rate of a step that ends at epoch e is initial_lr ÷ N × (1 + e (N − 1) ÷ warmup_epochs).
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def rising(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            ended = epoch + 1 / self.steps_per_epoch
            return 1 / size() * (ended * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier=rising,
            end_epoch=int(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Say when it is over."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keep the best model so far; process 0 writes it."""

    def __init__(self, filepath: Any, monitor: str = "val_loss", **options: Any) -> None:  # noqa: ANN401
        super().__init__(filepath, monitor=monitor, save_best_only=True, **options)

    def _save_model(self, epoch: int, batch: int | None, logs: Logs) -> None:
        if rank() == 0:
            super()._save_model(epoch=epoch, batch=batch, logs=logs)
