"""Training with Keras that continues after processes were lost; see `scalewise.horovod.torch.elastic`."""

from __future__ import annotations

from typing import Any

import keras

from scalewise.horovod.keras.callbacks import Logs, variables_of
from scalewise.horovod.processes import global_process_set
from scalewise.horovod.torch.elastic.state import ObjectState, State, run
from scalewise.horovod.torch.functions import overwrite

WEIGHTS = "weights of Keras"


class KerasState(ObjectState):
    """A built model, its optimizer and whatever else: `KerasState(model, batch=0, epoch=0)`."""

    def __init__(self, model: Any, optimizer: Any = None, **values: object) -> None:  # noqa: ANN401
        if not model.built:
            raise ValueError("KerasState needs a model that is built; give it a keras.Input, or call it once")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else model.optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**values)

    def save(self) -> None:
        """Remember the present values."""
        super().save()
        self._weights = [variable.value.detach().clone() for variable in variables_of(self.model, self.optimizer)]

    def restore(self) -> None:
        """Go back to what was saved."""
        super().restore()
        for variable, value in zip(variables_of(self.model, self.optimizer), self._weights, strict=True):
            variable.assign(value)

    def sync(self) -> None:
        """Give every process the values of process 0."""
        overwrite([variable.value for variable in variables_of(self.model, self.optimizer)], 0, global_process_set)
        super().sync()

    def saved(self) -> dict[str, Any]:
        """What `save` remembered."""
        return {**super().saved(), WEIGHTS: self._weights}

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what another process saved."""
        self._weights = saved[WEIGHTS]
        super().load({name: value for name, value in saved.items() if name != WEIGHTS})


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state after every N batches, and after every epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count from here."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit, if it is time."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep `state.batch` at the present batch of the epoch.

    Keras 3 does not shorten an epoch from within: after a restart give `fit` steps_per_epoch=steps - state.batch.
    """

    def __init__(self, state: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Begin again."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep `state.epoch` at the number of epochs that have ended, also those before a restart."""

    def __init__(self, state: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.state = state
        self._ended_before = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Note those before."""
        self._ended_before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count this one; Keras counts from 0 in every `fit`."""
        self.state.epoch = self._ended_before + epoch + 1


__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
