"""Sets of processes."""

from scalewise.horovod.processes import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_by_id,
    process_sets,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "process_set_by_id",
    "process_sets",
    "remove_process_set",
]
