"""Where things can be computed here: the CPU on some threads, and accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from scalewise.engine.placement import DeviceName, available_cores


@dataclass(frozen=True)
class Place:
    """A device, and the CPU threads that compute or, for an accelerator, feed it."""

    device: DeviceName
    threads: int

    @property
    def name(self) -> str:
        """For people."""
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
