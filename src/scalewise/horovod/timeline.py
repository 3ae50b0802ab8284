"""Horovod's timeline: when each collective was asked for, agreed upon and run, for chrome://tracing or Perfetto.

Process 0 writes it, event by event, so that it can be read while the job runs. Every name of a collective is a row.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TextIO


class Timeline:
    """A trace in Chrome's format; nothing is written before `begin` and after `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._mark_cycles = False
        self._start = 0
        self._rows: dict[str, int] = {}

    def begin(self, path: Path, mark_cycles: bool) -> None:
        """Write a timeline from now on, in place of one that is under way."""
        self.end()
        with self._lock:
            self._mark_cycles, self._rows = mark_cycles, {}
            self._start = time.perf_counter_ns()
            self._file = path.open("w")
            began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._file.write("[\n" + json.dumps({"name": "start", "ph": "M", "pid": 0, "args": began}))
            self._file.flush()

    def end(self) -> None:
        """End the file, if there is one; it is then valid JSON."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def span(self, row: str, name: str, begun: int) -> None:
        """Note what began then (`time.perf_counter_ns`) and ends now."""
        now = time.perf_counter_ns()
        with self._lock:
            if self._file is None:
                return
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                self._write({"name": "process_name", "ph": "M", "args": {"name": row}}, self._rows[row])
            times = {"ts": (begun - self._start) / 1e3, "dur": (now - begun) / 1e3}
            self._write({"name": name, "ph": "X", **times}, self._rows[row])

    def cycle(self) -> None:
        """Note a round of the agreement, if the timeline asks for them."""
        with self._lock:
            if self._mark_cycles:
                at = (time.perf_counter_ns() - self._start) / 1e3
                self._write({"name": "CYCLE_START", "ph": "i", "ts": at, "s": "g"}, 0)

    def _write(self, event: dict[str, object], row: int) -> None:
        if self._file is not None:
            self._file.write(",\n" + json.dumps({**event, "pid": row, "tid": 0}))
            self._file.flush()


timeline = Timeline()
