"""The words that Horovod's scripts use: reductions, and the errors that they may catch."""

from __future__ import annotations

from enum import IntEnum

from scalewise.errors import LostContact, ScalewiseError


class ReduceOp(IntEnum):
    """How values of several processes become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class HorovodInternalError(LostContact, RuntimeError):
    """A collective failed on this process, and so on all: tensors that do not fit, or a process that is gone."""


class HostsUpdatedInterrupt(ScalewiseError, RuntimeError):
    """Machines came or went. torchrun restarts the processes then, so nothing here raises it; scripts may catch it."""


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """The reduction, also from `average`, which older scripts give.

    >>> chosen(None, None).name, chosen(None, False).name
    ('Average', 'Sum')
    """
    if average is None:
        return ReduceOp.Average if op is None else ReduceOp(op)
    if op is not None:
        raise ValueError(f"give op or average, not both; got op={ReduceOp(op).name} and average={average}")
    return ReduceOp.Average if average else ReduceOp.Sum
