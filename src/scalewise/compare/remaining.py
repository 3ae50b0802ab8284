"""How long a comparison will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from scalewise.compare.jobs import Job, Message, Outcome, Progress


class Remaining:
    """Seconds left for some jobs on some processes, from what has been seen of them."""

    def __init__(self, jobs: Sequence[Job], processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = {job.name: job for job in jobs}
        self._processes, self._clock = processes, clock
        self._began: dict[str, tuple[float, int]] = {}  # when a run was first heard of, and its step then
        self._running: dict[str, tuple[float, float]] = {}  # seconds a run has taken since, and will take in all
        self._ended: dict[tuple[str, int], list[float]] = {}  # seconds of runs by line

    def observe(self, message: Message) -> None:
        """Take note of a progress or an outcome."""
        name = message.job.name
        if isinstance(message, Progress):
            now = self._clock()
            began, step = self._began.setdefault(name, (now, message.step))
            if message.step > step:
                taken = now - began
                self._running[name] = taken, taken * (message.steps - step) / (message.step - step)
            return
        self._open.pop(name, None)
        self._running.pop(name, None)
        if isinstance(message, Outcome) and message.result is not None and not message.stored:
            self._ended.setdefault(message.job.line.key, []).append(message.result["seconds"])

    def seconds(self) -> float | None:
        """The work that is left, shared out; None before anything is known."""
        known = [*(value for values in self._ended.values() for value in values)]
        known = known or [total for _, total in self._running.values()]
        if not known or not self._open:
            return None if self._open else 0.0
        typical = sum(known) / len(known)
        return sum(self._left(name, job, typical) for name, job in self._open.items()) / self._processes

    def _left(self, name: str, job: Job, typical: float) -> float:
        if name in self._running:
            taken, total = self._running[name]
            return max(0.0, total - taken)
        ended = self._ended.get(job.line.key)
        return sum(ended) / len(ended) if ended else typical
