"""Sets of processes."""

from scalewise.horovod.processes import ProcessSet as ProcessSet
from scalewise.horovod.processes import add_process_set as add_process_set
from scalewise.horovod.processes import global_process_set as global_process_set
from scalewise.horovod.processes import process_set_by_id as process_set_by_id
from scalewise.horovod.processes import process_sets as process_sets
from scalewise.horovod.processes import remove_process_set as remove_process_set
