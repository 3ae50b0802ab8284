"""How fast the devices, the links and the scaling are here, and what each kind of parallelism costs.

May import: what `runs` may.
Public: `devices.devices`, `collectives.collectives`, `scaling.scaling`, `parallelism.parallelism`; each stores its
report. Beside them `workloads` (what is timed on a device), `payload` (bytes sent) and `common`
(checks, topology, hosts, the folder).
"""
