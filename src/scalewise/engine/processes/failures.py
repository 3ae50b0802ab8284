"""Unexpected errors of training, translated for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from scalewise.engine.processes.heartbeat import HEARTBEAT
from scalewise.engine.processes.memory import is_out_of_memory
from scalewise.errors import (
    CheckpointError,
    DataError,
    LostContact,
    ProcessFailed,
    ScalewiseError,
    TaskError,
    TooLittleMemory,
    UserCodeError,
    user_frames,
)

STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def translating() -> Iterator[None]:
    """The context in which an error that was not raised on purpose becomes the one to show."""
    try:
        yield
    except ScalewiseError:
        raise
    except Exception as error:
        raise translated(error) from error


def translated(error: Exception) -> ScalewiseError:
    """The error to show for one that was not raised on purpose."""
    message = str(error)
    if "deterministic" in message and isinstance(error, RuntimeError):
        operation = message.split(" does not have")[0]
        return TaskError(
            f"{operation} has no deterministic version, so its result would not repeat; replace it in the model, or "
            f"give up exactness with --reduce allreduce"
        )
    if isinstance(error, IndexError) and message.startswith("Target "):
        return DataError(
            f"labels must be below the number of the model's outputs: {message}; correct them or the model"
        )
    if message.startswith("DataLoader worker"):  # torch raises it wherever the step is when the process dies
        return ProcessFailed(f"a loader process died: {message.splitlines()[0].strip()} continue with --resume")
    if isinstance(error, OSError) and error.errno in STORAGE_FULL:
        return CheckpointError(f"the run could not be written: {error}; free disk space and continue with --resume")
    if isinstance(error, dist.DistError) or ("gloo" in message.lower() and isinstance(error, RuntimeError)):
        return LostContact(f"contact with another process was lost: {HEARTBEAT.lost or message.splitlines()[0]}")
    if is_out_of_memory(error):
        words = (message or type(error).__name__).splitlines()[0]
        return TooLittleMemory(
            f"a step must fit into memory, got: {words}; lower --worker-batch, or pass it through the "
            f"model in parts with --micro-batch (`scalewise measure` finds the largest that fits)"
        )
    return UserCodeError(f"training failed:\n{user_frames(error)}")
