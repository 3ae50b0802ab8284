"""Operations that training is made of, at any size (arithmetic, bytes, how to run them), and the devices to run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from scalewise.engine.placement import DeviceName, available_cores

ELEMENT_BYTES = 4
CHANNELS, SIDE, KERNEL = 32, 32, 3
Bound = Literal["compute", "memory"]
Run = Callable[[], object]


@dataclass(frozen=True)
class Operation:
    """One operation as a function of its size.

    unit: what the size counts.
    bound: what limits it at large sizes, so what its speed is held against.
    flops: floating-point operations, an addition and a multiplication being two.
    inputs, outputs: elements that come in and go out: what would have to be carried to a device and back.
    prepare: makes the data; the function does the operation once.
    """

    name: str
    unit: str
    bound: Bound
    sizes: tuple[int, ...]
    flops: Callable[[int], int]
    inputs: Callable[[int], int]
    outputs: Callable[[int], int]
    prepare: Callable[[int, torch.device], Run]

    def moved_bytes(self, size: int) -> int:
        """Bytes of what comes in and goes out."""
        return ELEMENT_BYTES * (self.inputs(size) + self.outputs(size))

    def work(self, size: int) -> int:
        """What its time grows with: its arithmetic or its bytes."""
        return self.flops(size) if self.bound == "compute" else self.moved_bytes(size)


def _square(side: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    return torch.randn(side, side, generator=generator).to(device)


def _product(side: int, device: torch.device) -> Run:
    left, right = _square(side, device), _square(side, device)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _inverse(side: int, device: torch.device) -> Run:
    matrix = _square(side, device) + side * torch.eye(side, device=device)  # far from singular
    return lambda: torch.linalg.inv(matrix)


def _convolution(images: int, device: torch.device) -> Run:
    x = torch.randn(images, CHANNELS, SIDE, SIDE, device=device)
    weight = torch.randn(CHANNELS, CHANNELS, KERNEL, KERNEL, device=device)
    return lambda: F.conv2d(x, weight, padding=KERNEL // 2)


def _elementwise(elements: int, device: torch.device) -> Run:
    x, y = torch.randn(elements, device=device), torch.randn(elements, device=device)
    out = torch.empty_like(x)
    return lambda: torch.add(x, y, out=out)


def _reduction(elements: int, device: torch.device) -> Run:
    x = torch.randn(elements, device=device)
    return lambda: x.sum()


def _copy(elements: int, device: torch.device) -> Run:
    x = torch.randn(elements, device=device)
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


_SIDES = (32, 64, 128, 256, 512, 1024)
_ELEMENTS = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_IMAGE = CHANNELS * SIDE * SIDE

OPERATIONS = (
    Operation(
        "matrix product", "side", "compute", _SIDES,
        lambda n: 2 * n**3, lambda n: 2 * n**2, lambda n: n**2, _product,
    ),
    Operation(
        "matrix inverse", "side", "compute", _SIDES[:-1],
        lambda n: 2 * n**3, lambda n: n**2, lambda n: n**2, _inverse,
    ),
    Operation(
        f"convolution {KERNEL}×{KERNEL}", "images", "compute", (1, 4, 16, 64),
        lambda n: 2 * n * _IMAGE * CHANNELS * KERNEL**2, lambda n: n * _IMAGE, lambda n: n * _IMAGE, _convolution,
    ),
    Operation("elementwise", "elements", "memory", _ELEMENTS, lambda n: n, lambda n: 2 * n, lambda n: n, _elementwise),
    Operation("reduction", "elements", "memory", _ELEMENTS, lambda n: n, lambda n: n, lambda n: 1, _reduction),
    Operation("copy in memory", "elements", "memory", _ELEMENTS, lambda n: 0, lambda n: n, lambda n: n, _copy),
)  # fmt: skip


def _to_device(elements: int, device: torch.device) -> Run:
    x = torch.randn(elements)
    out = torch.empty(elements, device=device)
    return lambda: out.copy_(x)


def _from_device(elements: int, device: torch.device) -> Run:
    x = torch.randn(elements, device=device)
    out = torch.empty(elements)
    return lambda: out.copy_(x)


# Only where host and device have memories of their own. Carried in one direction at a time, from and to ordinary
# (not pinned) memory, as `tensor.to(device)` does; `outputs` counts nothing, so that the bytes are those carried.
TRANSFERS = tuple(
    Operation(name, "elements", "memory", _ELEMENTS, lambda n: 0, lambda n: n, lambda n: 0, prepare)
    for name, prepare in (("copy to device", _to_device), ("copy from device", _from_device))
)


@dataclass(frozen=True)
class Place:
    """A device, and the CPU threads that compute or, for an accelerator, feed it."""

    device: DeviceName
    threads: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return self.device if self.device != "cpu" else f"cpu, {self.threads} thread{'' if self.threads == 1 else 's'}"

    @contextmanager
    def used(self) -> Iterator[torch.device]:
        """The context in which torch computes there."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield torch.device(self.device)
        finally:
            torch.set_num_threads(before)


def places(cores: int | None = None) -> list[Place]:
    """The CPU on 1, 2, 4, … and all cores, then what accelerators there are."""
    most = cores or available_cores()
    powers = [1 << power for power in range(most.bit_length())]
    found = [Place("cpu", threads) for threads in sorted({*powers, most}) if threads <= most]
    if torch.cuda.is_available():
        found.append(Place("cuda", most))
    if torch.backends.mps.is_available():
        found.append(Place("mps", most))
    return found


def missing(found: list[Place]) -> list[str]:
    """What could not be measured here, and why."""
    notes = []
    if all(place.device == "cpu" for place in found):
        notes.append("no CUDA or MPS device here: copies to a device and what is worth sending there were not measured")
    if len(found) == 1:
        notes.append("one core here: what more threads bring was not measured")
    return notes
