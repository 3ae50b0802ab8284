"""The errors that scripts catch."""

from scalewise.errors import LostContact, ScalewiseError


class HorovodInternalError(LostContact, RuntimeError):
    """A collective failed on this process, and so on all: tensors that do not fit, or a process that is gone."""


class HostsUpdatedInterrupt(ScalewiseError, RuntimeError):
    """Machines came or went. torchrun restarts the processes then, so nothing here raises it; scripts may catch it."""
