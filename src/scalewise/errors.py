"""Everything that scalewise raises on purpose, with the exit code that the command line gives it.

ScalewiseError              1  it ran and failed
├── UsageError              2  wrong usage or bad input: nothing was written
│   ├── RecipeError            a recipe that is not valid
│   ├── TaskError              a task that cannot be loaded or trained
│   ├── DataError              data that are missing, damaged or out of range
│   ├── PlacementError         processes or devices that do not fit the recipe
│   ├── RunFolderError         a run folder that is in use, missing, or of another run
│   └── MissingExtra           a library that an extra of scalewise installs
├── NonFiniteLoss           1  the loss became infinite or not a number
│   └── NonFiniteGradient      the loss did not, its gradient did
├── NonFiniteData           1  a sample holds a number that is not finite
├── UserCodeError           1  the task's own code raised
├── CheckpointError         1  a checkpoint or record could not be read or written
│   └── DamagedCheckpoint      it is not what was written; an older one may be
├── ReplicasDiffer          1  processes that must hold the same weights do not
├── ProcessFailed           1  one of the processes died
├── TooLittleMemory         1  one sample's training does not fit into memory
├── LostContact             1  another process stopped responding
├── TargetMissed            3  it ran but did not reach the target
├── Interrupted       130/143  a signal stopped it; the state is saved
└── Failed                  ?  another process's failure, with its message and exit code
"""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path


class ScalewiseError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UsageError(ScalewiseError):
    """Wrong usage or bad input."""

    exit_code = 2


class RecipeError(UsageError, ValueError):
    """A recipe that is not valid."""


class TaskError(UsageError, ValueError):
    """A task that cannot be loaded or trained."""


class DataError(UsageError, ValueError):
    """Data that are missing, damaged or out of range."""


class PlacementError(UsageError, ValueError):
    """Processes or devices that do not fit the recipe."""


class RunFolderError(UsageError):
    """A run folder that is in use, missing, or of another run."""


@dataclass(frozen=True)
class Place:
    """Where in a training something went wrong: the step, counted from 1, and what of the rest is known."""

    step: int
    worker: int | None = None
    parameter: str | None = None
    samples: tuple[int, ...] = ()


class MissingExtra(UsageError, ImportError):
    """A library is not installed; the message holds the command that installs it."""


class NonFiniteLoss(ScalewiseError):
    """The loss became infinite or not a number."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place


class NonFiniteGradient(NonFiniteLoss):
    """A gradient became infinite or not a number, of a loss that did not."""


class NonFiniteData(ScalewiseError):
    """A sample holds a number that is not finite."""


class UserCodeError(ScalewiseError):
    """The task's own code raised; the message holds the user's frames only."""


class CheckpointError(ScalewiseError):
    """A checkpoint or record could not be read or written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was written."""


class ReplicasDiffer(ScalewiseError):
    """Processes that must hold the same weights do not."""


class ProcessFailed(ScalewiseError):
    """One of the processes died."""


class TooLittleMemory(ScalewiseError):
    """A training step does not fit into memory."""


class LostContact(ScalewiseError):
    """Another process stopped responding; its own error says why."""


class TargetMissed(ScalewiseError):
    """It ran but did not reach the target."""

    exit_code = 3


class Interrupted(ScalewiseError):
    """A signal stopped a run, whose state is saved."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


class Failed(ScalewiseError):
    """Another process's failure, with its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


OURS = Path(__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))


def user_frames(error: BaseException) -> str:
    """The frames of the user's own files and the message; libraries' and our frames are left out."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}\n    {frame.line}\n" for frame in frames]
    return "".join(lines) + f"{type(error).__name__}: {error}"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    library = "site-packages" in path.parts or "dist-packages" in path.parts or filename.startswith("<frozen")
    return not library and not {OURS, STANDARD} & {*path.parents}
