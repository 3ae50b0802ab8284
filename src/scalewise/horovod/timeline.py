"""Horovod's timeline: when each collective was asked for, agreed upon and run, for chrome://tracing or Perfetto.

Process 0 writes it, event by event, so that it can be read while the job runs. Every name of a collective is a row.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path


class Timeline:
    """A trace in Chrome's format, under way."""

    def __init__(self, path: Path, mark_cycles: bool) -> None:
        self.mark_cycles = mark_cycles
        self._start = time.perf_counter_ns()
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._file = path.open("w")
        self._file.write("[\n")
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._file.write(json.dumps({"name": "start", "ph": "M", "pid": 0, "args": began}))
        self._file.flush()

    def span(self, row: str, name: str, begun: int) -> None:
        """Note what began then and ends now."""
        now = time.perf_counter_ns()
        events: list[dict[str, object]] = []
        with self._lock:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                events.append({"name": "process_name", "ph": "M", "args": {"name": row}})
            events.append({"name": name, "ph": "X", "ts": (begun - self._start) / 1e3, "dur": (now - begun) / 1e3})
            for event in events:
                self._write({**event, "pid": self._rows[row], "tid": 0})

    def cycle(self) -> None:
        """Note that processes tell each other what they ask for."""
        with self._lock:
            at = (time.perf_counter_ns() - self._start) / 1e3
            self._write({"name": "CYCLE_START", "ph": "i", "ts": at, "pid": 0, "tid": 0, "s": "g"})

    def _write(self, event: dict[str, object]) -> None:
        if not self._file.closed:
            self._file.write(",\n" + json.dumps(event))
            self._file.flush()

    def close(self) -> None:
        """End the file, which is then valid JSON."""
        with self._lock:
            self._file.write("\n]\n")
            self._file.close()


_under_way: Timeline | None = None


def begin(path: Path, mark_cycles: bool) -> None:
    """Write a timeline from now on, in place of one that is under way."""
    global _under_way
    end()
    _under_way = Timeline(path, mark_cycles)


def end() -> None:
    """End the timeline, if there is one."""
    global _under_way
    ended, _under_way = _under_way, None
    if ended is not None:
        ended.close()


def span(row: str, name: str, begun: int) -> None:
    """Note what began then (`time.perf_counter_ns`) and ends now, if a timeline is written."""
    if (timeline := _under_way) is not None:
        timeline.span(row, name, begun)


def cycle() -> None:
    """Note a round of the agreement, if a timeline is written and asks for them."""
    if (timeline := _under_way) is not None and timeline.mark_cycles:
        timeline.cycle()
