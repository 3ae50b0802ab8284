"""LARS and LAMB in C, compiled when first used on a machine that has a compiler; elsewhere torch's kernels do it.

Compiling takes a fraction of a second in each process, leaves no file behind, and needs nothing but a C compiler ($CC,
cc, gcc or clang). One call does all layers: the norms of a layer, then its update, while the layer is in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

SOURCE = Path(__file__).with_name("layerwise.c")
NAMES = {torch.float32: "float", torch.float64: "double"}
FLAGS = ("-O3", "-shared", "-fPIC", "-fno-math-errno", "-lm")
VECTORS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}  # what torch found this processor to have
COMPILE_SECONDS = 60.0
GRADIENTS = 1  # the role that only is read
ELEMENTS_PER_THREAD = 1 << 19  # fewer are not worth a thread


@functools.cache
def compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled functions for numbers of this kind, or None where they cannot be compiled."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform == "win32" or dtype not in NAMES:
        return None
    vectors = VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())
    with TemporaryDirectory() as folder:
        target = Path(folder) / "layerwise.so"
        words = [compiler, f"-DREAL={NAMES[dtype]}", *vectors, str(SOURCE), "-o", str(target), *FLAGS]
        try:
            subprocess.run(words, capture_output=True, check=True, timeout=COMPILE_SECONDS)
            return ctypes.CDLL(str(target))  # stays loaded when the file is gone
        except (OSError, subprocess.SubprocessError):
            return None


class Layers:
    """Some layers as C sees them: each one's size and decay, and in each step where its memory is."""

    def __init__(self, sizes: Sequence[int], decays: Sequence[float]) -> None:
        self._elements, self._addresses = sum(sizes), ctypes.c_void_p * len(sizes)
        self._sizes, self._decays = (ctypes.c_long * len(sizes))(*sizes), doubles(decays)

    def call(
        self,
        function: ctypes._NamedFuncPointer,
        roles: Sequence[Sequence[Tensor]],
        per_layer: Sequence[ctypes.Array[ctypes.c_double]],
        *numbers: float,
    ) -> None:
        """Update all layers by a compiled rule, on as many threads as torch has where that pays.

        `roles` are weights, gradients and what else the rule reads and writes, each of every layer.
        """
        addresses = [self._addresses(*[tensor.data_ptr() for tensor in tensors]) for tensors in roles]
        arrays: list[ctypes.Array[Any]] = [*addresses, self._sizes, self._decays, *per_layer]
        values = [ctypes.c_double(number) for number in numbers]

        def update(first: int, last: int) -> None:
            cut = [ctypes.byref(array, first * ctypes.sizeof(array._type_)) for array in arrays]
            function(ctypes.c_long(last - first), *cut, *values)

        shares = self._shares()
        helpers = [threading.Thread(target=update, args=share) for share in shares[1:]]
        for helper in helpers:
            helper.start()
        update(*shares[0])
        for helper in helpers:
            helper.join()
        for number, tensors in enumerate(roles):
            if number != GRADIENTS:
                increment_version(tensors)  # so that autograd notices

    def _shares(self) -> list[tuple[int, int]]:
        """Neighbouring layers for each thread, about as many elements for one as for another."""
        total = self._elements
        threads = max(1, min(torch.get_num_threads(), total // ELEMENTS_PER_THREAD))
        if threads == 1:
            return [(0, len(self._sizes))]
        shares: list[tuple[int, int]] = []
        first = elements = 0
        for layer, size in enumerate(self._sizes):
            elements += size
            if elements * threads >= total * (len(shares) + 1):
                shares.append((first, layer + 1))
                first = layer + 1
        return shares


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    """Numbers as C sees them."""
    return (ctypes.c_double * len(values))(*values)
