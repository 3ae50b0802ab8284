"""Small helpers: what is built in, and variables of the environment for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from scalewise.horovod.processes import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = ["ccl_built", "ddl_built", "env", "gloo_built", "mpi_built", "nccl_built", "num_rank_is_power_2"]


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
