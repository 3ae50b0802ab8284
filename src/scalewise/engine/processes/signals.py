"""Stop signals: the first SIGINT or SIGTERM saves the state, the second one ends the process.

`stopping` installs that for a block of code. `Stop` passes the request on to the training that is running. Python
allows signal handlers in the main thread only: in any other thread the contexts of this module do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A training that stops after the step once its signal is set."""

    signal: int


@dataclass
class Stop:
    """A request to stop: the signal's number, 0 before it arrives, and the training that stops on it."""

    signal: int = 0
    training: Stoppable | None = None

    def ask(self, number: int) -> None:
        """Stop after the current step."""
        self.signal = number
        if self.training is not None:
            self.training.signal = number

    @contextmanager
    def of(self, training: Stoppable) -> Iterator[None]:
        """Pass the request on to this training, also one that arrived before."""
        self.training, training.signal = training, self.signal
        try:
            yield
        finally:
            self.training = None


@contextmanager
def stopping(ask: Callable[[int], None], ended: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Call `ask`, in the signal handler, with the first stop signal; a second does what it does without this.

    So does the first where `ended` says that nothing is left to save.
    """
    with restored(STOP_SIGNALS) as put_back:

        def handle(number: int, frame: FrameType | None) -> None:
            put_back()
            if ended():
                signal.raise_signal(number)
            else:
                ask(number)

        _handle(STOP_SIGNALS, handle)
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Hold stop signals back until the block has ended.

    A signal mask does not: another thread would receive the signal, and Python would hand it to this one.
    """
    arrived: list[int] = []
    try:
        with restored(STOP_SIGNALS):
            _handle(STOP_SIGNALS, lambda number, frame: arrived.append(number))
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def restored(numbers: Sequence[signal.Signals]) -> Iterator[Callable[[], None]]:
    """Put the present handlers back at the end of the block; gives the function that does so earlier."""
    before = {number: signal.getsignal(number) for number in numbers}

    def put_back() -> None:
        for number, handler in before.items():
            if handler is not None and _in_main_thread():  # None: installed by other code than Python
                signal.signal(number, handler)

    try:
        yield put_back
    finally:
        put_back()


def _handle(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> None:
    if _in_main_thread():
        for number in numbers:
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def name(number: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(number).name
