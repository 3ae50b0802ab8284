"""Process-wide settings that a recipe's bytes depend on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from scalewise.recipe import Recipe

ALLOW, REFUSE = 0, 2  # operations without a deterministic version: torch's debug modes


@contextmanager
def numerics(recipe: Recipe, device: torch.device, exact: bool) -> Iterator[None]:
    """Threads and deterministic kernels as the recipe needs them; put back afterwards."""
    assert recipe.threads is not None
    before = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        _set(recipe.threads, REFUSE if exact else ALLOW, False, False)
        if recipe.compile:
            torch.use_deterministic_algorithms(exact)  # imports torch's compiler and tells it too
        yield
    finally:
        if not sys.is_finalizing():  # a generator that was never finished is closed when Python ends
            _set(*before)


def _set(threads: int, unrepeatable: int, fill: bool, benchmark: bool) -> None:
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(unrepeatable)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = benchmark
