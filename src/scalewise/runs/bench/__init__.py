"""How fast the devices, the links and the scaling are here, and what each kind of parallelism costs.

May import: what `runs` may.
Public: `devices.devices`, `collectives.collectives`, `scaling.scaling`, `parallelism.parallelism`; each stores its
report. Beside them `operations` (what is timed on a device), `cnn` (the training that is), `payload` (bytes sent),
`hosts` (network namespaces as machines) and `common` (checks, topology, the folder).
"""
