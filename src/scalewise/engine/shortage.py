"""Telling memory that was not there from every other error."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import torch

# What torch, oneDNN and the C++ library say when an allocation fails; they have no type of their own for it on a CPU.
SAID = (
    "DefaultCPUAllocator",
    "bad_alloc",
    "bad allocation",
    "annot allocate memory",
    "can't allocate memory",
    "out of memory",
    "not enough memory",
    "can't start new thread",
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
)


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or one that it came from, is a lack of memory."""
    return any(_is_one(link) for link in _chain(error))


def tells_of_shortage(said: str) -> bool:
    """Whether the last words of a process are about memory."""
    return any(words in said for words in SAID)


def _is_one(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and tells_of_shortage(str(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
