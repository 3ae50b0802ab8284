"""State that outlives the processes: kept in memory and in a file at each commit."""

from __future__ import annotations

import copy
import functools
import os
import pickle  # for its error alone
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from scalewise.errors import CheckpointError
from scalewise.horovod.processes import is_initialized, rank
from scalewise.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters

FOLDER = "SCALEWISE_ELASTIC"

P = ParamSpec("P")
R = TypeVar("R")


class State:
    """What `run` needs of a state; a script may make its own.

    Horovod's `bcast_object` and `get_rank` are taken and not needed.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after a restart, e.g. to scale the learning rate to the new number of processes."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The processes are other ones than before."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save, here and in the job's file: a restart begins from here."""
        self.save()
        store = _file()
        if store is not None and rank() == 0:
            store.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.saved(), temporary := store.with_suffix(".new"))
            if not store.exists():
                _read(temporary)  # so that what cannot be read again is told at the first commit
            temporary.replace(store)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: torchrun restarts the processes when machines come or go."""

    def save(self) -> None:
        """Remember the present values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every process the values of process 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for other processes."""

    def saved(self) -> dict[str, Any]:
        """What `save` remembered, for the file."""
        raise NotImplementedError(
            f"torchrun restarts processes, so a state must also have saved() and load(), which a file is made of, got "
            f"{type(self).__name__} without; add them, or use hvd.elastic.ObjectState"
        )

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what another process saved."""
        raise NotImplementedError


class ObjectState(State):
    """Values as attributes: `ObjectState(epoch=0, batch=0)`.

    What has a state_dict is saved by it, and anything else as a copy.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: object) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = [*values]
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        """Remember the present values."""
        self._saved = {name: copy.deepcopy(_state_of(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Go back to what was saved."""
        for name, value in self._saved.items():
            self._give(name, copy.deepcopy(value))

    def _give(self, name: str, state: Any) -> None:  # noqa: ANN401
        held = getattr(self, name)
        if isinstance(held, DistributedSampler):
            held.set_epoch(state["epoch"])
        elif hasattr(held, "load_state_dict"):
            held.load_state_dict(state)
        else:
            setattr(self, name, state)

    def sync(self) -> None:
        """Give every process the values of process 0."""
        for name in self._names:
            held = getattr(self, name)
            if isinstance(held, nn.Module):
                broadcast_parameters(held.state_dict(), root_rank=0)
            elif isinstance(held, Optimizer):
                broadcast_optimizer_state(held, root_rank=0)
            else:
                self._give(name, broadcast_object(_state_of(held), root_rank=0))
        self.save()

    def saved(self) -> dict[str, Any]:
        """What `save` remembered."""
        return self._saved

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what another process saved."""
        if set(saved) != set(self._names):
            raise CheckpointError(
                f"the state of this job holds {sorted(saved)}, got a script with {sorted(self._names)}; start "
                f"a new job with another --rdzv-id"
            )
        self._saved = saved
        self.restore()


class TorchState(ObjectState):
    """A model, an optimizer and whatever else: `TorchState(model, optimizer, sampler=sampler, epoch=0)`."""

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: object) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)


def _state_of(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, DistributedSampler):  # has no state_dict, and holds the data
        return {"epoch": value.epoch}
    return value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value


def _file() -> Path | None:
    """Where the job's state is kept; None when torchrun will not restart anything."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return Path(os.environ.get(FOLDER, ".scalewise-elastic")) / f"{job}.pt"


def _read(store: Path) -> dict[str, Any]:
    """A committed state: tensors, numbers, text and collections of them; nothing in the file is executed."""
    try:
        saved: dict[str, Any] = torch.load(store, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"an elastic state must hold tensors, numbers, text and collections of them, or objects with a state_dict "
            f"of such, got {store} with something else: {str(error).splitlines()[0]}; keep other objects out of it"
        ) from None
    return saved


def run(function: Callable[P, R]) -> Callable[P, R]:
    """Make `train(state, …)` begin from the last commit of the job, if there was one."""

    @functools.wraps(function)
    def started(*arguments: P.args, **named: P.kwargs) -> R:
        if not is_initialized():
            raise ValueError("hvd.elastic.run needs hvd.init() first")
        state = arguments[0]
        assert isinstance(state, State), f"the first argument must be a hvd.elastic.State, got a {type(state).__name__}"
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        has_name = os.environ.get("TORCHELASTIC_RUN_ID") != "none"  # torchrun's default: other jobs have it too
        store = _file() if rank() == 0 and (restarted or has_name) else None  # of an earlier start of this very job
        committed = store is not None and store.is_file()
        if store is not None and committed:
            state.load(_read(store))
        if broadcast_object(committed, root_rank=0):
            state.on_reset()
        state.sync()
        result = function(*arguments, **named)
        if rank() == 0 and (done := _file()) is not None:
            done.unlink(missing_ok=True)
        return result

    return started
