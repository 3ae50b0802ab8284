"""Small helpers: what is built in, and variables of the environment for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from scalewise.horovod import processes


def mpi_built(verbose: bool = False) -> bool:
    """No."""
    return processes.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Yes."""
    return processes.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version, or 0."""
    return processes.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """No."""
    return processes.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """No."""
    return processes.ccl_built()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum can run on this number of processes."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set variables of the environment, and set them back at the end; None leaves one as it is."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
