"""The errors that scripts catch."""

from scalewise.horovod.operations import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
