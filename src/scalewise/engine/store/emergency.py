"""Emergency checkpoints: the state after the last whole step, saved by a process whose peer has died.

Every process holds all of it, so one that is left is enough. It writes a checkpoint like any other, with the newest
records besides: those that the first process had not yet written may have died with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError

from scalewise import records
from scalewise.engine.loop import Training
from scalewise.engine.store import checkpoint
from scalewise.engine.store.shards import verified_index
from scalewise.errors import ScalewiseError
from scalewise.records import Record, Step

RECORDS = 256  # kept in memory: more than the first process holds back before it writes


def save(training: Training, folder: Path, newest: Iterable[Record]) -> int | None:
    """Write a checkpoint of the last whole step; its number, or None where one process does not have all of it.

    Arguments:
        training: one that has broken off, and will not continue.
        folder: where checkpoints are.
        newest: the last records of this run, as far as they exist.
    """
    try:
        waiting, entries = training.settle(), training.strategy.emergency_state()
        if waiting is None or entries is None or training.strategy.non_finite() is not None:
            return None
        lines = [records.line(record) for record in (*newest, *waiting)]
        checkpoint.save_alone(training, entries, folder, lines)
    except (ScalewiseError, OSError, SafetensorError):  # an older checkpoint exists; report the first failure instead
        return None
    return training.progress.step


def restore_records(metrics: Path, stored: Path) -> None:
    """Put the records that came with a checkpoint in the place of those from their first step on."""
    if not stored.exists():
        return
    found = [json.loads(line) for line in verified_index(stored).records]  # each a record, which is verified too
    while found and found[0]["kind"] != Step.kind:  # its step was before the kept ones
        found.pop(0)
    if not found:
        return
    before = records.read(metrics) if metrics.exists() else iter(())
    kept = [record for record in before if record["step"] < found[0]["step"]]
    records.write_atomically(metrics, "".join(json.dumps(record) + "\n" for record in (*kept, *found)))
